// SPDX-License-Identifier: Apache-2.0
#include "topology/pair_path.h"

#include <gtest/gtest.h>

namespace moeccl::topology {
namespace {

TEST(PairPath, TakesTheShortestThatIsAllowed) {
  EXPECT_EQ(path_between({.same_process = true}), PairPath::kThreads);
  EXPECT_EQ(path_between({.reads_allowed = true}), PairPath::kReads);
  EXPECT_EQ(path_between({}), PairPath::kStaging);
  EXPECT_EQ(path_between({.same_host = false, .same_process = true, .reads_allowed = true}), PairPath::kNetwork);
}

TEST(PairPath, PlansCountOnWhatAllPairsHave) {
  const auto bits = [](const PathFacts& f) {
    const plan::Reach r = reach_of_all(f);
    return (r.staging ? 1 : 0) + (r.views ? 2 : 0) + (r.reads ? 4 : 0) + (heap_reaches_further(f) ? 8 : 0);
  };
  EXPECT_EQ(bits({.same_process = true}), 7);
  EXPECT_EQ(bits({.reads_allowed = true}), 13);
  EXPECT_EQ(bits({}), 9);
  EXPECT_EQ(bits({.same_host = false, .same_process = true, .reads_allowed = true}), 0);
  EXPECT_EQ(bits({.same_process = true, .paced = true}), 0);
  EXPECT_EQ(bits({.reads_allowed = true, .paced = true}), 0);
}

}  // namespace
}  // namespace moeccl::topology
