// SPDX-License-Identifier: Apache-2.0
// transport/verbs on a present RDMA device (tools/rdma-vm has one): behaviour that only real hardware, or rxe, shows.
// Skipped where there is none, but fails when MOECCL_TEST_REQUIRE_NET is verbs.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/support/network_fabrics.h"
#include "transport/verbs/offer.h"

namespace moeccl::tests {
namespace {

using transport::PutState;
using transport::verbs::Offer;

class VerbsOnADevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* required = std::getenv("MOECCL_TEST_REQUIRE_NET");
    const transport::Probe probe = network().probe();
    if (probe.usable) return;
    ASSERT_TRUE(required == nullptr || std::string(required) != "verbs") << probe.why_not;
    GTEST_SKIP() << probe.why_not;
  }
  static const transport::Network& network() { return *transport::find_network("verbs"); }
  static bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
};

TEST_F(VerbsOnADevice, AnInvalidRkeyIsAnErrorThatNamesTheRank) {
  NetworkFabrics ranks(network(), 2, 4 << 20, {}, [](uint32_t reader, NetworkFabrics::Offers& offers) {
    if (reader != 0) return;
    auto offer = transport::verbs::read_offer(offers[1], 1);
    ASSERT_TRUE(offer.ok());
    offer->rails[0].keys.staging ^= 0x5a5a00;
    offers[1] = transport::verbs::write_offer(*offer);
    const auto row = transport::verbs::write_row(offer->queues);
    offers[1].insert(offers[1].end(), row.begin(), row.end());
  });
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  const std::vector<std::byte> data(100'000, std::byte{7});
  exec::Fabric& f = ranks[0];
  f.engine->begin();
  ASSERT_TRUE(until(f, [&] {
    const auto state = f.link(1).put(0, data.data(), data.size());
    return !state.ok() || *state == PutState::kDone;
  }));
  ASSERT_TRUE(f.link(1).signal(0, 1, 1).ok()) << "what went wrong is told by check_peer()";
  ASSERT_TRUE(until(f, [&] { return !f.link(1).check_peer().ok(); }));
  const std::string why = f.link(1).check_peer().message();
  EXPECT_TRUE(has(why, "rank 1") && has(why, "status 10") && has(why, "a region was taken back")) << why;
  EXPECT_EQ(ranks[1].own->signal(0, 0).word.load(), 0u) << "the signal behind it must not come";
  f.engine->end();
}

TEST_F(VerbsOnADevice, ATruncatedOfferIsAnErrorThatNamesTheRank) {
  const NetworkFabrics ranks(network(), 2, 4 << 20, {}, [](uint32_t reader, NetworkFabrics::Offers& offers) {
    if (reader == 0) offers[1].resize(offers[1].size() / 2);
  });
  EXPECT_EQ(ranks.status.code(), moecclRemoteError);
  EXPECT_TRUE(has(ranks.status.message(), "rank 1")) << ranks.status.message();
}

}  // namespace
}  // namespace moeccl::tests
