// SPDX-License-Identifier: Apache-2.0
#include "src/comm/turns.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
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

// After an abort: what runs is waited for, but not its turn, nor work that a stream has not begun.
TEST(Turns, AfterCloseOnlyWhatHasBegunIsWaitedFor) {
  Turns turns;
  const uint64_t running = turns.take();
  (void)turns.take_queued();  // its stream never gets to it
  const uint64_t behind = turns.take_queued();
  EXPECT_TRUE(turns.begin());
  std::atomic<int> state{0};
  std::thread second([&] {
    turns.wait(behind);
    state = 1;
    while (state == 1) std::this_thread::yield();
    turns.end();
  });
  turns.wait(running);
  turns.close();
  while (state == 0) std::this_thread::yield();  // before the first turn has ended
  turns.end();
  EXPECT_FALSE(turns.idle());
  state = 2;
  turns.wait_idle();
  EXPECT_TRUE(turns.idle());
  second.join();
  EXPECT_FALSE(turns.begin()) << "the work that was skipped";
  const uint64_t late = turns.take_queued();
  EXPECT_FALSE(turns.begin());
  turns.wait_idle();
  turns.wait(late + 1);
  EXPECT_TRUE(turns.idle());
}

TEST(Turns, TheWaitForAllCanBeGivenUp) {
  Turns turns;
  const uint64_t ticket = turns.take();
  int asked = 0;
  turns.wait_idle([&asked] { return ++asked == 3; });
  EXPECT_EQ(asked, 3);
  EXPECT_FALSE(turns.idle());
  turns.wait(ticket);
  turns.end();
  turns.wait_idle([] { return false; });
}

// Another thread may still use what this turn would change, and a later turn's end says nothing of an earlier one.
TEST(Turns, AfterCloseATurnThatHasNotComeIsKnown) {
  Turns turns;
  const uint64_t running = turns.take();
  EXPECT_TRUE(turns.wait(running));
  turns.close();
  {
    const Turn late(turns, turns.take());
    EXPECT_FALSE(late.came());
  }
  std::atomic<bool> idle{false};
  std::thread waiter([&] {
    turns.wait_idle();
    idle = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(idle);
  {
    const Turn later(turns, turns.take());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_FALSE(idle) << "the first turn has not ended";
  turns.end();
  waiter.join();
  EXPECT_TRUE(turns.idle());
}

}  // namespace
}  // namespace moeccl::comm
