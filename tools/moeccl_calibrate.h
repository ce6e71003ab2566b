// SPDX-License-Identifier: Apache-2.0
// `moeccl calibrate`: measures this machine's links and plans and writes the profile.
#pragma once

#include <CLI/CLI.hpp>

const CLI::App* add_calibrate(CLI::App& app);
int run_calibrate();
