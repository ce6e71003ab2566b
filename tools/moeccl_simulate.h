// SPDX-License-Identifier: Apache-2.0
// The subcommand `moeccl simulate`.
#ifndef TOOLS_MOECCL_SIMULATE_H_
#define TOOLS_MOECCL_SIMULATE_H_

#include "perf/common/cli.h"

// Adds the subcommand. If the command line names it, run_simulate() runs it and returns the exit status.
perf::App* add_simulate(perf::App& app);
int run_simulate();

#endif  // TOOLS_MOECCL_SIMULATE_H_
