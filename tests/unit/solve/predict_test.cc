// SPDX-License-Identifier: Apache-2.0
#include "src/solve/predict.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

TEST(Predict, LearnsADeterministicTransition) {
  constexpr int32_t kExperts = 16;
  SplitMix64 random(testing::seed());
  std::vector<int32_t> now(1000), next(1000);
  for (size_t t = 0; t < now.size(); ++t) {
    now[t] = static_cast<int32_t>(random.below(kExperts));
    next[t] = (now[t] * 5 + 3) % kExperts;
  }
  std::vector<double> joint(kExperts * kExperts, 0);
  ASSERT_EQ(moecclPredictorUpdate(joint.data(), kExperts, kExperts, 0.9, now.data(), next.data(), 1000, 1),
            moecclSuccess);
  std::vector<int32_t> num(kExperts), predicted(kExperts);
  for (int32_t e = 0; e < kExperts; ++e) num[static_cast<size_t>(e)] = 10 * e;
  ASSERT_EQ(moecclPredictorApply(joint.data(), kExperts, kExperts, num.data(), 1, predicted.data()), moecclSuccess);
  for (int32_t e = 0; e < kExperts; ++e) EXPECT_EQ(predicted[static_cast<size_t>((e * 5 + 3) % kExperts)], 10 * e);
}

TEST(Predict, KeepsEachSamplesTokensAndForgets) {
  SplitMix64 random(testing::seed() + 1);
  std::vector<double> joint(6 * 9, 0);
  for (int round = 0; round < 20; ++round) {
    std::vector<int32_t> now = testing::random_topk(random, 50, 2, 6), next = testing::random_topk(random, 50, 2, 9);
    now[static_cast<size_t>(random.below(100))] = -1;
    ASSERT_EQ(moecclPredictorUpdate(joint.data(), 6, 9, 0.5, now.data(), next.data(), 50, 2), moecclSuccess);
    std::vector<int32_t> num(3 * 6), predicted(3 * 9, -7);
    for (int32_t& n : num) n = static_cast<int32_t>(random.below(1000));
    ASSERT_EQ(moecclPredictorApply(joint.data(), 6, 9, num.data(), 3, predicted.data()), moecclSuccess);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(std::accumulate(&num[static_cast<size_t>(6 * i)], num.data() + 6 * (i + 1), 0),
                std::accumulate(&predicted[static_cast<size_t>(9 * i)], predicted.data() + 9 * (i + 1), 0));
      for (int e = 0; e < 9; ++e) EXPECT_GE(predicted[static_cast<size_t>(9 * i + e)], 0);
    }
  }
  // decay 1/2: the sum of all pairs is below 2 * 200.
  EXPECT_LT(std::accumulate(joint.begin(), joint.end(), 0.0), 400);
}

TEST(Predict, NamesBadArguments) {
  double joint[4] = {1, 2, 3, 4};
  const int32_t topk[2] = {0, 1}, wrong[2] = {0, 2}, num[2] = {1, -1};
  int32_t next[2];
  EXPECT_EQ(moecclPredictorUpdate(joint, 2, 2, 2.0, topk, topk, 2, 1), moecclInvalidArgument);
  EXPECT_EQ(moecclPredictorUpdate(joint, 2, 2, 0.5, wrong, topk, 2, 1), moecclInvalidArgument);
  EXPECT_EQ(moecclPredictorUpdate(nullptr, 2, 2, 0.5, topk, topk, 2, 1), moecclInvalidArgument);
  EXPECT_EQ(moecclPredictorApply(joint, 2, 2, num, 1, next), moecclInvalidArgument);
  joint[2] = std::nan("");
  EXPECT_EQ(moecclPredictorApply(joint, 2, 2, topk, 1, next), moecclInvalidArgument);
}

}  // namespace
}  // namespace moeccl::solve
