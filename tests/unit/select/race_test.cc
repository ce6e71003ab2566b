// SPDX-License-Identifier: Apache-2.0
#include "src/select/race.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/base/random.h"

namespace moeccl::comm {
namespace {

// Three candidates, of which the first is flat. `truth` is the real time of each relative to its price.
class World {
 public:
  Race race{3, 0};
  std::vector<double> prices{100, 100, 100}, truth{1, 1, 1};
  uint64_t tokens = 64;
  bool notes_late = false;  // as in a layer: a step is noted when the next one has its plan
  struct {
    size_t ran = 0;
    double took = 0;
  } late;
  double noise = 0, spikes = 0;  // the share of steps that take three times as long
  SplitMix64 random{7};

  size_t step() {
    const std::vector<float> guesses = race.guesses(tokens);
    const size_t ran = race.pick(prices, guesses);
    const double took =
        prices[ran] * truth[ran] * (1 + noise * (random.unit() - 0.5)) * (random.unit() < spikes ? 3 : 1);
    if (notes_late && late.took > 0) race.note(tokens, late.ran, prices, late.took);
    if (!notes_late) race.note(tokens, ran, prices, took);
    late = {ran, took};
    total += took;
    const std::vector<double> all = costs();
    best += *std::min_element(all.begin(), all.end());
    return ran;
  }
  std::vector<double> costs() const { return {prices[0] * truth[0], prices[1] * truth[1], prices[2] * truth[2]}; }
  // Returns the number of steps until the same plan has run for ten steps.
  int settle(size_t plan) {
    for (int i = 1, same = 0; i < 400; ++i) {
      same = step() == plan ? same + 1 : 0;
      if (same == 10) return i - 9;
    }
    return 400;
  }
  double total = 0, best = 0;
};

TEST(Race, APriceThatLeavesNoDoubtRunsAtOnce) {
  World w;
  w.prices = {100, 300, 500};
  for (int i = 0; i < 50; ++i) EXPECT_EQ(w.step(), 0U);
}

TEST(Race, ClosePlansAreTriedAndTheFastestRuns) {
  World w;
  w.prices = {100, 110, 130};
  w.truth = {1, 1.2, 0.6};
  EXPECT_LE(w.settle(2), 10);
}

TEST(Race, FlatStaysUnlessAnotherIsFasterByMoreThanNoise) {
  World w;
  w.truth = {1, 0.99, 0.98};
  EXPECT_LE(w.settle(0), 10);
}

// Prices follow a routing that changes, and the known errors of the prices stay known.
TEST(Race, FollowsPricesAtOnce) {
  World w;
  w.prices = {100, 300, 400};
  w.settle(0);
  w.prices = {300, 120, 500};
  EXPECT_LE(w.settle(1), 4);
  w.prices = {100, 300, 400};
  EXPECT_LE(w.settle(0), 4);
}

// When others load a link, the times of plans change, but no price does.
TEST(Race, FollowsTimesThatNoPriceKnowsWithinTwentySteps) {
  World w;
  w.noise = 0.1;
  w.prices = {100, 120, 400};
  w.settle(0);
  for (int i = 0; i < 60; ++i) w.step();
  w.truth = {3, 1, 1};
  EXPECT_LE(w.settle(1), 20);
  for (int i = 0; i < 60; ++i) w.step();
  w.truth = {1, 3, 1};
  EXPECT_LE(w.settle(0), 20);
  for (int i = 0; i < 60; ++i) w.step();
  w.truth = {3, 1, 1};
  EXPECT_LE(w.settle(1), 20);
  for (int i = 0; i < 60; ++i) w.step();
  w.truth = {1, 1, 1};  // plan 1, which runs, is as fast as before
  EXPECT_LE(w.settle(0), 20);
  for (int i = 0; i < 60; ++i) w.step();
  EXPECT_LT(w.total / w.best, 1.12);
}

// The load ends: the plan that runs is as fast as before and gives no sign, and a step that the other one runs under
// load costs much.
TEST(Race, ReturnsToTheFormerWinnerWithinTwentySteps) {
  for (const bool late : {false, true}) {
    for (int loaded_for = 40; loaded_for < 110; loaded_for += 7) {
      World w;
      w.notes_late = late;
      w.noise = 0.1;
      w.prices = {100, 120, 400};
      w.settle(0);
      for (int i = 0; i < 60; ++i) w.step();
      w.truth = {3, 1, 1};
      EXPECT_LE(w.settle(1), 20);
      for (int i = 0; i < loaded_for; ++i) w.step();
      w.truth = {1, 1, 1};
      EXPECT_LE(w.settle(0), 20) << "after " << loaded_for << " steps under load";
    }
  }
}

// Each step of the former winner takes longer: a retry is one step, and they become rare.
TEST(Race, RetriesOfTheFormerWinnerAreShortAndBecomeRare) {
  for (const bool late : {false, true}) {
    for (const double load : {1.9, 3.0}) {
      World w;
      w.notes_late = late;
      w.prices = {100, 120, 400};
      w.settle(0);
      w.truth = {load, 1, 1};
      w.settle(1);
      const auto of_retries = [&](int steps) {
        int n = 0;
        for (int i = 0; i < steps; ++i) n += w.step() == 0 ? 1 : 0;
        return n;
      };
      EXPECT_LE(of_retries(96), 6) << load;
      of_retries(32);
      EXPECT_LE(of_retries(900), 30) << load;
    }
  }
}

// The other plan was expected to be too slow to try, until the running plan has become slower than that.
TEST(Race, APlanThatWasFarAwayIsTriedWhenTheOthersSlowDown) {
  World w;
  w.prices = {100, 200, 1000};
  w.settle(0);
  w.truth = {4, 1, 1};
  EXPECT_LE(w.settle(1), 20);
}

// Prices that miss what the machine really does miss it by another factor for each plan: here the copies of the second
// plan take a core that its price does not know.
TEST(Race, APlanThatSeemedFarAwayIsTriedWherePricesAreFarOff) {
  World w;
  w.prices = {160, 100, 136};
  w.truth = {1, 1.76, 1};
  EXPECT_LE(w.settle(2), 12);
  World right;
  right.prices = w.prices;
  for (int i = 0; i < 50; ++i) EXPECT_EQ(right.step(), 1U) << "a price that holds leaves no doubt";
}

TEST(Race, NoiseCostsFewSteps) {
  World w;
  w.noise = 0.6;
  w.prices = {100, 130, 140};
  for (int i = 0; i < 1000; ++i) w.step();
  EXPECT_LT(w.total / w.best, 1.08);
}

// A trial on a busy machine says little about the plan.
TEST(Race, ADisturbedTrialIsMadeAgainWhenPricesMove) {
  World w;
  w.prices = {100, 110, 400};
  w.truth = {1, 3, 1};
  w.settle(0);
  w.truth = {1, 1, 1};
  for (int i = 0; i < 40; ++i) w.step();
  w.prices = {140, 100, 400};
  EXPECT_LE(w.settle(1), 20);
}

TEST(Race, FollowsARoutingThatChangesTwiceOnABusyMachine) {
  World w;
  w.noise = 0.2;
  w.spikes = 0.1;
  for (int phase = 0; phase < 3; ++phase) {
    w.prices = phase == 1 ? std::vector<double>{170, 100, 150} : std::vector<double>{100, 170, 190};
    w.truth = {1.1, 1, 0.95};
    EXPECT_LE(w.settle(phase == 1 ? 1 : 0), 60) << phase;
    for (int i = 0; i < 60; ++i) w.step();
  }
  EXPECT_LT(w.total / w.best, 1.35) << "the spikes alone are 1.2";
}

TEST(Race, EachSizeHasItsOwn) {
  World w;
  w.truth = {2, 1, 2};
  w.settle(1);
  w.tokens = 4096;
  w.truth = {1, 2, 2};
  EXPECT_LE(w.settle(0), 10);
  w.tokens = 64;
  w.truth = {2, 1, 2};
  EXPECT_EQ(w.step(), 1U);
}

// All ranks compute the same from the same words, whatever the words are.
TEST(Race, TakesAnyWords) {
  const Race race(3, 0);
  const std::vector<double> prices{100, 120, 140};
  const std::vector<float> strange{std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1};
  EXPECT_LT(race.pick(prices, strange), 3U);
}

// Ranks agree on the plan, which need not be the one that this rank's times speak for.
TEST(Race, TakesAnySequenceOfStepsAndPrices) {
  SplitMix64 random(11);
  for (int round = 0; round < 200; ++round) {
    Race race(3, round % 4);
    std::vector<double> prices{100, 100, 100};
    size_t ran = 0;
    for (int step = 0; step < 200; ++step) {
      if (random.unit() < 0.2) ran = random() % 3;
      if (random.unit() < 0.1) prices[random() % 3] = 50 + 200 * random.unit();
      race.note(64, ran, prices, prices[ran] * (1 + 4 * random.unit()));
      const std::vector<float> guesses = race.guesses(64);
      EXPECT_TRUE(std::ranges::all_of(guesses, [](float g) { return std::isfinite(g); }));
      EXPECT_LT(race.pick(prices, guesses), 3U);
    }
  }
}

TEST(Race, WithoutTrialsPricesDecide) {
  const Race race(3, 0);
  const std::vector<float> ones(3, 1);
  EXPECT_EQ(race.pick(std::vector<double>{100, 90, 140}, ones), 1U);
  EXPECT_EQ(race.pick(std::vector<double>{100, 99, 140}, ones), 0U);
}

}  // namespace
}  // namespace moeccl::comm
