// SPDX-License-Identifier: Apache-2.0
// Ranks of a communicator meet again, as threads that see each other end in different ways.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "src/bootstrap/handshake.h"
#include "src/driver/port.h"
#include "src/driver/thread.h"
#include "src/world/reunion.h"
#include "tests/support/timing.h"

namespace moeccl::comm {
namespace {

struct Came {
  Status status;
  std::vector<uint32_t> members;
  bootstrap::Key key = {};
};

class ReunionTest : public ::testing::TestWithParam<bool> {
 protected:
  // Starts from the state that arrange() leaves.
  void SetUp() override {
    const auto key = bootstrap::random_key();
    ASSERT_TRUE(key.ok());
    for (uint32_t r = 0; r < kRanks; ++r) {
      auto address = driver::parse_ip_address("127.0.0.1");
      ASSERT_TRUE(address.ok());
      if (GetParam()) {
        auto port = driver::reserve_port(&*address);
        ASSERT_TRUE(port.ok()) << port.status().message();
        driver::allow_reuse(*port);
        ports_.push_back(std::move(*port));
        addresses_.push_back(*address);
      } else {
        addresses_.push_back(
            driver::unix_address("moeccl-reunion-test-" + std::to_string(::getpid()) + "-" + std::to_string(r)));
      }
    }
    key_ = *key;
  }

  MeetingPlaces places(uint32_t rank) const {
    MeetingPlaces p;
    p.rank = rank;
    p.key = key_;
    p.places = addresses_;
    p.host_hash = 1;
    return p;
  }

  Came meet(uint32_t rank, std::function<bool(uint32_t)> gone, std::vector<uint32_t> excluded = {},
            int64_t time_ms = 20'000) {
    ReunionCall call;
    call.excluded.resize(addresses_.size());
    for (const uint32_t r : excluded) call.excluded[r] = true;
    call.only_excluded = !excluded.empty();
    call.gone = std::move(gone);
    call.deadline = Deadline::after_ms(time_ms);
    const MeetingPlaces p = places(rank);
    Result<Reunion> met = meet_again(p, call);
    if (!met.ok()) return {met.status(), {}, {}};
    const Status together = met->session->barrier(Deadline::after_ms(5000));
    EXPECT_TRUE(together.ok()) << together.message();
    met->session->close();
    if (met->root != nullptr) bootstrap::Root::detach(std::move(met->root));
    return {{}, met->members, met->key};
  }

