// SPDX-License-Identifier: Apache-2.0
#include "src/plan/long_line.h"

#include <gtest/gtest.h>

namespace moeccl::plan {
namespace {

constexpr uint64_t kMiB = 1 << 20;

LevelTree cluster(LinkCost link) { return *LevelTree::from_sizes({{"node", link, {4, 4}}}); }

TEST(LongLine, OrdinaryLinksAreShort) {
  const LinkCost ordinary[] = {{5e3, 50}, {3e3, 100}, {25e3, 12.5}, {30e3, 50}, {1e6, 1.25}, {20e6, 0}, {0, 50}};
  for (const LinkCost& link : ordinary) {
    const LongLine line = long_line(cluster(link), {});
    EXPECT_EQ(line.bytes, 0u) << link.alpha_ns << " ns, " << link.bytes_per_ns << " GB/s";
    EXPECT_EQ(staging_for(line, 8, 16 * kMiB), 16 * kMiB);
    EXPECT_EQ(staging_for(line, 8, 64 * kMiB), 64 * kMiB);
  }
}

TEST(LongLine, IsTheLevelWithTheMostBytesInARoundTrip) {
  const LevelTree tree =
      *LevelTree::from_sizes({{"dc", {20e6, 1.25}, {2, 2}}, {"node", {100e3, 25}, std::vector<uint32_t>(4, 2)}});
  EXPECT_EQ(long_line(tree, {}).level, 0u);
  EXPECT_EQ(long_line(tree, {}).bytes, 50'000'000u);
  Profile measured;
  measured.links = {{1e6, 1.25}, {}};  // a profile's figures replace the tree's
  EXPECT_EQ(long_line(tree, measured).level, 1u);
  EXPECT_EQ(long_line(tree, measured).bytes, 5'000'000u);
}

TEST(LongLine, LinksWithinAHostAreShort) {
  LevelTree tree =
      *LevelTree::from_sizes({{"node", {5e3, 50}, {8, 8}}}, "gpu", {4e3, 450});  // 3.6 MB in a round trip of the GPUs
  EXPECT_EQ(long_line(tree, {}).level, 1u);
  tree.n_far_levels = 1;
  EXPECT_EQ(long_line(tree, {}).bytes, 0u);
  Profile measured;
  measured.links = {{5e3, 50}, {204e3, 30.5}};
  EXPECT_EQ(long_line(tree, measured).bytes, 0u);
  measured.links[0] = {20e6, 1.25};
  EXPECT_EQ(long_line(tree, measured).level, 0u);
  tree.n_far_levels = 0;
  EXPECT_EQ(long_line(tree, measured).bytes, 0u);
}

TEST(LongLine, FarLevelsAreThoseWhereRanksOfSeveralHostsMeet) {
  const LevelTree tree = *LevelTree::from_sizes({{"dc", {}, {2, 2}}, {"node", {}, std::vector<uint32_t>(4, 2)}});
  const std::vector<uint32_t> nodes = {0, 0, 1, 1, 2, 2, 3, 3}, ranks = {0, 1, 2, 3, 4, 5, 6, 7},
                              centres = {0, 0, 0, 0, 1, 1, 1, 1}, one(8, 0), across = {0, 1, 0, 1, 0, 1, 0, 1};
  EXPECT_EQ(far_levels(tree, one), 0u);
  EXPECT_EQ(far_levels(tree, centres), 1u);
  EXPECT_EQ(far_levels(tree, nodes), 2u);
  EXPECT_EQ(far_levels(tree, ranks), 3u);
  EXPECT_EQ(far_levels(tree, across), 3u);
  EXPECT_EQ(far_levels(LevelTree::flat(8), nodes), 1u);
}

TEST(LongLine, FarLevelsEndAtTheNodesWhereOnlyNamesAreKnown) {
  const auto levels = [](const char* outer, const char* inner) {
    return far_levels_by_name(*LevelTree::from_sizes({{outer, {}, {2, 2}}, {inner, {}, {2, 2, 2, 2}}}, "gpu"));
  };
  EXPECT_EQ(levels("dc", "node"), 2u);
  EXPECT_EQ(levels("host", "socket"), 1u);
  EXPECT_EQ(levels("box", "socket"), 1u);
  EXPECT_EQ(far_levels_by_name(LevelTree::flat(4)), 0u);
  LevelTree nodes_of_one_rank = LevelTree::flat(4);
  nodes_of_one_rank.levels[0].name = "node";
  EXPECT_EQ(far_levels_by_name(nodes_of_one_rank), 1u);
}

TEST(LongLine, StagingGrowsUpToItsCaps) {
  const LongLine line{0, 50'000'000};
  EXPECT_EQ(staging_for(line, 1, 16 * kMiB), 256 * kMiB);
  EXPECT_EQ(staging_for(line, 4, 16 * kMiB), 256 * kMiB);
  EXPECT_EQ(staging_for(line, 8, 16 * kMiB), 128 * kMiB);  // 1 GiB for the host
  for (const uint32_t ranks : {5, 6, 7}) EXPECT_EQ(staging_for(line, ranks, 16 * kMiB), 128 * kMiB) << ranks;
  EXPECT_EQ(staging_for(line, 256, 16 * kMiB), 16 * kMiB);
  EXPECT_EQ(staging_for({0, uint64_t{1} << 40}, 1, 16 * kMiB), 256 * kMiB);
}

}  // namespace
}  // namespace moeccl::plan
