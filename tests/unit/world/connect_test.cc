// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/unique_id.h"
#include "src/world/membership.h"
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

}  // namespace
}  // namespace moeccl::comm
