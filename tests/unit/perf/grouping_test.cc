// SPDX-License-Identifier: Apache-2.0
#include "perf/common/grouping.h"

#include <gtest/gtest.h>

#include <vector>

namespace perf {
namespace {

std::vector<int> colors(const std::string& text) {
  Grouping grouping;
  EXPECT_EQ(parse_grouping(text, grouping), "") << text;
  std::vector<int> of_rank;
  for (int r = 0; r < 4; r++) of_rank.push_back(grouping.color(r));
  return of_rank;
}

TEST(Grouping, GroupsAreThoseOfNcclTests) {
  EXPECT_EQ(colors("MOD 2"), std::vector<int>({0, 1, 0, 1}));
  EXPECT_EQ(colors("%2"), std::vector<int>({0, 1, 0, 1}));
  EXPECT_EQ(colors("DIV 2"), std::vector<int>({0, 0, 1, 1}));
  EXPECT_EQ(colors("AND 0x1"), std::vector<int>({0, 1, 0, 1}));
  EXPECT_EQ(colors("&0b10"), std::vector<int>({0, 0, 2, 2}));
  EXPECT_EQ(colors("or 0x1"), std::vector<int>({1, 1, 3, 3}));
  EXPECT_EQ(colors("mod 02"), std::vector<int>({0, 1, 0, 1}));
}

TEST(Grouping, TheMaskIsHexadecimal) {
  const auto masked = [](const char* mask) {
    setenv("NCCL_TESTS_SPLIT_MASK", mask, 1);
    const Grouping grouping = grouping_of_environment();
    unsetenv("NCCL_TESTS_SPLIT_MASK");
    return grouping.color(31);
  };
  EXPECT_EQ(masked("10"), 0x10);
  EXPECT_EQ(masked("0x0a"), 0xa);
  EXPECT_EQ(masked("f"), 0xf);
  EXPECT_EQ(masked(""), 0);
}

TEST(Grouping, TheRanksOfAProcessAreInOneGroup) {
  Grouping grouping;
  ASSERT_EQ(parse_grouping("DIV 2", grouping), "");
  grouping.ranks_per_process = 2;
  EXPECT_EQ(grouping.color(3), 0);
  EXPECT_EQ(grouping.color(4), 1);
}

TEST(Grouping, ATextThatNamesNoGroupsIsRefused) {
  for (const char* text : {"", "2", "XOR 2", "MOD", "MOD 0", "DIV -1", "AND 0x", "MOD 2x", "AND 0xffffffff"}) {
    Grouping grouping;
    EXPECT_NE(parse_grouping(text, grouping).find("names no groups"), std::string::npos) << text;
  }
}

using GroupingDeathTest = ::testing::Test;

TEST_F(GroupingDeathTest, GroupsHaveOneSize) {
  Grouping grouping;
  ASSERT_EQ(parse_grouping("MOD 3", grouping), "");
  EXPECT_EQ(group_size(grouping, 6), 2);
  EXPECT_EXIT((void)group_size(grouping, 4), ::testing::ExitedWithCode(1), "groups of 1 and of 2 ranks");
  EXPECT_EQ(group_size(Grouping(), 4), 4);
}

}  // namespace
}  // namespace perf
