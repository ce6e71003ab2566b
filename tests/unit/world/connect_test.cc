// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handout.h"
#include "src/bootstrap/place.h"
#include "src/bootstrap/unique_id.h"
#include "src/world/membership.h"
#include "tests/support/sockets.h"
#include "tests/support/timing.h"

namespace moeccl::comm {
namespace {

using tests::patient_ms;

Config config_of_test() {
  moecclConfig_t given = MOECCL_CONFIG_INIT;
  given.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
  const Result<Config> config = Config::from(&given);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return *config;
}

// The other rank joins and then does nothing, as one that is stopped.
TEST(Connect, EndsWhenItIsNoLongerWantedThoughAllRanksHaveJoined) {
  const Config config = config_of_test();
  const auto id = bootstrap::make_unique_id();
  ASSERT_TRUE(id.ok()) << id.status().message();
  std::atomic<bool> joined{false}, ended{false};
  std::thread other([&] {
    const auto session = bootstrap::Session::join(*id, 1, 2, Deadline::after_ms(config.init_timeout_ms));
    EXPECT_TRUE(session.ok()) << session.status().message();
    joined = true;
    while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  Parent from;
  from.still_wanted = [&] { return joined ? error(moecclAborted, "no longer wanted") : Status(); };
  const Deadline soon = Deadline::after_ms(patient_ms(2000));
  const Result<Membership> made = connect(*id, 2, 0, config, from);
  EXPECT_FALSE(soon.passed());
  EXPECT_EQ(made.status().code(), moecclAborted);
  EXPECT_EQ(made.status().message(), "no longer wanted");
  ended = true;
  other.join();
}

// The call that makes it has spent some of its time before, such as on finding rank 0.
TEST(Connect, EndsWithTheCallOfWhichItIsAPart) {
  const auto id = bootstrap::make_unique_id();
  ASSERT_TRUE(id.ok()) << id.status().message();
  Parent from;
  from.until = Deadline::after_ms(patient_ms(300));
  const Deadline soon = Deadline::after_ms(patient_ms(1300));
  const Result<Membership> made = connect(*id, 2, 0, config_of_test(), from);
  EXPECT_FALSE(soon.passed());
  EXPECT_EQ(made.status().code(), moecclTimeout) << made.status().message();
}

// Each rank has made the id by itself, so that two communicators have it.
TEST(Connect, CommunicatorsOfOneDerivedIdHaveKeysOfTheirOwn) {
  const Config config = config_of_test();
  uint64_t group[2] = {};
  bootstrap::Key key = {};
  for (uint64_t& one : group) {
    bootstrap::RootOptions root;
    root.key = key;
    const auto started = bootstrap::Root::start_detached(root, Deadline::after_ms(0));
    ASSERT_TRUE(started.ok()) << started.status().message();
    Result<bootstrap::UniqueId> id = bootstrap::decode_unique_id(*started);
    id->derived = true;
    const auto derived = bootstrap::encode_unique_id(*id);
    ASSERT_TRUE(derived.ok()) << derived.status().message();
    const Result<Membership> made = connect(*derived, 1, 0, config, {});
    ASSERT_TRUE(made.ok()) << made.status().message();
    one = made->fabric->recorder.group();
  }
  EXPECT_NE(group[0], group[1]);
}

// The id of a root that has gone, as rank 0's process or its try has ended since it handed the id out.
moecclUniqueId id_of_gone_root() {
  const auto root = bootstrap::Root::start({});
  EXPECT_TRUE(root.ok()) << root.status().message();
  return (*root)->id();
}

// Rank 0 of the next meeting.
std::thread next_rank_0(const moecclUniqueId& id) {
  return std::thread([id] {
    const Result<Membership> made = connect(id, 2, 0, config_of_test(), {});
    EXPECT_TRUE(made.ok()) << made.status().message();
  });
}

TEST(Connect, ARankWhoseRootGoesAfterTheHandoutMeetsTheNext) {
  const auto place = bootstrap::unique_id_of_place(format("127.0.0.1:{}", 1024 + ::getpid() % 60'000), {});
  const bootstrap::UniqueId at = bootstrap::decode_unique_id(*place).value();
  const std::span<const std::byte> host = at.address.host_bytes();
  const std::string name(reinterpret_cast<const char*>(host.data()), host.size());
  Result<Membership> made = error(moecclInternalError, "not run");
  std::thread rank_1;
  std::vector<bootstrap::HandoutListener> listeners;
  {
    auto first = bootstrap::listen_for_handouts(name);
    ASSERT_TRUE(first.ok()) << first.status().message();
    rank_1 = std::thread([&] { made = connect(*place, 2, 1, config_of_test(), {}); });
    const moecclUniqueId gone = id_of_gone_root();
    const Result<Fd> fd = tests::accept_until((*first)[0].fd(), Deadline::after_ms(patient_ms(20'000)));
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    ASSERT_TRUE(driver::send_all(fd->get(), std::as_bytes(std::span(gone.internal)), Deadline::never()).ok());
  }
  const tests::Stopwatch watch;
  std::thread rank_0 = next_rank_0(*place);
  rank_0.join();
  rank_1.join();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_TRUE(made.ok()) << made.status().message();
}

// As in moecclCommInitEnv.
TEST(Connect, ARankAsksAgainForAnIdWhoseRootHasGone) {
  const moecclUniqueId gone = id_of_gone_root();
  const auto next = bootstrap::make_unique_id();
  ASSERT_TRUE(next.ok()) << next.status().message();
  Parent from;
  from.ask_again = [&] { return next; };
  std::thread rank_0 = next_rank_0(*next);
  const tests::Stopwatch watch;
  const Result<Membership> made = connect(gone, 2, 1, config_of_test(), from);
  rank_0.join();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_TRUE(made.ok()) << made.status().message();
}

// Connects thread ranks, each with its own staging_bytes, on a topology of two nodes of equal size.
std::vector<Result<Membership>> connect_nodes(const char* topology, bool pace, const std::vector<size_t>& staging) {
  const auto id = bootstrap::make_unique_id();
  EXPECT_TRUE(id.ok()) << id.status().message();
  std::vector<Result<Membership>> made;
  for (size_t r = 0; r < staging.size(); ++r) made.emplace_back(error(moecclInternalError, "not run"));
  std::vector<std::thread> ranks;
  for (uint32_t r = 0; r < staging.size(); ++r)
    ranks.emplace_back([&, r] {
      Config config = config_of_test();
      config.topology = topology;
      config.pace = pace;
      config.staging_bytes = staging[r];
      made[r] = connect(*id, static_cast<uint32_t>(staging.size()), r, config, {});
    });
  for (std::thread& t : ranks) t.join();
  return made;
}

constexpr const char* kLongLine = "node:2(bw=1.25GB/s,lat=20ms) gpu:2";

TEST(Connect, StagingAndMessagesGrowOnALongLine) {
  const auto made = connect_nodes(kLongLine, true, {0, 0, 0, 0});
  for (uint32_t r = 0; r < 4; ++r) {
    ASSERT_TRUE(made[r].ok()) << made[r].status().message();
    const exec::Fabric& f = *made[r]->fabric;
    EXPECT_EQ(f.half_bytes, uint64_t{128} << 20);
    for (uint32_t p = 0; p < 4; ++p) {
      if (p / 2 == r / 2)
        EXPECT_LE(f.message_bytes[p], 128u << 10) << "to a rank of the same node";
      else
        EXPECT_GT(f.message_bytes[p], 10'000'000u);
    }
  }
}

TEST(Connect, StagingStaysSmallOnShortLinesAndWhereTheUserLimitsIt) {
  struct Case {
    const char* topology;
    bool pace;
    size_t staging;
  };
  for (const Case& c : {Case{"node:2(bw=50GB/s,lat=5us) gpu:1", true, 0},
                        {kLongLine, true, 16 << 20},
                        {kLongLine, false, 0}}) {  // without pace, the line is only described
    const size_t n = std::string_view(c.topology) == kLongLine ? 4 : 2;
    const auto made = connect_nodes(c.topology, c.pace, std::vector<size_t>(n, c.staging));
    for (const auto& m : made) {
      ASSERT_TRUE(m.ok()) << m.status().message();
      EXPECT_EQ(m->fabric->half_bytes, uint64_t{8} << 20) << c.topology;
    }
  }
}

TEST(Connect, RanksMustAgreeWhetherTheStagingGrows) {
  const auto made = connect_nodes("node:2(bw=1.25GB/s,lat=20ms) gpu:1", true, {0, 16 << 20});
  for (const auto& m : made) {
    EXPECT_EQ(m.status().code(), moecclMismatch);
    EXPECT_NE(m.status().message().find("staging_bytes (268435456 and 16777216)"), std::string::npos)
        << m.status().message();
  }
  for (const auto& m : connect_nodes("node:2(bw=50GB/s,lat=5us) gpu:1", true, {0, 16 << 20}))
    EXPECT_TRUE(m.ok()) << m.status().message();
  for (const auto& m : connect_nodes("node:2(bw=1.25GB/s,lat=20ms) gpu:1", true, {0, 256 << 20}))
    EXPECT_TRUE(m.ok()) << "one rank gives what the other chooses: " << m.status().message();
}

}  // namespace
}  // namespace moeccl::comm
