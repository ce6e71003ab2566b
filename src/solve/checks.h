// SPDX-License-Identifier: Apache-2.0
// Checks that the solvers share. `name` is the caller's name of a value: "problem.n_ranks".
#pragma once

#include <cmath>
#include <initializer_list>
#include <limits>

#include "src/base/status.h"

namespace moeccl::solve {

inline Status between(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return {};
  return error(moecclInvalidArgument, "{} is {}: between {} and {} are possible", name, value, least, most);
}

// Checks that each of map[n] is below `bound`.
inline Status indices(const char* name, const int32_t* map, int32_t n, int32_t bound) {
  for (int32_t i = 0; map != nullptr && i < n; ++i)
    if (map[i] < 0 || map[i] >= bound)
      return error(moecclInvalidArgument, "{}[{}] is {}: between 0 and {} are possible", name, i, map[i], bound - 1);
  return {};
}

struct Number {
  const char* name;
  double value;
};
constexpr double kMostNumber = 1e30;  // products of a few do not overflow
inline Status at_least_0(std::initializer_list<Number> numbers, double most = kMostNumber, const char* what = "") {
  for (const Number& n : numbers)
    if (!(n.value >= 0) || n.value > most)
      return error(moecclInvalidArgument, "{} is {}: give {}0 to {}", n.name, n.value, what, most);
  return {};
}
inline Status above_0(std::initializer_list<Number> numbers) {
  for (const Number& n : numbers)
    if (!(n.value > 0) || n.value > kMostNumber)
      return error(moecclInvalidArgument, "{} is {}: give a number above 0, at most {}", n.name, n.value, kMostNumber);
  return {};
}
inline Status times(std::initializer_list<Number> numbers) { return at_least_0(numbers, 1e12, "a time of "); }

// Checks problem.min_gain of every solver.
inline Status gain_share(double min_gain) {
  if (std::isfinite(min_gain) && min_gain <= 1) return {};
  return error(moecclInvalidArgument, "problem.min_gain is {}: give a share below 1", min_gain);
}

}  // namespace moeccl::solve
