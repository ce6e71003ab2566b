// SPDX-License-Identifier: Apache-2.0
// verbs links whose queues are full, whose peers have failed, whose process has no descriptors left, or that are very
// many, over the fake libibverbs.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <thread>
#include <vector>

#include "src/exec/fabric.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"
#include "tests/support/timing.h"
#include "transport/common/rows.h"
#include "transport/shm/segment.h"
#include "transport/verbs/offer.h"

namespace moeccl::tests {
namespace {

using transport::PutState;

using VerbsPressure = OverFakeVerbs;

Result<std::unique_ptr<transport::Endpoint>> open_two_rails(const transport::NetworkOptions& options) {
  return transport::verbs::open_with(options, FakeVerbs::settings());
}

// Packs as the executor does: into new room, anew, at each try. Returns how often the link took only a part.
int put_packed(exec::Fabric& f, size_t bytes, int what) {
  int moved = 0;
  EXPECT_TRUE(until(f, [&] {
    std::byte* const room = f.link(1).rooms()->room(bytes);
    if (room == nullptr) return false;
    std::memset(room, what, bytes);
    const auto state = f.link(1).posted_puts()->post(0, room, bytes);
    EXPECT_TRUE(state.ok()) << state.status().message();
    moved += state.ok() && *state == PutState::kMoved ? 1 : 0;
    return !state.ok() || *state == PutState::kDone;
  }));
  return moved;
}

TEST_F(VerbsPressure, APackedPutOfAFullLinkGoesWhole) {
  NetworkFabrics ranks({"two rails", transport::verbs::kCapabilities, fake_verbs::probe, open_two_rails}, 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  fake().control().set_delay_us(10'000);
  exec::Fabric& f = ranks[0];
  f.engine->begin();
  constexpr size_t kBytes = 300'000, kStaging = 4 << 20;
  const std::byte small[8] = {};
  int moved = 0;
  uint32_t number = 0;
  // One more small put at a time, so that one of these numbers leaves the queues room for a part of the packed put.
  // Then on, until its room has come again.
  constexpr uint32_t kMostSmall = 260;
  for (uint32_t after = 0; number < 3 * kMostSmall && after<kMostSmall; after += moved> 0 ? 1 : 0) {
    for (uint32_t i = 0; i < number % kMostSmall; ++i) {
      const auto state = f.link(1).put(kStaging - 64, small, sizeof(small));
      if (!state.ok() || *state != PutState::kDone) break;
    }
    const int what = static_cast<int>(1 + number % 250);
    moved += put_packed(f, kBytes, what);
    ASSERT_TRUE(f.link(1).signal(0, ++number, 1).ok());
    ASSERT_TRUE(until(f, [&] { return (ranks[1].own->signal(0, 0).word.load() & 0xffffffff) == number; }));
    const std::byte* const staging = ranks[1].own->staging();
    ASSERT_EQ(std::count(staging, staging + kBytes, static_cast<std::byte>(what)), static_cast<ptrdiff_t>(kBytes))
        << "put " << number << " after its signal; " << moved << " were cut";
  }
  f.engine->end();
  if (moved == 0) GTEST_SKIP() << "the link was never full in the middle of a packed put";
}

TEST_F(VerbsPressure, AFailedPeerHearsOfALaterFailure) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  const auto state = [](exec::Fabric& f, uint32_t peer) { return f.link(peer).board().health.state.load(); };
  ranks[1].fail(error(moecclTimeout, "first"));
  ASSERT_TRUE(until(ranks[0], [&] { return state(ranks[0], 1) != 0; }));
  ranks[0].fail(error(moecclTimeout, "second"));
  EXPECT_TRUE(until(ranks[1], [&] { return state(ranks[1], 0) != 0; }));
}

// A rank in moecclCommShrink uses the engine and runs nothing.
TEST_F(VerbsPressure, TheEndOfAFailedPeerIsNoticedByOneThatHasFailedToo) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  ranks[1].fail(error(moecclTimeout, "first"));
  ranks[0].fail(error(moecclTimeout, "second"));
  ranks[1].engine = nullptr;  // its process has ended
  transport::EngineUse use;
  use.begin(ranks[0].engine.get(), 0);
  EXPECT_TRUE(until(ranks[0], [&] { return !ranks[0].link(1).check_peer().ok(); }));
}

TEST_F(VerbsPressure, ARankWithoutDescriptorsIsRefused) {
  rlimit old = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  const NetworkFabrics ranks(fake_verbs::kNetworks[0], 2, 4 << 20, {}, [&](uint32_t, auto&) {
    rlimit none = old;
    none.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &none);
  });
  setrlimit(RLIMIT_NOFILE, &old);
  EXPECT_FALSE(ranks.status.ok());
}

TEST_F(VerbsPressure, MoreRanksThanTheMeetingPointServesAreAReasonForAnotherNetwork) {
  EXPECT_TRUE(transport::rows_fit(18918, size_t{18917} * transport::verbs::kAddressBytes));
  EXPECT_FALSE(transport::rows_fit(18920, size_t{18919} * transport::verbs::kAddressBytes));
  transport::NetworkOptions o;
  for (uint32_t r = 0; r < 9100; ++r) o.host_of.push_back(r);
  const auto endpoint = fake_verbs::lanes(o);  // two rails
  EXPECT_EQ(endpoint.status().code(), moecclUnsupported);
  const std::string& why = endpoint.status().message();
  EXPECT_TRUE(has(why, "9100 ranks with 6 queue pairs to each peer") && has(why, "MOECCL_IB_QPS_PER_CONNECTION (3)") &&
              has(why, "MOECCL_IB_HCA (2 are used)"))
      << why;
}

struct Counts final : transport::Arrivals {
  bool arrived(uint32_t, uint64_t, uint64_t) override { return true; }
};

TEST_F(VerbsPressure, MorePutsThanARankKeepsEndTheLink) {
  Counts counts;
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2, 4 << 20, [&](exec::Fabric& f) { f.arrivals = &counts; });
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  exec::Fabric& f = ranks[0];
  f.engine->begin();
  const std::vector<std::byte> data(64, std::byte{3});
  for (uint32_t i = 0; i < 4200; ++i) {
    ASSERT_TRUE(until(f, [&] {
      const auto state = f.link(1).put(i * 512, data.data(), data.size());
      return state.ok() && *state == PutState::kDone;
    }));
  }
  ASSERT_TRUE(f.link(1).signal(0, 1, 1).ok());
  ASSERT_TRUE(until(f, [&] { return ranks[1].own->signal(0, 0).word.load() != 0; }));
  f.engine->end();
  EXPECT_FALSE(ranks[1].link(0).one_sided()->catch_up().ok());
  EXPECT_FALSE(ranks[1].link(0).check_peer().ok()) << "its later signals would announce data that nobody has looked at";
}

// Only ranks that stage CUDA memory in host memory look at them.
TEST_F(VerbsPressure, RecordsOfPutsTakeMemoryOnlyWhereTheyAreWanted) {
  constexpr uint32_t kRanks = 1024;
  transport::NetworkOptions o;
  o.host_of.resize(kRanks);
  o.host_of.back() = 1;
  const auto segment = *transport::shm::Segment::create({kRanks, 0, 1 << 20, 4096}, false);
  Counts counts;
  size_t pinned[2] = {};
  for (const bool wanted : {false, true}) {
    const auto endpoint = std::move(*fake_verbs::one(o));
    transport::LocalMemory own = segment->memory(0);
    own.arrivals = wanted ? &counts : nullptr;
    ASSERT_TRUE(endpoint->register_memory(own, {}).ok());
    pinned[wanted] = fake().counts().pinned_bytes - before_.pinned_bytes - own.staging_bytes -
                     kRanks * transport::kSigsPerPeer * sizeof(transport::SignalLine) - (4 << 20);  // of the ring
  }
  EXPECT_LT(pinned[0], size_t{4} << 20);
  EXPECT_EQ(pinned[1] - pinned[0], size_t{kRanks} * (64 << 10));
}

}  // namespace
}  // namespace moeccl::tests