  static constexpr uint32_t kRanks = 4;
  bootstrap::Key key_ = {};
  std::vector<driver::SocketAddress> addresses_;
  std::vector<Fd> ports_;
};

INSTANTIATE_TEST_SUITE_P(Over, ReunionTest, ::testing::Bool(),
                         [](const ::testing::TestParamInfo<bool>& info) { return info.param ? "tcp" : "unix"; });

const auto kNobody = [](uint32_t) { return false; };

std::vector<Came> in_threads(const std::vector<std::function<Came()>>& ranks) {
  std::vector<Came> came(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) threads.emplace_back([&, i] { came[i] = ranks[i](); });
  for (std::thread& t : threads) t.join();
  return came;
}

void expect_all(const std::vector<Came>& came, const std::vector<uint32_t>& members) {
  for (const Came& c : came) {
    EXPECT_TRUE(c.status.ok()) << c.status.message();
    EXPECT_EQ(c.members, members);
    EXPECT_EQ(c.key, came[0].key);
    EXPECT_NE(c.key, bootstrap::Key{});
  }
}

TEST_P(ReunionTest, WhoIsGoneForAllIsNotWaitedFor) {
  const auto gone = [](uint32_t r) { return r == 0 || r == 2; };
  expect_all(in_threads({[&] { return meet(1, gone); }, [&] { return meet(3, gone); }}), {1, 3});
}

TEST_P(ReunionTest, AnEndThatSomeSeeLaterIsEnough) {
  std::atomic<bool> seen{false};
  const auto came = in_threads({[&] { return meet(0, [](uint32_t r) { return r == 3; }); },
                                [&] { return meet(1, [&](uint32_t r) { return r == 3 && seen; }); },
                                [&] {
                                  driver::sleep_ns(100'000'000);
                                  seen = true;
                                  return meet(2, [](uint32_t r) { return r == 3; });
                                }});
  expect_all(came, {0, 1, 2});
}

// The connection between 0 and 1 has broken, but both are alive: each sees the other end, and the other ranks see
// nothing.
TEST_P(ReunionTest, TwoThatLostEachOtherAreBothThere) {
  for (const int late_ms : {0, 150, 400}) {
    const auto came = in_threads({[&] {
                                    driver::sleep_ns(int64_t{late_ms} * 1'000'000);
                                    return meet(0, [](uint32_t r) { return r == 1; });
                                  },
                                  [&] { return meet(1, [](uint32_t r) { return r == 0; }); },
                                  [&] { return meet(2, kNobody); }, [&] { return meet(3, kNobody); }});
    expect_all(came, {0, 1, 2, 3});
  }
}

// The leader is lost while the others wait with it.
TEST_P(ReunionTest, TheNextOneLeadsWhenTheLeaderIsLost) {
  std::atomic<bool> lost{false};
  const auto gone = [&](uint32_t r) { return r == 0 && lost; };
  bootstrap::RootOptions options;
  options.timeout_ms = 10'000;
  options.key = key_;
  options.survivors = true;
  if (GetParam())
    options.socket_addr = addresses_[0].str();
  else
    options.unix_name = addresses_[0].str().substr(std::string("unix:@").size());
  auto root = bootstrap::Root::start(options);
  ASSERT_TRUE(root.ok()) << root.status().message();
  std::thread end([&] {
    driver::sleep_ns(200'000'000);
    lost = true;
    root->reset();
  });
  expect_all(in_threads({[&] { return meet(1, gone); }, [&] { return meet(2, gone); }, [&] { return meet(3, gone); }}),
             {1, 2, 3});
  end.join();
}

TEST_P(ReunionTest, WhoDoesNotComeIsNamed) {
  const auto came = in_threads({[&] { return meet(0, kNobody, {}, 300); },
                                [&] {
                                  return meet(
                                      2, [](uint32_t r) { return r == 3; }, {}, 300);
                                }});
  for (const Came& c : came) {
    EXPECT_EQ(c.status.code(), moecclTimeout) << c.status.message();
    EXPECT_NE(c.status.message().find("ranks 1, 3 of 4 did not join"), std::string::npos) << c.status.message();
  }
  const Came alone = meet(2, kNobody, {0}, 300);
  EXPECT_EQ(alone.status.code(), moecclTimeout);
  EXPECT_NE(alone.status.message().find("rank 1, which would lead"), std::string::npos) << alone.status.message();
}

TEST_P(ReunionTest, ListsThatDifferAreAMismatch) {
  const auto came = in_threads({[&] { return meet(0, kNobody, {3}); }, [&] { return meet(1, kNobody, {3}); },
                                [&] { return meet(2, [](uint32_t r) { return r == 3; }, {}); }});
  for (const Came& c : came) {
    EXPECT_EQ(c.status.code(), moecclMismatch) << c.status.message();
    EXPECT_NE(c.status.message().find("leave different ranks out"), std::string::npos) << c.status.message();
  }
}

TEST_P(ReunionTest, StrangersToTheKeyAreNoRanks) {
  std::thread stranger([&] {
    MeetingPlaces p = places(1);
    p.key[0] ^= std::byte{1};
    ReunionCall call;
    call.excluded.resize(kRanks);
    call.gone = [](uint32_t r) { return r > 1; };
    call.deadline = Deadline::after_ms(300);
    EXPECT_FALSE(meet_again(p, call).ok());
  });
  const auto gone = [](uint32_t r) { return r > 1; };
  const auto came = in_threads({[&] { return meet(0, gone); },
                                [&] {
                                  driver::sleep_ns(400'000'000);
                                  return meet(1, gone);
                                }});
  stranger.join();
  expect_all(came, {0, 1});
}

// Hosts without power answer nothing: ranks there are all asked at once, and once.
TEST_P(ReunionTest, RanksOfHostsThatAnswerNothingCostLittle) {
  if (!GetParam()) GTEST_SKIP() << "the ranks of one host are always answered for";
  constexpr uint32_t kLost = 32;
  auto place = driver::parse_ip_address("127.0.0.1");
  ASSERT_TRUE(place.ok());
  const auto full = driver::listen_at(*place, 0);  // drops what comes while a connection waits to be accepted
  ASSERT_TRUE(full.ok()) << full.status().message();
  const driver::SocketAddress silent = *driver::local_address(full->get());
  std::vector<Fd> waiting;
  for (;;) {
    auto connected = driver::connect_to(silent, Deadline::after_ms(200));
    if (!connected.ok()) break;
    waiting.push_back(std::move(*connected));
  }
  const std::vector<driver::SocketAddress> alive(addresses_.begin(), addresses_.begin() + 3);
  addresses_.assign(kLost, silent);
  addresses_.insert(addresses_.end(), alive.begin(), alive.end());
  std::atomic<bool> lost{false};
  const auto gone = [&](uint32_t r) { return r < kLost || (r == kLost && lost); };
  bootstrap::RootOptions options;
  options.key = key_;
  options.survivors = true;
  options.socket_addr = alive[0].str();
  auto root = bootstrap::Root::start(options);
  ASSERT_TRUE(root.ok()) << root.status().message();
  const tests::Stopwatch watch;
  std::thread end([&] {
    driver::sleep_ns(400'000'000);
    lost = true;
    root->reset();
  });
  expect_all(in_threads({[&] { return meet(kLost + 1, gone); }, [&] { return meet(kLost + 2, gone); }}),
             {kLost + 1, kLost + 2});
  MOECCL_EXPECT_WITHIN(watch, 1500);
  end.join();
}

// Before and after the meeting, nothing listens there.
TEST_P(ReunionTest, APlaceIsSilentWithoutAMeeting) {
  const auto silent = [&] { return !driver::connect_to(addresses_[0], Deadline::after_ms(200)).ok(); };
  EXPECT_TRUE(silent());
  for (int i = 0; i < 3; ++i) {
    expect_all(in_threads({[&] { return meet(0, [](uint32_t r) { return r > 1; }); },
                           [&] { return meet(1, [](uint32_t r) { return r > 1; }); }}),
               {0, 1});
    EXPECT_TRUE(silent());
  }
}

}  // namespace
}  // namespace moeccl::comm
