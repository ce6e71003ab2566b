// SPDX-License-Identifier: Apache-2.0
// The adaptive replication paper's Algorithm 1 as its listing has it, to check the library's counts and to compare
// times.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace perf {

// Algorithm 1 line by line, with numpy's floor, maximum, argmax and argmin (first of equals). The listing has the
// decrement of diff outside the if, and so has this function: with it inside, an expert with one replica would be
// chosen for ever.
inline std::vector<int32_t> algorithm_1(const std::vector<double>& popularity, int32_t slots) {
  double sum = 0;
  for (const double p : popularity) sum += p;
  std::vector<double> counts, diff;
  for (const double p : popularity) {
    const double goal = p / sum * slots;
    counts.push_back(std::floor(std::max(goal, 1.0)));
    diff.push_back(counts.back() - goal);
  }
  const auto total = [&] { return std::accumulate(counts.begin(), counts.end(), 0.0); };
  while (total() > slots) {
    const auto i = static_cast<size_t>(std::max_element(diff.begin(), diff.end()) - diff.begin());
    if (counts[i] > 1) counts[i] -= 1;
    diff[i] -= 1;
  }
  while (total() < slots) {
    const auto i = static_cast<size_t>(std::min_element(diff.begin(), diff.end()) - diff.begin());
    counts[i] += 1;
    diff[i] += 1;
  }
  return {counts.begin(), counts.end()};
}

}  // namespace perf
