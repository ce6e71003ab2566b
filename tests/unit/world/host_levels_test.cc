// SPDX-License-Identifier: Apache-2.0
#include "src/world/host_levels.h"

#include <gtest/gtest.h>

#include "topology/synthetic.h"

namespace moeccl::comm {
namespace {

TEST(HostLevels, AreReadAsTheyWereWritten) {
  const auto tree = topology::parse_synthetic("socket:2(bw=20GB/s,lat=2us) rank:1+3(bw=4GB/s)", 4);
  ASSERT_TRUE(tree.ok());
  const std::vector<std::byte> sent = write_levels(*tree);
  const auto got = read_levels(sent, 4, 7);
  ASSERT_TRUE(got.ok()) << got.status().message();
  EXPECT_EQ(got->hash(), tree->hash());
  for (size_t n = 0; n < sent.size(); ++n)
    EXPECT_EQ(read_levels(std::span(sent).first(n), 4, 7).status().code(), moecclRemoteError) << n;
  for (const uint32_t n : {3u, 5u}) EXPECT_FALSE(read_levels(sent, n, 7).ok()) << n;
}

TEST(HostLevels, AFailureIsTheOneOfTheRankThatSpeaksForItsHost) {
  const auto sent = write_levels(error(moecclSystemError, "no such host"));
  const auto got = read_levels(sent, 2, 3);
  EXPECT_EQ(got.status().message(), "rank 3 found no levels of its host: no such host");
}

}  // namespace
}  // namespace moeccl::comm
