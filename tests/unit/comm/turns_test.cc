// SPDX-License-Identifier: Apache-2.0
#include "src/comm/turns.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::comm {
namespace {

TEST(Turns, RunInTheOrderOfTheirTickets) {
  constexpr int kThreads = 8, kRounds = 40;
  Turns turns;
  std::vector<std::vector<uint64_t>> tickets(kThreads);
  for (int i = 0; i < kThreads * kRounds; ++i) tickets[static_cast<size_t>(i % kThreads)].push_back(turns.take());
  EXPECT_FALSE(turns.idle());
  std::vector<uint64_t> seen;  // guarded only by the turns
  std::vector<std::thread> threads;
  for (const auto& mine : tickets) {
    threads.emplace_back([&] {
      for (const uint64_t ticket : mine) {
        turns.wait(ticket);
        seen.push_back(ticket);
        turns.end();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  ASSERT_EQ(seen.size(), size_t{kThreads * kRounds});
  for (size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], i);
  EXPECT_TRUE(turns.idle());
}

// As when a communicator is destroyed while a stream's thread leaves its last operation. The sanitizers notice a late
// access.
TEST(Turns, MayBeDestroyedByWhoeverWaitedForTheLast) {
  for (int i = 0; i < moeccl::testing::scaled(300); ++i) {
    auto turns = std::make_unique<Turns>();
    const uint64_t first = turns->take(), second = turns->take(), last = turns->take();
    std::thread a([&turns = *turns, first] {
      turns.wait(first);
      turns.end();
    });
    std::thread b([&turns = *turns, second] {
      turns.wait(second);
      turns.end();
    });
    if (i % 3 == 0) std::this_thread::yield();
    turns->wait(last);
    turns->end();
    turns.reset();
    a.join();
    b.join();
  }
}

}  // namespace
}  // namespace moeccl::comm
