// SPDX-License-Identifier: Apache-2.0
// GoogleTest and what most tests read, compiled once for each program or library of several sources (meson's cpp_pch).
// Sources include what they use all the same: tools/build --debug goes without this header.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>
