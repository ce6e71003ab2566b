// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_net/bounce.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace moeccl::transport::cuda_net {
namespace {

TEST(Bounce, HasRoomForAllItsBytesWhenEmpty) {
  std::vector<std::byte> memory(4096);
  Bounce b;
  b.use(memory.data(), memory.size());
  std::byte* all = b.take(4096);
  ASSERT_EQ(all, memory.data());
  EXPECT_EQ(b.take(1), nullptr);
  b.give_back(all);
  EXPECT_TRUE(b.empty());
  EXPECT_EQ(b.take(4097), nullptr);
  std::byte* first = b.take(1000);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(b.take(3100), nullptr) << "nothing is cut";
  EXPECT_NE(b.take(3000), nullptr);
}

TEST(Bounce, PiecesNeverOverlapWhateverTheOrderInWhichTheyComeBack) {
  std::mt19937_64 random(1);
  std::vector<std::byte> memory(64 << 10);
  Bounce b;
  b.use(memory.data(), memory.size());
  std::map<std::byte*, size_t> out;
  size_t given = 0;
  for (int i = 0; i < 100'000; ++i) {
    if (random() % 2 == 0 && !out.empty()) {
      auto it = out.begin();
      std::advance(it, static_cast<ptrdiff_t>(random() % out.size()));
      b.give_back(it->first);
      out.erase(it);
      continue;
    }
    const size_t bytes = 1 + random() % (random() % 8 == 0 ? 60'000 : 3000);
    std::byte* p = b.take(bytes);
    if (p == nullptr) continue;
    ++given;
    ASSERT_GE(p, memory.data());
    ASSERT_LE(p + bytes, memory.data() + memory.size());
    const auto next = out.lower_bound(p);
    const bool behind = next != out.end() && p + bytes > next->first;
    const bool before = next != out.begin() && std::prev(next)->first + std::prev(next)->second > p;
    ASSERT_FALSE(behind || before) << i;
    out[p] = bytes;
  }
  EXPECT_GT(given, 20'000u);
  for (const auto& [p, bytes] : out) b.give_back(p);
  EXPECT_TRUE(b.empty());
  EXPECT_NE(b.take(memory.size()), nullptr);
}

}  // namespace
}  // namespace moeccl::transport::cuda_net
