// SPDX-License-Identifier: Apache-2.0
#include "transport/paced/paced_link.h"

#include <gtest/gtest.h>

#include <vector>

#include "src/base/clock.h"
#include "transport/paced/arbiter.h"
#include "transport/shm/shm_link.h"

namespace moeccl::transport::paced {
namespace {

struct Cluster {
  // Ranks 0 and 1 are one group and rank 2 is another, with 1 GB/s and 50 us between them.
  Cluster() {
    for (uint32_t r = 0; r < 3; ++r) segments.push_back(*shm::Segment::create({3, r, 1 << 20, 4096}, false));
  }
  PacedLink link(uint32_t from, uint32_t to) {
    shm::ShmPeer peer;
    peer.own_rank = from;
    peer.peer_rank = to;
    peer.segment = segments[to];
    peer.same_process = true;
    const auto group = [&](uint32_t rank) { return &segments[rank < 2 ? 0 : 2]->pace(0); };
    return PacedLink(std::make_unique<shm::ShmLink>(std::move(peer)), {{50'000, 1.0}, group(from), group(to)});
  }
  int64_t visible(uint32_t from, uint32_t to, uint32_t number) {
    return segments[to]->signal(from, 0).visible_ns[number % kVisibleRing].load();
  }
  std::vector<std::shared_ptr<shm::Segment>> segments;
};

TEST(PacedLink, SignalIsVisibleWhenItsBytesHaveCrossed) {
  Cluster c;
  PacedLink link = c.link(0, 2);
  const int64_t start = now_ns();
  link.pace()->wrote(1'000'000);
  ASSERT_TRUE(link.signal(0, 1, 0).ok());
  const int64_t end = now_ns();
  EXPECT_GE(c.visible(0, 2, 1) - start, 1'050'000);
  EXPECT_LE(c.visible(0, 2, 1) - end, 1'050'000);
}

TEST(PacedLink, RanksOfAGroupShareItsUplink) {
  Cluster c;
  PacedLink first = c.link(0, 2), second = c.link(1, 2);
  const int64_t start = now_ns();
  first.pace()->wrote(1'000'000);
  second.pace()->wrote(1'000'000);
  ASSERT_TRUE(first.signal(0, 1, 0).ok());
  ASSERT_TRUE(second.signal(0, 1, 0).ok());
  EXPECT_GE(c.visible(1, 2, 1) - start, 2'050'000);
}

TEST(PacedLink, DirectionsAreIndependent) {
  Cluster c;
  PacedLink there = c.link(0, 2), back = c.link(2, 0);
  const int64_t start = now_ns();
  there.pace()->wrote(1'000'000);
  back.pace()->wrote(1'000'000);
  ASSERT_TRUE(there.signal(0, 1, 0).ok());
  ASSERT_TRUE(back.signal(0, 1, 0).ok());
  EXPECT_GE(c.visible(2, 0, 1) - start, 1'050'000);
  EXPECT_LE(c.visible(2, 0, 1) - now_ns(), 1'050'000);
}

TEST(PacedLink, SignalWithoutBytesTakesTheLatencyAlone) {
  Cluster c;
  PacedLink link = c.link(0, 2);
  const int64_t start = now_ns();
  ASSERT_TRUE(link.signal(0, 1, 0).ok());
  EXPECT_GE(c.visible(0, 2, 1) - start, 50'000);
  EXPECT_LE(c.visible(0, 2, 1) - now_ns(), 50'000);
}

// Two communicators share one uplink: a lower class holds back its data, and the higher class goes first.
TEST(PacedLink, ClassesOfSeveralCommunicatorsTakeTurns) {
  Cluster c;
  PacedLink low = c.link(0, 2), high = c.link(1, 2);
  low.pace()->wrote(100'000'000);
  EXPECT_TRUE(low.pace()->admit(0)) << "an uplink of one communicator alone is never closed";
  for (const uint32_t group : {0, 2}) c.segments[group]->pace(0).shared.store(1);
  ASSERT_TRUE(low.pace()->admit(0));
  ASSERT_TRUE(low.signal(0, 1, 0).ok());  // 100 ms of the uplink
  low.pace()->wrote(1'000'000);
  high.pace()->wrote(1'000'000);
  EXPECT_FALSE(low.pace()->admit(0));
  EXPECT_FALSE(high.pace()->admit(6));
  for (int64_t asked = now_ns(); !high.pace()->admit(6); asked = now_ns()) {
    const bool low_goes = low.pace()->admit(0);
    if (now_ns() - asked >= kClaim_ns) GTEST_SKIP() << "this thread stood still for longer than a claim holds";
    EXPECT_FALSE(low_goes);
  }
  ASSERT_TRUE(high.signal(0, 1, 0).ok());
  // At most the window, its bytes and the latency.
  EXPECT_LE(c.visible(1, 2, 1) - now_ns(), 1'000'000 + 1'000'000 + 50'000);
  while (!low.pace()->admit(0)) {
  }
  ASSERT_TRUE(low.signal(0, 2, 0).ok());
  EXPECT_GT(c.visible(0, 2, 2), c.visible(1, 2, 1));
  PacedLink empty = c.link(0, 2);
  EXPECT_TRUE(empty.pace()->admit(0)) << "a signal without bytes takes nothing of the uplink";
}

}  // namespace
}  // namespace moeccl::transport::paced
