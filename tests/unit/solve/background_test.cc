// SPDX-License-Identifier: Apache-2.0
// The background solver: deadlines, older answers, and the current placement when no better one is known.
#include <gtest/gtest.h>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

struct Solver {
  Solver() { EXPECT_EQ(moecclSampleSolverCreate(&handle), moecclSuccess); }
  ~Solver() { EXPECT_EQ(moecclSampleSolverDestroy(handle), moecclSuccess); }
  moecclSampleSolver_t handle = nullptr;
};

moecclSampleProblem_t problem_of(const std::vector<int32_t>& num, int32_t devices) {
  moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
  p.n_devices = devices;
  p.n_nodes = 4;
  p.n_samples = 4 * devices;
  p.n_experts = 2 * devices;
  p.num_gather = num.data();
  return p;
}

TEST(BackgroundSolver, GivesWhatTheDirectCallGives) {
  SplitMix64 random(testing::seed());
  Solver s;
  for (int round = 0; round < 5; ++round) {
    std::vector<int32_t> num = testing::local_routing(random, {64, 32, 16, 500, 0.4});
    const moecclSampleProblem_t p = problem_of(num, 16);
    std::vector<int32_t> direct(64), fetched(64, -1);
    ASSERT_EQ(moecclSolveSamples(&p, direct.data(), nullptr, nullptr, 0), moecclSuccess);
    ASSERT_EQ(moecclSampleSolverSubmit(s.handle, &p), moecclSuccess);
    num.assign(num.size(), 0);  // the solver has its own copy
    moecclAnswerSource_t source = moecclAnswerCurrent;
    moecclSampleAnswer_t a{};
    a.size = sizeof(a);
    ASSERT_EQ(moecclSampleSolverFetch(s.handle, -1, fetched.data(), &a, &source), moecclSuccess);
    EXPECT_EQ(source, moecclAnswerFresh);
    EXPECT_EQ(fetched, direct);
    EXPECT_GT(a.gain, 0);
  }
}

TEST(BackgroundSolver, CopiesTheInnerLevelsToo) {
  SplitMix64 random(testing::seed() + 2);
  Solver s;
  const std::vector<int32_t> busy = testing::local_routing(random, {2048, 1024, 512, 200, 0.4});
  const std::vector<int32_t> num = testing::local_routing(random, {64, 32, 16, 500, 0.4});
  const moecclSampleProblem_t long_one = problem_of(busy, 512);
  moecclSampleProblem_t p = problem_of(num, 16);
  std::vector<int32_t> group(16), direct(64), fetched(64, -1);
  for (int32_t j = 0; j < 16; ++j) group[static_cast<size_t>(j)] = j / 2;
  double alpha = 1, beta = 1;
  p.n_inner = 1;
  p.inner_group = group.data();
  p.inner_alpha_us = &alpha;
  p.inner_beta_us = &beta;
  moecclSampleAnswer_t at_once{}, a{};
  at_once.size = a.size = sizeof(a);
  ASSERT_EQ(moecclSolveSamples(&p, direct.data(), &at_once, nullptr, 0), moecclSuccess);
  ASSERT_EQ(moecclSampleSolverSubmit(s.handle, &long_one), moecclSuccess);  // keeps the solver busy
  ASSERT_EQ(moecclSampleSolverSubmit(s.handle, &p), moecclSuccess);
  for (int32_t j = 0; j < 16; ++j) group[static_cast<size_t>(j)] = j / 4;
  alpha = beta = 1000;
  ASSERT_EQ(moecclSampleSolverFetch(s.handle, -1, fetched.data(), &a, nullptr), moecclSuccess);
  EXPECT_EQ(fetched, direct);
  EXPECT_EQ(a.before_us, at_once.before_us);
}

TEST(BackgroundSolver, HasAValidAnswerWhenTimeIsUp) {
  SplitMix64 random(testing::seed() + 1);
  Solver s;
  const std::vector<int32_t> num = testing::local_routing(random, {2048, 1024, 512, 200, 0.4});
  const moecclSampleProblem_t p = problem_of(num, 512);
  std::vector<int32_t> placement(2048, -1);
  ASSERT_EQ(moecclSampleSolverSubmit(s.handle, &p), moecclSuccess);
  moecclAnswerSource_t source = moecclAnswerFresh;
  ASSERT_EQ(moecclSampleSolverFetch(s.handle, 0, placement.data(), nullptr, &source), moecclSuccess);
  // With no time at all, the answer is usually the current placement. On a fast machine, the solver may already be
  // done.
  if (source == moecclAnswerCurrent) {
    for (int32_t i = 0; i < p.n_samples; ++i) ASSERT_EQ(placement[static_cast<size_t>(i)], i / 4);
  }
  ASSERT_EQ(moecclSampleSolverFetch(s.handle, -1, placement.data(), nullptr, &source), moecclSuccess);
  EXPECT_EQ(source, moecclAnswerFresh);

  // Solves the same problem again. In the meantime, the last answer still gains and is returned.
  ASSERT_EQ(moecclSampleSolverSubmit(s.handle, &p), moecclSuccess);
  std::vector<int32_t> again(2048, -1);
  ASSERT_EQ(moecclSampleSolverFetch(s.handle, 0, again.data(), nullptr, &source), moecclSuccess);
  EXPECT_NE(source, moecclAnswerCurrent);
  EXPECT_EQ(again, placement);
}

TEST(BackgroundSolver, RefusesUseBeforeSubmitAndStaleHandles) {
  moecclSampleSolver_t gone = nullptr;
  int32_t placement[1];
  {
    Solver s;
    gone = s.handle;
    EXPECT_EQ(moecclSampleSolverFetch(gone, 0, placement, nullptr, nullptr), moecclInvalidUsage);
  }
  EXPECT_EQ(moecclSampleSolverFetch(gone, 0, placement, nullptr, nullptr), moecclInvalidArgument);
  EXPECT_EQ(moecclSampleSolverDestroy(nullptr), moecclSuccess);
}

}  // namespace
}  // namespace moeccl::solve
