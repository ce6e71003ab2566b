// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/connecting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/support/fake_nets.h"
#include "tests/support/timing.h"

namespace moeccl::tests {
namespace {

using namespace transport::netplugin;

using Side = std::shared_ptr<Connecting>;

Side side(const FakeNet& fake, uint32_t rank, std::vector<uint32_t> host_of, int64_t deadline_ms,
          const driver::Watch& watch = {}) {
  transport::NetworkOptions o;
  o.host_of = std::move(host_of);
  o.rank = rank;
  o.watch = watch;
  o.deadline = Deadline::after_ms(deadline_ms);
  auto made = std::make_shared<Connecting>(std::make_shared<PluginUse>(std::move(*use_plugin({fake.file()}))), o);
  EXPECT_TRUE(made->listen().ok());
  return made;
}

// The comms of two ranks that have met are closed in order, even where a third rank is missing.
TEST(NetPluginConnecting, LeavesNoRequestsBetweenTwoWhereAThirdIsMissing) {
  const FakeNet fake("v12");
  ASSERT_TRUE(fake.there());
  const long before = fake.count("aborted");
  {
    // Rank 2 meets rank 0 but not rank 1, which waits for it until its deadline.
    const std::vector<uint32_t> hosts = {0, 1, 2};
    const Side zero = side(fake, 0, hosts, patient_ms(20'000)), one = side(fake, 1, hosts, patient_ms(500)),
               two = side(fake, 2, {0, 1, 1}, patient_ms(20'000)), absent = side(fake, 2, hosts, 1);
    const auto says = [](const Side& from, uint32_t to) {
      std::vector<std::byte> all = from->offer();
      const std::vector<std::byte> row = from->rows()[to];
      all.insert(all.end(), row.begin(), row.end());
      return all;
    };
    std::vector<PeerComms> made[3];
    const auto connect = [&](const Side& s, uint32_t rank, std::vector<std::vector<std::byte>> offers) {
      return std::thread([&made, s, rank, offers = std::move(offers)] {
        auto peers = s->connect(offers);
        if (peers.ok()) made[rank] = std::move(*peers);
      });
    };
    std::thread threads[] = {connect(zero, 0, {{}, says(one, 0), says(two, 0)}),
                             connect(one, 1, {says(zero, 1), {}, says(absent, 1)}),
                             connect(two, 2, {says(zero, 2), {}, {}})};
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(made[0].size(), 2u);
    EXPECT_EQ(made[1].size(), 0u) << "rank 2 does not come";
    EXPECT_EQ(made[2].size(), 1u);
    const Result<PluginUse> use = use_plugin({fake.file()});
    ASSERT_TRUE(use.ok());
    for (const auto& peers : made) {
      for (const PeerComms& p : peers) {
        for (const PeerComms::Pair& c : p.pairs) {
          EXPECT_TRUE(use->api().close_send(c.out).ok());
          EXPECT_TRUE(use->api().close_receive(c.in).ok());
        }
      }
    }
  }
  EXPECT_EQ(fake.count("aborted"), before);
}

TEST(NetPluginConnecting, EndsWithAnAbort) {
  const FakeNet fake("v12");
  ASSERT_TRUE(fake.there());
  std::atomic<bool> aborted = false;
  const int64_t deadline_ms = patient_ms(20'000);
  const Side waits = side(fake, 0, {0, 1}, deadline_ms,
                          {-1, [&] { return aborted ? error(moecclAborted, "by the test") : Status(); }});
  const Side never = side(fake, 1, {0, 1}, deadline_ms);  // offers, but does not connect
  const std::vector<std::vector<std::byte>> offers = {waits->offer(), never->offer()};
  Status status;
  std::thread connecting([&] { status = waits->connect(offers).status(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const Stopwatch watch;
  aborted = true;
  connecting.join();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_EQ(status.code(), moecclAborted) << status.message();
}

}  // namespace
}  // namespace moeccl::tests
