// SPDX-License-Identifier: Apache-2.0
// `moeccl calibrate`: measures this machine's links and plans and writes the profile.
#pragma once

#include "perf/common/cli.h"

const perf::App* add_calibrate(perf::App& app);
int run_calibrate();
