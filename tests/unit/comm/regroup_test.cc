// SPDX-License-Identifier: Apache-2.0
// How long a shrink takes at most. Other tests see what it makes: tests/conformance/elastic_test.cc.
#include "src/comm/regroup.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "src/base/shim_requests.h"
#include "tests/support/timing.h"

namespace moeccl::comm {
namespace {

using tests::patient_ms;
using tests::Stopwatch;

Config config_of_test() {
  moecclConfig_t given = MOECCL_CONFIG_INIT;
  given.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
  const Result<Config> config = Config::from(&given);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return *config;
}

// Makes a communicator whose ranks are threads.
std::vector<std::unique_ptr<Communicator>> communicators(int n) {
  std::vector<std::unique_ptr<Communicator>> made(static_cast<size_t>(n));
  const auto id = bootstrap::make_unique_id();
  EXPECT_TRUE(id.ok()) << id.status().message();
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      auto one = Communicator::init(*id, n, r, config_of_test());
      EXPECT_TRUE(one.ok()) << one.status().message();
      if (one.ok()) made[static_cast<size_t>(r)] = std::move(*one);
    });
  }
  for (std::thread& t : threads) t.join();
  return made;
}

// The meeting and the connecting share the time: rank 2 comes late to the one and does not take part in the other.
TEST(Regroup, AShrinkTakesItsTimeoutOnce) {
  const auto comms = communicators(3);
  ASSERT_TRUE(comms[0] != nullptr && comms[1] != nullptr && comms[2] != nullptr);
  std::atomic<int> n_ended{0};
  std::vector<std::thread> ranks;
  for (const size_t r : {size_t{0}, size_t{1}}) {
    ranks.emplace_back([&, r] {
      moecclConfig_t given = MOECCL_CONFIG_INIT;
      given.init_timeout_ms = static_cast<int32_t>(patient_ms(1000));
      const Stopwatch watch;
      const auto left = shrink(*comms[r], {}, &given, false);
      EXPECT_EQ(left.status().code(), moecclTimeout) << left.status().message();
      EXPECT_NE(left.status().message().find("rank 2"), std::string::npos) << left.status().message();
      MOECCL_EXPECT_WITHIN(watch, 1500);
      ++n_ended;
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(patient_ms(800)));
  ReunionCall call;
  call.excluded.resize(3);
  call.gone = [](uint32_t) { return false; };
  call.deadline = Deadline::after_ms(patient_ms(10'000));
  const Result<Reunion> met = meet_again(comms[2]->places(), call);
  EXPECT_TRUE(met.ok()) << met.status().message();
  for (std::thread& t : ranks) t.join();
}

// An abort of the new communicator does not wait for what runs on the old one.
TEST(Regroup, ACancelledShrinkDoesNotWaitForRunningOperations) {
  for (const bool aborted : {false, true}) {
    const auto comms = communicators(1);
    ASSERT_NE(comms[0], nullptr);
    Communicator& parent = *comms[0];
    parent.wait_turn(parent.take_ticket());
    if (aborted) parent.abort();
    std::atomic<bool> cancelled{false};
    ShimConfig asks;
    asks.cancelled = &cancelled;
    std::thread ends([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      cancelled = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(patient_ms(1200)));
      parent.end_turn();
    });
    const Stopwatch watch;
    const auto made = shrink(parent, {}, &asks.config, false);
    EXPECT_EQ(made.status().code(), moecclAborted) << made.status().message();
    MOECCL_EXPECT_WITHIN(watch, 700);
    ends.join();
  }
}

// The operations that an abort ends count, too.
TEST(Regroup, AShrinkAfterAnAbortTakesItsTimeoutAtMost) {
  const auto comms = communicators(2);
  ASSERT_TRUE(comms[0] != nullptr && comms[1] != nullptr);
  Communicator& parent = *comms[0];
  parent.wait_turn(parent.take_ticket());
  parent.abort();
  moecclConfig_t given = MOECCL_CONFIG_INIT;
  given.init_timeout_ms = static_cast<int32_t>(patient_ms(300));
  const Stopwatch watch;
  const auto made = shrink(parent, {}, &given, false);
  EXPECT_EQ(made.status().code(), moecclTimeout) << made.status().message();
  MOECCL_EXPECT_WITHIN(watch, 1300);
  parent.end_turn();
}

}  // namespace
}  // namespace moeccl::comm
