// SPDX-License-Identifier: Apache-2.0
// `moeccl status` and `moeccl postmortem`.
#pragma once

#include <CLI/CLI.hpp>

CLI::App* add_status(CLI::App& app);
int run_status();
CLI::App* add_postmortem(CLI::App& app);
int run_postmortem();  // 0: a culprit is named; 1: none; 2: a file is no status
