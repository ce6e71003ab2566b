// SPDX-License-Identifier: Apache-2.0
// The subcommand `moeccl simulate`.
#ifndef TOOLS_MOECCL_SIMULATE_H_
#define TOOLS_MOECCL_SIMULATE_H_

#include <CLI/CLI.hpp>

// Adds the subcommand. If the command line names it, run_simulate() runs it and returns the exit status.
CLI::App* add_simulate(CLI::App& app);
int run_simulate();

#endif  // TOOLS_MOECCL_SIMULATE_H_
