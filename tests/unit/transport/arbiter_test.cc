// SPDX-License-Identifier: Apache-2.0
// The order in which an uplink serves classes, on a simulated clock.
#include "transport/paced/arbiter.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace moeccl::transport::paced {
namespace {

constexpr uint32_t kLow = 1, kMiddle = 3, kHigh = 4;
constexpr int64_t kChunk = 500'000;

// Senders that always have one more transfer waiting and ask again every 100 us.
class Uplink {
 public:
  // Lets `senders` (their classes) compete for `span_ns`. Returns the ns of the uplink that each one used.
  std::vector<int64_t> compete(const std::vector<uint32_t>& senders, int64_t span_ns) {
    std::vector<int64_t> crossed(senders.size(), 0);
    for (const int64_t end = now_ + span_ns; now_ < end; now_ += 100'000)
      for (size_t i = 0; i < senders.size(); ++i)
        if (ask(senders[i])) crossed[i] += kChunk;
    return crossed;
  }
  bool ask(uint32_t traffic_class, int64_t duration = kChunk) {
    const Transfer t{traffic_class, duration};
    if (!may_go(words_, t, now_)) return false;
    went(words_, t, now_);
    end_ = reserve(words_, now_, duration);
    return true;
  }
  void pass(int64_t ns) { now_ += ns; }
  int64_t now() const { return now_; }
  int64_t last_end() const { return end_; }

 private:
  UplinkWords words_{};
  int64_t now_ = 1'000'000'000, end_ = 0;
};

TEST(Arbiter, AnIdleLaneTakesAnyClassAtOnce) {
  Uplink uplink;
  EXPECT_TRUE(uplink.ask(kLow));
  EXPECT_EQ(uplink.last_end(), uplink.now() + kChunk);
}

TEST(Arbiter, NobodyReservesFarAhead) {
  Uplink uplink;
  int admitted = 0;
  while (uplink.ask(kLow)) ++admitted;
  EXPECT_EQ(admitted, 3);  // the window, and one that exceeds it
  uplink.pass(kChunk);
  EXPECT_TRUE(uplink.ask(kLow));
  EXPECT_FALSE(uplink.ask(kLow));
}

TEST(Arbiter, TheHigherClassGoesNextWhoeverAskedFirst) {
  Uplink uplink;
  while (uplink.ask(kLow)) {
  }
  EXPECT_FALSE(uplink.ask(kHigh));  // the uplink is full for a while: a claim
  uplink.pass(kChunk);
  EXPECT_FALSE(uplink.ask(kLow));
  EXPECT_FALSE(uplink.ask(kMiddle));
  EXPECT_TRUE(uplink.ask(kHigh));
  // It waited only for the transfers that were already on the uplink.
  EXPECT_LE(uplink.last_end() - uplink.now(), kWindow_ns + 2 * kChunk);
}

TEST(Arbiter, AClaimThatIsNotRenewedEnds) {
  Uplink uplink;
  while (uplink.ask(kLow)) {
  }
  EXPECT_FALSE(uplink.ask(kHigh));
  uplink.pass(kClaim_ns - 1);
  EXPECT_FALSE(uplink.ask(kLow));
  uplink.pass(2);
  EXPECT_TRUE(uplink.ask(kLow));
}

TEST(Arbiter, TheHigherClassGetsNearlyAllAndTheLowerDoesNotStarve) {
  Uplink uplink;
  constexpr int64_t kSpan = 2'000'000'000;
  const std::vector<int64_t> crossed = uplink.compete({kLow, kHigh}, kSpan);
  EXPECT_GE(crossed[1], kSpan * 9 / 10);
  EXPECT_GE(crossed[0], kSpan / (kShare * 2));
  EXPECT_LE(crossed[0], kSpan / (kShare / 2));
  EXPECT_GE(crossed[0] + crossed[1], kSpan * 99 / 100);  // the uplink was never idle
}

TEST(Arbiter, EveryClassOfThreeMovesInTheirOrder) {
  Uplink uplink;
  const std::vector<int64_t> crossed = uplink.compete({kMiddle, kLow, kHigh}, 2'000'000'000);
  EXPECT_GT(crossed[2], crossed[0]);
  EXPECT_GT(crossed[0], 0);
  EXPECT_GT(crossed[1], 0);
}

TEST(Arbiter, EqualClassesKeepTheLaneBusy) {
  Uplink uplink;
  const std::vector<int64_t> crossed = uplink.compete({kLow, kLow}, 1'000'000'000);
  EXPECT_GE(crossed[0] + crossed[1], 990'000'000);
}

TEST(Arbiter, WhatIsOwedDoesNotPileUpWhileNobodyIsInTheWay) {
  Uplink uplink;
  (void)uplink.compete({kLow, kHigh}, 100'000'000);
  (void)uplink.compete({kLow}, 100'000'000);
  while (uplink.ask(kLow)) {
  }
  EXPECT_FALSE(uplink.ask(kHigh));
  uplink.pass(kChunk);
  EXPECT_FALSE(uplink.ask(kLow));
  EXPECT_TRUE(uplink.ask(kHigh));
}

}  // namespace
}  // namespace moeccl::transport::paced
