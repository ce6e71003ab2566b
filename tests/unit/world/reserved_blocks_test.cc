// SPDX-License-Identifier: Apache-2.0
#include "src/world/reserved_blocks.h"

#include <gtest/gtest.h>

namespace moeccl::comm {
namespace {

// Eight ranks on a device of 132 multiprocessors. With a share of what the ranks before had left, they got 29 to 13
// blocks, and an H200 took twice as long.
ReservedBlocks::Wish eight(uint64_t communicator) {
  return {.uuid = "a", .communicator = communicator, .ranks = 8, .capacity = 264, .want = 32, .communicators = 2};
}

TEST(ReservedBlocks, AreTheSameForAllRanksOfACommunicator) {
  ReservedBlocks all;
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(all.take(eight(1)), 16u) << rank;
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(all.take(eight(2)), 8u) << rank;
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(all.take(eight(3)), 8u) << rank;
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(all.take(eight(4)), rank == 0 ? 8u : 0u) << rank;
}

TEST(ReservedBlocks, AreTheSameWhereRanksOfTwoCommunicatorsTakeInTurns) {
  ReservedBlocks all;
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(all.take(eight(1)), 16u) << rank;
    EXPECT_EQ(all.take(eight(2)), 15u) << rank;
  }
}

TEST(ReservedBlocks, CountAgainOnceTheyAreGivenBack) {
  ReservedBlocks all;
  for (int round = 0; round < 3; ++round) {
    for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(all.take(eight(1)), 16u) << round;
    for (int rank = 0; rank < 8; ++rank) all.give_back("a", 16);
  }
}

TEST(ReservedBlocks, AreNoMoreThanARankWantsAndNoneWhereItWantsTooFew) {
  ReservedBlocks all;
  ReservedBlocks::Wish wish = eight(1);
  wish.want = 10;
  EXPECT_EQ(all.take(wish), 10u);
  wish.want = 7;
  EXPECT_EQ(all.take(wish), 0u);
  wish.want = 32;
  EXPECT_EQ(all.take(wish), 16u);
}

TEST(ReservedBlocks, OfADeviceThatProcessesShareAreDividedAmongThem) {
  ReservedBlocks all;
  ReservedBlocks::Wish wish = eight(1);
  wish.processes = 4, wish.ranks = 2;
  EXPECT_EQ(all.take(wish), 16u);  // 66 / 2 ranks / 2 communicators
  EXPECT_EQ(all.take(wish), 16u);
}

}  // namespace
}  // namespace moeccl::comm
