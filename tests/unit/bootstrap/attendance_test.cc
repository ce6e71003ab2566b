// SPDX-License-Identifier: Apache-2.0
// Which ranks a meeting of survivors still awaits.
#include "src/bootstrap/attendance.h"

#include <gtest/gtest.h>

#include "tests/support/timing.h"

namespace moeccl::bootstrap {
namespace {

RankSet gone(size_t n_ranks, std::initializer_list<size_t> ranks) {
  RankSet set(n_ranks);
  for (const size_t r : ranks) set[r] = true;
  return set;
}

TEST(Attendance, ARankIsGivenUpWhileAllThatJoinedReportItAsGone) {
  Attendance a(3);
  a.comes(0);
  a.reports(0, gone(3, {2}));
  EXPECT_TRUE(a.awaits(1));
  EXPECT_FALSE(a.awaits(2));
  EXPECT_FALSE(a.complete());
  a.comes(1);
  EXPECT_TRUE(a.awaits(1)) << "it has come, but has not joined";
  a.reports(1, gone(3, {}));
  EXPECT_TRUE(a.awaits(2)) << "rank 1 expects it";
  EXPECT_FALSE(a.complete());
  a.reports(1, gone(3, {2}));
  EXPECT_TRUE(a.complete());
  a.reports(0, gone(3, {}));
  EXPECT_TRUE(a.awaits(2)) << "rank 0 has heard of it since";
}

TEST(Attendance, ARankThatComesIsAwaitedAlthoughAllGaveItUp) {
  Attendance a(2);
  a.comes(0);
  a.reports(0, gone(2, {1}));
  EXPECT_TRUE(a.complete());
  a.comes(1);
  EXPECT_FALSE(a.complete());
  a.reports(1, gone(2, {0}));
  EXPECT_TRUE(a.complete());
}

TEST(Attendance, HalfOfManyRanksMeetWithinASecond) {
  constexpr size_t kRanks = 8192;
  Attendance a(kRanks);
  RankSet odd(kRanks);
  for (size_t r = 1; r < kRanks; r += 2) odd[r] = true;
  const tests::Stopwatch watch;
  for (size_t r = 0; r < kRanks; r += 2) {
    ASSERT_FALSE(r > 0 && a.complete());
    a.comes(r);
    a.reports(r, odd);
  }
  EXPECT_TRUE(a.complete());
  MOECCL_EXPECT_WITHIN(watch, 1000);
}

}  // namespace
}  // namespace moeccl::bootstrap
