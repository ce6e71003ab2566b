// SPDX-License-Identifier: Apache-2.0
// CLI11, JSON and what most programs read, compiled once for each program or library of several sources (meson's
// cpp_pch). Sources include what they use all the same: tools/build --debug goes without this header.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
