// SPDX-License-Identifier: Apache-2.0
#include "src/world/introduction.h"

#include <gtest/gtest.h>

namespace moeccl::comm {
namespace {

Introduction on_cores(uint64_t mask, uint32_t quota) {
  Introduction i;
  i.cores[0] = mask;
  i.cpu_quota = quota;
  return i;
}

// docker --cpus=1 with ranks that are bound to a core each: their group may use one core's time.
TEST(CoresOfAHost, AreThoseOfAllItsRanksWithinTheirQuota) {
  const std::vector<Introduction> bound = {on_cores(1, 1), on_cores(2, 1)};
  const uint32_t both[] = {0, 1}, one[] = {1};
  EXPECT_EQ(cores_of(bound, both), 1u);
  EXPECT_EQ(cores_of(bound, one), 1u);
  const std::vector<Introduction> free = {on_cores(0xff, 0), on_cores(0xff0, 0)};
  EXPECT_EQ(cores_of(free, both), 12u);
  const std::vector<Introduction> limited = {on_cores(0xff, 6), on_cores(0xff0, 6)};
  EXPECT_EQ(cores_of(limited, both), 6u);
  const std::vector<Introduction> wide = {on_cores(3, 50), on_cores(3, 50)};
  EXPECT_EQ(cores_of(wide, both), 2u);
  const std::vector<Introduction> mixed = {on_cores(1, 1), on_cores(6, 0)};
  EXPECT_EQ(cores_of(mixed, both), 3u) << "rank 1 is in a group without a quota";
  EXPECT_EQ(cores_of(std::vector<Introduction>(1), std::vector<uint32_t>{0}), 1u) << "nothing is known";
}

TEST(Introduction, CarriesCoresAndQuota) {
  Introduction sent = on_cores(0x5, 7);
  const auto got = Introduction::decode(sent.encode(), 0);
  ASSERT_TRUE(got.ok()) << got.status().message();
  EXPECT_EQ(got->cores, sent.cores);
  EXPECT_EQ(got->cpu_quota, 7u);
}

}  // namespace
}  // namespace moeccl::comm
