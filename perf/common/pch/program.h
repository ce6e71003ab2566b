// SPDX-License-Identifier: Apache-2.0
// JSON and what most programs read, compiled once for each library or group of programs (meson's cpp_pch). Sources
// include what they use all the same: tools/build --debug goes without this header.

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>
