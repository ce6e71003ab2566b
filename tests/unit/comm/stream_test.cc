// SPDX-License-Identifier: Apache-2.0
#include "src/comm/stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "src/comm/group.h"

namespace moeccl::comm {
namespace {

constexpr int kTries = 200;

// Puts work on the stream and waits for it, kTries times. Returns how often this thread ran the work.
int run_here(HostStream& stream) {
  int here = 0;
  for (int i = 0; i < kTries; ++i) {
    std::thread::id ran;
    EXPECT_TRUE(stream.enqueue(stream.hold([&] { return ran = std::this_thread::get_id(), Status(); })).ok());
    EXPECT_TRUE(stream.synchronize().ok());
    EXPECT_NE(ran, std::thread::id());
    here += ran == std::this_thread::get_id();
  }
  return here;
}

TEST(HostStream, AWaiterRunsWorkThatHasNotBegun) {
  HostStream stream;
  EXPECT_GT(run_here(stream), 0);  // the stream's thread has to wake first, so nearly always
}

TEST(HostStream, WorkRunsOnTheStreamsThreadWithoutWaitersOrInsideAGroup) {
  HostStream only_its_thread(false);
  EXPECT_EQ(run_here(only_its_thread), 0);
  HostStream stream;
  Group& group = Group::of_this_thread();
  group.start();
  EXPECT_EQ(run_here(stream), 0);
  EXPECT_TRUE(group.cancel());
}

TEST(HostStream, WorkGoesOnWhileNoThreadWaits) {
  HostStream stream;
  std::promise<void> done;
  ASSERT_TRUE(stream.enqueue(stream.hold([&] { return done.set_value(), Status(); })).ok());
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

TEST(HostStream, RunsInOrderAndOneAtATimeWithManyWaiters) {
  constexpr int kWaiters = 3, kWorks = 2000;
  HostStream stream;
  std::vector<int> seen;  // guarded only by the stream
  std::atomic<bool> ended = false;
  std::vector<std::thread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&] {
      while (!ended.load()) EXPECT_TRUE(stream.synchronize().ok());
    });
  }
  for (int i = 0; i < kWorks; ++i)
    EXPECT_TRUE(stream.enqueue(stream.hold([&seen, i] { return seen.push_back(i), Status(); })).ok());
  EXPECT_TRUE(stream.synchronize().ok());
  ended = true;
  for (std::thread& t : waiters) t.join();
  ASSERT_EQ(seen.size(), size_t{kWorks});
  for (int i = 0; i < kWorks; ++i) ASSERT_EQ(seen[static_cast<size_t>(i)], i);
}

TEST(HostStream, AWaiterGetsTheFailureOfWorkThatItRan) {
  HostStream stream;
  for (int i = 0; i < kTries; ++i) {
    ASSERT_TRUE(stream.enqueue(stream.hold([] { return error(moecclInternalError, "planted"); })).ok());
    EXPECT_EQ(stream.synchronize().code(), moecclInternalError);
    EXPECT_TRUE(stream.synchronize().ok());
  }
}

}  // namespace
}  // namespace moeccl::comm
