// SPDX-License-Identifier: Apache-2.0
#include "src/moe/replace_gain.h"

#include <gtest/gtest.h>

#include <vector>

namespace moeccl::comm {
namespace {

// A layer whose combine takes 1000 us at the old homes and `moved_us` at the new ones, with a Begin of `begin_us`.
struct Layer {
  double begin_us, moved_us;
  int moved = 0, stayed = 0, skipped = 0;
  double last_us = 0;  // of the previous step

  void run(ReplaceGain& gain, int steps, ReplaceGain::Prediction predicted = {0.5, 0.5}) {
    for (int i = 0; i < steps; ++i) {
      if (gain.skips()) {
        ++skipped, last_us = 1000;
        continue;
      }
      // A late rank does not count.
      const ReplaceGain::Times mine{last_us > 0 ? begin_us : 0, last_us, 0}, late{9e6, last_us > 0 ? 9e6 : 0, 0};
      gain.note(std::vector<ReplaceGain::Times>{mine, mine, late});
      const bool keep = gain.decide(predicted).keep;
      ++(keep ? stayed : moved);
      last_us = keep ? 1000 : moved_us;
    }
  }
};

TEST(ReplaceGain, WhatPaysGoesOnAndIsComparedNowAndThen) {
  ReplaceGain gain(0, false);
  Layer layer{100, 600};
  layer.run(gain, 1000);
  EXPECT_NEAR(gain.gain(), 0.3, 1e-9) << "40 % of the combine less 10 % for Begin";
  EXPECT_EQ(layer.skipped, 0);
  EXPECT_GT(layer.moved, 950);
  EXPECT_GE(layer.stayed, 15);
}

TEST(ReplaceGain, WhatBeginTakesAwayIsKeptAndSoonUnasked) {
  ReplaceGain gain(0, false);
  Layer layer{390, 600};  // 1 % is left
  layer.run(gain, 1000);
  EXPECT_NEAR(gain.gain(), 0.01, 1e-9);
  EXPECT_LT(layer.moved, 30);
  EXPECT_GT(layer.skipped, 900);
}

TEST(ReplaceGain, NoticesThatItPaysNow) {
  ReplaceGain gain(0, false);
  Layer layer{500, 600};
  layer.run(gain, 200);
  EXPECT_GT(layer.skipped, 150);
  layer.begin_us = 50;
  layer.run(gain, 400);
  const int before = layer.moved;
  layer.run(gain, 100);
  EXPECT_GT(layer.moved - before, 95);
}

TEST(ReplaceGain, LittlePromisedIsNotTried) {
  ReplaceGain gain(0, false);
  Layer layer{10, 900};
  layer.run(gain, 500, {0.04, 0.04});
  EXPECT_EQ(layer.moved, 0);
  EXPECT_GT(layer.skipped, 450);
}

TEST(ReplaceGain, BelowZeroThePredictionStands) {
  ReplaceGain gain(-1, false);
  Layer layer{5000, 5000};
  layer.run(gain, 50, {0.001, 0.001});
  EXPECT_EQ(layer.moved, 50);
  EXPECT_DOUBLE_EQ(gain.gain(), 0.001);
}

}  // namespace
}  // namespace moeccl::comm
