// SPDX-License-Identifier: Apache-2.0
// `moeccl topo` and `moeccl doctor`.
#pragma once

#include <CLI/CLI.hpp>

CLI::App* add_topo(CLI::App& app);
int run_topo();
CLI::App* add_doctor(CLI::App& app);
int run_doctor();
