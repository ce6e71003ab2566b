// SPDX-License-Identifier: Apache-2.0
#include "src/routing/expert_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace moeccl::algo {
namespace {

std::vector<int32_t> numbers(int32_t from, size_t n) {
  std::vector<int32_t> v(n);
  std::iota(v.begin(), v.end(), from);
  return v;
}

std::vector<int32_t> sorted(std::vector<int32_t> v) {
  std::sort(v.begin(), v.end());
  return v;
}

TEST(ExpertMap, KeepsTheLatestTokensOverManyCounts) {
  ExpertMap map(numbers(0, 64), 2, 10);
  for (int32_t update = 0; update < 9; ++update) {
    map.note_routing(numbers(update * 6, 6), {});
    const SeenRouting seen = map.take();
    EXPECT_EQ(seen.n_updates, 1u);
    EXPECT_EQ(seen.n_tokens, 3u);
    const int32_t end = update * 6 + 6, begin = std::max(0, end - 20);
    EXPECT_EQ(sorted(seen.topk), numbers(begin, static_cast<size_t>(end - begin))) << "update " << update;
  }
}

TEST(ExpertMap, KeepsTheLastTokensOfAnUpdateThatIsLargerThanItKeeps) {
  ExpertMap map(numbers(0, 64), 2, 4);
  map.note_routing(numbers(0, 6), {});
  map.note_routing(numbers(10, 30), {});
  EXPECT_EQ(sorted(map.take().topk), numbers(32, 8));
  map.note_routing(numbers(50, 2), {});
  EXPECT_EQ(map.take().topk.size(), 8u);
}

TEST(ExpertMap, ATakeBeginsTheSumsAnewAndKeepsTokens) {
  ExpertMap map(numbers(0, 4), 1, 8);
  map.note_routing(numbers(0, 4), {.dims = 3});
  map.note_step(5);
  EXPECT_EQ(map.take().n_steps, 1u);
  const SeenRouting seen = map.take();
  EXPECT_EQ(seen.n_updates, 0u);
  EXPECT_EQ(seen.n_tokens, 0u);
  EXPECT_EQ(seen.n_steps, 0u);
  EXPECT_EQ(seen.steps_us, 0);
  EXPECT_EQ(seen.algorithm.dims, 3u);
  EXPECT_EQ(seen.topk, numbers(0, 4));
}

}  // namespace
}  // namespace moeccl::algo
