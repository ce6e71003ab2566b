// SPDX-License-Identifier: Apache-2.0
#include "src/world/config.h"

#include <gtest/gtest.h>

#include "src/world/staging.h"

namespace moeccl::comm {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr plan::LinkCost kFar{20e6, 1.25}, kNear{5e3, 50}, kFast{4e3, 450};

uint64_t staging_on_tree(plan::LevelTree tree, const plan::Profile& profile = {}) {
  tree.n_far_levels = plan::far_levels_by_name(tree);
  return Config::staging_on(0, Config::Around::of(tree, profile));
}

plan::LevelTree nodes(uint32_t n, uint32_t ranks, plan::LinkCost link, plan::LinkCost inside = {}) {
  return *plan::LevelTree::from_sizes({{"node", link, std::vector<uint32_t>(n, ranks)}}, "gpu", inside);
}

TEST(Staging, FollowsHostsAndLinesOfATopology) {
  EXPECT_EQ(staging_on_tree(plan::LevelTree::flat(64)), 16 * kMiB) << "all on one host";
  EXPECT_EQ(staging_on_tree(nodes(2, 4, kNear)), 16 * kMiB);
  EXPECT_EQ(staging_on_tree(nodes(20, 1, kNear)), 20 * kMiB) << "1 MiB for each host";
  EXPECT_EQ(staging_on_tree(nodes(2, 8, kNear, kFast)), 16 * kMiB) << "a fast link within a host is no long line";
  EXPECT_EQ(staging_on_tree(nodes(2, 4, kFar)), 256 * kMiB);
  const auto centres =
      plan::LevelTree::from_sizes({{"dc", kFar, {4, 4}}, {"node", kNear, std::vector<uint32_t>(8, 8)}}, "gpu", kFast);
  EXPECT_EQ(staging_on_tree(*centres), 128 * kMiB) << "8 ranks of a node, not 32 of a data centre, share 1 GiB";
  const auto uneven = plan::LevelTree::from_sizes({{"node", kFar, {4, 1, 8}}});
  EXPECT_EQ(staging_on_tree(*uneven), 128 * kMiB) << "the host with the most ranks counts";
  plan::Profile measured;
  measured.links = {{20e6, 1.25}};
  EXPECT_EQ(staging_on_tree(nodes(2, 4, kNear), measured), 256 * kMiB);
  EXPECT_EQ(Config::staging_on(3 * kMiB, Config::Around::of(*centres, {})), 3 * kMiB) << "as given";
}

TEST(Staging, GrowsAsFarAsThereIsRoom) {
  Config::Around around{2, 4, {0, 50'000'000}};
  const auto with_room = [&](uint64_t room) {
    around.room = room;
    return Config::staging_on(0, around);
  };
  EXPECT_EQ(with_room(UINT64_MAX), 256 * kMiB);
  EXPECT_EQ(with_room(100 * kMiB), 64 * kMiB) << "a power of two";
  EXPECT_EQ(with_room(9 * kMiB), 16 * kMiB) << "never less than the usual";
  EXPECT_EQ(with_room(0), 16 * kMiB);
}

TEST(Staging, RoomIsSharedByTheRanksOfAHost) {
  const uint64_t alone = room_for_staging({}), shared = room_for_staging({.on_host = 64});
  EXPECT_GT(alone, 0u);
  EXPECT_LT(shared, alone / 32);
}

TEST(Staging, AFailureSaysHowMuchWasTriedAndHowToHaveLess) {
  const Status told = with_remedy_of_staging(error(moecclOutOfMemory, "5 bytes of memory"), 4096);
  EXPECT_EQ(told.code(), moecclOutOfMemory);
  EXPECT_NE(told.message().find("5 bytes of memory: set MOECCL_STAGING_BYTES, of which a rank has 4096 here, lower"),
            std::string::npos)
      << told.message();
  const char* said = "use less (MOECCL_STAGING_BYTES lowers what each communicator holds)";
  EXPECT_EQ(with_remedy_of_staging(error(moecclOutOfMemory, "{}", said), 1).message(), said);
  EXPECT_EQ(with_remedy_of_staging(error(moecclTimeout, "late"), 1).message(), "late");
}

}  // namespace
}  // namespace moeccl::comm
