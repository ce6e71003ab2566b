// The order in which a lane serves classes, on a clock of our own.
#include "transport/paced/arbiter.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace moeccl::transport::paced {
namespace {

constexpr uint32_t kLow = 1, kMiddle = 3, kHigh = 4;
constexpr int64_t kChunk = 500'000;

// Senders that each always have one more transfer waiting and ask again every 100 us.
class Lane {
 public:
  // Lets `senders` (their classes) compete for `span_ns`; returns what crossed of each, ns.
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
  LaneWords words_{};
  int64_t now_ = 1'000'000'000, end_ = 0;
};

TEST(Arbiter, AnIdleLaneTakesAnyClassAtOnce) {
  Lane lane;
  EXPECT_TRUE(lane.ask(kLow));
  EXPECT_EQ(lane.last_end(), lane.now() + kChunk);
}

TEST(Arbiter, NobodyReservesFarAhead) {
  Lane lane;
  int admitted = 0;
  while (lane.ask(kLow)) ++admitted;
  EXPECT_EQ(admitted, 3);  // the window, and the one that goes beyond it
  lane.pass(kChunk);
  EXPECT_TRUE(lane.ask(kLow));
  EXPECT_FALSE(lane.ask(kLow));
}

TEST(Arbiter, TheHigherClassGoesNextWhoeverAskedFirst) {
  Lane lane;
  while (lane.ask(kLow)) {
  }
  EXPECT_FALSE(lane.ask(kHigh));  // the lane is full for a while: a claim
  lane.pass(kChunk);
  EXPECT_FALSE(lane.ask(kLow));
  EXPECT_FALSE(lane.ask(kMiddle));
  EXPECT_TRUE(lane.ask(kHigh));
  // It waited for what was on the lane and no more.
  EXPECT_LE(lane.last_end() - lane.now(), kWindow_ns + 2 * kChunk);
}

TEST(Arbiter, AClaimThatIsNotRenewedEnds) {
  Lane lane;
  while (lane.ask(kLow)) {
  }
  EXPECT_FALSE(lane.ask(kHigh));
  lane.pass(kClaim_ns - 1);
  EXPECT_FALSE(lane.ask(kLow));
  lane.pass(2);
  EXPECT_TRUE(lane.ask(kLow));
}

TEST(Arbiter, TheHigherClassGetsNearlyAllAndTheLowerDoesNotStarve) {
  Lane lane;
  constexpr int64_t kSpan = 2'000'000'000;
  const std::vector<int64_t> crossed = lane.compete({kLow, kHigh}, kSpan);
  EXPECT_GE(crossed[1], kSpan * 9 / 10);
  EXPECT_GE(crossed[0], kSpan / (kShare * 2));
  EXPECT_LE(crossed[0], kSpan / (kShare / 2));
  EXPECT_GE(crossed[0] + crossed[1], kSpan * 99 / 100);  // the lane was never left alone
}

TEST(Arbiter, EveryClassOfThreeMovesInTheirOrder) {
  Lane lane;
  const std::vector<int64_t> crossed = lane.compete({kMiddle, kLow, kHigh}, 2'000'000'000);
  EXPECT_GT(crossed[2], crossed[0]);
  EXPECT_GT(crossed[0], 0);
  EXPECT_GT(crossed[1], 0);
}

TEST(Arbiter, EqualClassesKeepTheLaneBusy) {
  Lane lane;
  const std::vector<int64_t> crossed = lane.compete({kLow, kLow}, 1'000'000'000);
  EXPECT_GE(crossed[0] + crossed[1], 990'000'000);
}

TEST(Arbiter, WhatIsOwedDoesNotPileUpWhileNobodyIsInTheWay) {
  Lane lane;
  (void)lane.compete({kLow, kHigh}, 100'000'000);
  (void)lane.compete({kLow}, 100'000'000);
  while (lane.ask(kLow)) {
  }
  EXPECT_FALSE(lane.ask(kHigh));
  lane.pass(kChunk);
  EXPECT_FALSE(lane.ask(kLow));
  EXPECT_TRUE(lane.ask(kHigh));
}

}  // namespace
}  // namespace moeccl::transport::paced
