// SPDX-License-Identifier: Apache-2.0
// moecclSwapLevels: a communicator's levels and links as the solver of expert swap takes them.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

RankOptions on(const char* topology) {
  RankOptions o{.mode = RankMode::kThreads};
  o.config.topology = topology;
  return o;
}

moecclSwapLevels_t sized() {
  moecclSwapLevels_t levels{};
  levels.size = sizeof(levels);
  return levels;
}

TEST(SwapLevels, HaveTheGroupsAndLinksOfTheTopology) {
  const RankOptions options = on("node:2(bw=0.5GB/s,lat=20us) gpu:2(bw=8GB/s,lat=1us)");
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        moecclSwapLevels_t levels = sized();
        int32_t groups[8];
        MOECCL_ASSERT_COMM_OK(moecclSwapLevels(comm, &levels, groups, 8), comm);
        EXPECT_EQ(levels.n_ranks, 4);
        ASSERT_EQ(levels.n_levels, 2);
        EXPECT_EQ(std::vector<int32_t>(groups, groups + 8), (std::vector<int32_t>{0, 0, 1, 1, 0, 1, 2, 3}));
        EXPECT_EQ(levels.n_groups[0], 2);
        EXPECT_EQ(levels.n_groups[1], 4);
        EXPECT_EQ(levels.n_groups[2], 0);
        // Two ranks share the uplink of 0.5 bytes per ns; half of what a rank sends leaves its node.
        EXPECT_DOUBLE_EQ(levels.inter_beta_us[0], 2e-3);
        EXPECT_DOUBLE_EQ(levels.inter_alpha_us[0], 20);
        EXPECT_GT(levels.inter_beta_us[0], 4 * levels.intra_beta_us[1]);
        EXPECT_EQ(levels.intra_beta_us[2], 0);
      },
      options);
}

TEST(SwapLevels, CountEveryByteAlikeWithoutLinks) {
  const RankOptions options = on("node:2 gpu:1+2");
  run_ranks(
      3,
      [](int, moecclComm_t comm) {
        moecclSwapLevels_t levels = sized();
        int32_t groups[6];
        MOECCL_ASSERT_COMM_OK(moecclSwapLevels(comm, &levels, groups, 6), comm);
        EXPECT_EQ(std::vector<int32_t>(groups, groups + 6), (std::vector<int32_t>{0, 1, 1, 0, 1, 2}));
        for (int l = 0; l < 2; ++l) {
          EXPECT_EQ(levels.inter_alpha_us[l] + levels.intra_alpha_us[l], 0);
          EXPECT_EQ(levels.inter_beta_us[l], 1e-3);
          EXPECT_EQ(levels.intra_beta_us[l], 1e-3);
        }
      },
      options);
}

TEST(SwapLevels, MisuseHasASentence) {
  const RankOptions options = on("node:2 gpu:1");
  run_ranks(
      2,
      [](int, moecclComm_t comm) {
        moecclSwapLevels_t levels = sized();
        int32_t groups[4];
        EXPECT_EQ(moecclSwapLevels(comm, &levels, nullptr, 0), moecclSuccess);
        const auto said = [&](const char* words) { return std::strstr(moecclGetLastError(comm), words) != nullptr; };
        EXPECT_EQ(moecclSwapLevels(comm, &levels, groups, 1), moecclInvalidArgument);
        EXPECT_TRUE(said("max_groups 1")) << moecclGetLastError(comm);
        EXPECT_EQ(moecclSwapLevels(comm, &levels, nullptr, 4), moecclInvalidArgument);
        EXPECT_TRUE(said("group_of_rank is NULL")) << moecclGetLastError(comm);
        EXPECT_EQ(moecclSwapLevels(comm, nullptr, nullptr, 0), moecclInvalidArgument);
        EXPECT_EQ(moecclSwapLevels(nullptr, &levels, nullptr, 0), moecclInvalidArgument);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
