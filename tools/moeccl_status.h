// SPDX-License-Identifier: Apache-2.0
// `moeccl status` and `moeccl postmortem`.
#pragma once

#include "perf/common/cli.h"

perf::App* add_status(perf::App& app);
int run_status();
perf::App* add_postmortem(perf::App& app);
int run_postmortem();  // 0: a culprit is named; 1: none; 2: a file is no status
