// SPDX-License-Identifier: Apache-2.0
// `moeccl topo` and `moeccl doctor`.
#pragma once

#include "perf/common/cli.h"

perf::App* add_topo(perf::App& app);
int run_topo();
perf::App* add_doctor(perf::App& app);
int run_doctor();
