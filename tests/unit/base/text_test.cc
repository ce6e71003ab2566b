// SPDX-License-Identifier: Apache-2.0
#include "src/base/text.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace moeccl {
namespace {

TEST(Text, IsANumberOnlyAsAWhole) {
  EXPECT_EQ(parse_number<uint32_t>("42"), 42u);
  EXPECT_EQ(parse_number<int>("-3"), -3);
  EXPECT_EQ(parse_number<uint32_t>("ff", 255, 16), 255u);
  for (const char* text : {"", " 1", "1 ", "1x", "-1", "+1", "4294967296"})
    EXPECT_FALSE(parse_number<uint32_t>(text).has_value()) << text;
  EXPECT_FALSE(parse_number<uint32_t>("100", 99).has_value());
}

TEST(Text, OfACommaListHasItems) {
  using Items = std::vector<std::string_view>;
  EXPECT_EQ(comma_items(""), Items());
  EXPECT_EQ(comma_items("a"), Items({"a"}));
  EXPECT_EQ(comma_items("a,,bc"), Items({"a", "", "bc"}));
  EXPECT_EQ(comma_items(",a,"), Items({"", "a"}));
}

}  // namespace
}  // namespace moeccl
