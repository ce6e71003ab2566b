// SPDX-License-Identifier: Apache-2.0
// Headers that nearly every source of the library reads, compiled once (meson's cpp_pch). Sources include what they use
// all the same: the sanitizer builds go without this header.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/base/status.h"
