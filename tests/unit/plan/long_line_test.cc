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

TEST(LongLine, StagingGrowsUpToItsCaps) {
  const LongLine line{0, 50'000'000};
  EXPECT_EQ(staging_for(line, 1, 16 * kMiB), 256 * kMiB);
  EXPECT_EQ(staging_for(line, 4, 16 * kMiB), 256 * kMiB);
  EXPECT_EQ(staging_for(line, 8, 16 * kMiB), 128 * kMiB);  // 1 GiB for the host
  EXPECT_EQ(staging_for(line, 256, 16 * kMiB), 16 * kMiB);
  EXPECT_EQ(staging_for({0, uint64_t{1} << 40}, 1, 16 * kMiB), 256 * kMiB);
}

}  // namespace
}  // namespace moeccl::plan
