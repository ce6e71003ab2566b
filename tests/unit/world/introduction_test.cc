// SPDX-License-Identifier: Apache-2.0
#include "src/world/introduction.h"

#include <gtest/gtest.h>

#include <algorithm>

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

// Rank 0 sends those of all ranks to all ranks.
TEST(Introduction, OfAnOrdinaryHostIsShort) {
  Introduction sent = on_cores(~uint64_t{0}, 0);
  sent.host_name = "gpu-node-0123";
  EXPECT_LT(sent.encode().size(), 200u);
}

TEST(Introduction, CarriesAnySetOfCores) {
  Introduction sent;
  EXPECT_EQ(Introduction::decode(sent.encode(), 0)->cores, sent.cores);
  sent.cores[3] = 1;
  EXPECT_EQ(Introduction::decode(sent.encode(), 0)->cores, sent.cores);
  sent.cores.fill(~uint64_t{0});
  EXPECT_EQ(Introduction::decode(sent.encode(), 0)->cores, sent.cores);
}

TEST(Introduction, IsReadAsItIsWrittenOnly) {
  const Introduction sent = on_cores(0x1122334455667788, 7);
  const std::vector<std::byte> whole = sent.encode();
  for (size_t n = 0; n < whole.size(); ++n)
    EXPECT_FALSE(Introduction::decode(std::span(whole).first(n), 3).ok()) << n << " of " << whole.size() << " bytes";
  std::vector<std::byte> longer = whole;
  longer.push_back({});
  EXPECT_FALSE(Introduction::decode(longer, 3).ok());

  constexpr std::byte kWord[] = {std::byte{0x88}, std::byte{0x77}, std::byte{0x66}, std::byte{0x55}};
  const auto word = std::search(whole.begin(), whole.end(), std::begin(kWord), std::end(kWord));
  ASSERT_NE(word, whole.end());
  const auto count = static_cast<size_t>(word - whole.begin()) - 1;
  ASSERT_EQ(whole[count], std::byte{1});
  const auto with_words = [&](uint8_t n, size_t more) {
    std::vector<std::byte> lying = whole;
    lying[count] = static_cast<std::byte>(n);
    lying.insert(lying.begin() + static_cast<std::ptrdiff_t>(count) + 9, more * 8, std::byte{0});
    return Introduction::decode(lying, 3).ok();
  };
  EXPECT_TRUE(with_words(1, 0));
  EXPECT_FALSE(with_words(0, 0));
  EXPECT_FALSE(with_words(2, 0));
  EXPECT_FALSE(with_words(2, 1)) << "a zero word at the end";
  EXPECT_FALSE(with_words(17, 16)) << "more words than a set has";
  EXPECT_FALSE(with_words(255, 254));
}

}  // namespace
}  // namespace moeccl::comm
