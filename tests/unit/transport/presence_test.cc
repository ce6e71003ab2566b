// SPDX-License-Identifier: Apache-2.0
// A rank whose process has ended is found out although its NIC says nothing, and one that lives, or may live, is not.
#include <gtest/gtest.h>

#include <cstring>

#include "src/driver/port.h"
#include "tests/support/fake_verbs.h"
#include "tests/support/network_fabrics.h"
#include "tests/support/timing.h"
#include "transport/common/presence.h"

namespace moeccl::tests {
namespace {

using transport::Presence;
using transport::RollCall;

Presence present(const std::string& met_at = "") {
  transport::NetworkOptions o;
  o.host_of = {0, 1};
  o.same_network = {true, true};
  o.met_at = met_at;
  Presence made = Presence::open(o, Env());
  EXPECT_NE(made.address(), "");
  return made;
}

void meet(RollCall& calls) {
  while (calls.meet(0)) {
  }
}

std::vector<uint32_t> gone(RollCall& calls, const std::vector<uint32_t>& silent) { return calls.gone(silent); }

using Ranks = std::vector<uint32_t>;

TEST(Presence, EndsWithItsListenerAndNotBefore) {
  RollCall calls;
  const Presence stays = present();
  Presence ends = present();
  calls.add(1, ends.address(), true);
  calls.add(2, stays.address(), true);
  meet(calls);
  EXPECT_EQ(gone(calls, {1, 2}), Ranks());
  EXPECT_TRUE(ends.answer());
  ends = Presence();
  EXPECT_EQ(gone(calls, {1, 2}), Ranks{1});
  EXPECT_EQ(gone(calls, {2}), Ranks());
}

// A process that is stopped takes no connections.
TEST(Presence, NeedsNobodyToAnswer) {
  RollCall calls;
  const Presence stopped = present();
  calls.add(1, stopped.address(), true);
  meet(calls);
  for (int i = 0; i < 300; ++i) ASSERT_EQ(gone(calls, {1}), Ranks());
}

// Where hosts have names of their own (MOECCL_HOST_ID), it is not known whether they are one machine.
TEST(Presence, IsWhereTheRanksHaveMet) {
  EXPECT_EQ(present("127.0.0.2").address().substr(0, 10), "127.0.0.2:");
  EXPECT_EQ(present().address().substr(0, 10), "127.0.0.1:");
}

// The address is this machine's too, and this machine would refuse in the other one's place.
TEST(Presence, OnAnotherMachineWithThisOnesAddressSaysNothing) {
  RollCall calls;
  const Presence stays = present();
  Presence elsewhere = present();
  driver::SocketAddress at = *driver::parse_ip_address("127.0.0.1");
  const auto closed = driver::reserve_port(&at);
  ASSERT_TRUE(closed.ok());
  calls.add(1, stays.address(), true);
  calls.add(2, elsewhere.address(), false);
  calls.add(3, at.str(), true);
  calls.add(4, "", true);
  calls.add(5, "10.0.0.1 and more", true);
  meet(calls);
  elsewhere = Presence();
  EXPECT_EQ(gone(calls, {1, 2, 3, 4, 5}), Ranks());
}

// A firewall that refuses connections is no death. What another address of the host answers says nothing about it.
TEST(Presence, AtAnAddressThatNeverAnsweredSaysNothing) {
  RollCall calls;
  const Presence stays = present("127.0.0.2");
  Presence refuses = present();
  calls.add(1, refuses.address(), true);
  calls.add(2, stays.address(), true);
  refuses = Presence();
  meet(calls);
  EXPECT_EQ(gone(calls, {1, 2}), Ranks());
}

// Listens, has room for one connection, and says nothing to any other.
class Crowded {
 public:
  Crowded() : at_(*driver::parse_ip_address("127.0.0.1")), listener_(make(&at_)) {}
  std::string address() const { return at_.str(); }
  void make_room() const {
    for (bool any = true; any;) any = static_cast<bool>(driver::accept_now(listener_.get()).value());
  }
  void end() { listener_ = {}; }

 private:
  static Fd make(driver::SocketAddress* at) {
    at->set_port(static_cast<uint16_t>(free_port()));
    Result<Fd> made = driver::listen_at(*at, 0);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? std::move(*made) : Fd();
  }
  driver::SocketAddress at_;
  Fd listener_;
};

// The first packet to a host may be lost.
TEST(Presence, IsAskedAgain) {
  RollCall calls;
  Crowded host;
  calls.add(1, host.address(), true);  // takes the room
  meet(calls);
  host.make_room();
  meet(calls);
  host.end();
  EXPECT_EQ(gone(calls, {1}), Ranks{1});
}

TEST(Presence, AsksAfterManyInTurn) {
  RollCall calls;
  const Presence stays = present();
  std::vector<uint32_t> silent;
  for (uint32_t r = 0; r < 100; ++r) {
    calls.add(r, stays.address(), true);
    silent.push_back(r);
  }
  Presence ends = present();
  calls.add(100, ends.address(), true);
  silent.push_back(100);
  meet(calls);
  ends = Presence();
  Ranks ended;
  for (int i = 0; i < 2 && ended.empty(); ++i) ended = gone(calls, silent);
  EXPECT_EQ(ended, Ranks{100});
}

class SilentNics : public OverFakeVerbs {};

// As on rdma_rxe with 7 retries: no request to a dead process's queue pair ever fails.
TEST_F(SilentNics, ADeadProcessIsNamedSoonAndALivingOneIsNot) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 3);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the ranks have asked once
  fake().control().set_silent(true);
  ranks[0].engine->begin();
  const Deadline alive = Deadline::after_ms(1000);
  EXPECT_FALSE(until(ranks[0], [&] { return alive.passed() || !ranks[0].link(1).check_peer().ok(); }) &&
               !alive.passed());
  EXPECT_GT(ranks[0].link(1).unacknowledged_ms(), 0);
  ranks[1].engine = nullptr;  // its process has ended
  const int64_t ended_ns = now_ns();
  EXPECT_TRUE(until(ranks[0], [&] { return !ranks[0].link(1).check_peer().ok(); }));
  EXPECT_LE((now_ns() - ended_ns) / 1'000'000, patient_ms(1000));
  const std::string why = ranks[0].link(1).check_peer().message();
  EXPECT_TRUE(has(why, "lost rank 1") && has(why, "has ended")) << why;
  EXPECT_TRUE(ranks[0].link(2).check_peer().ok()) << ranks[0].link(2).check_peer().message();
  ranks[0].engine->end();
}

// What a timeout can say about a peer whose NIC is silent.
TEST_F(SilentNics, AMessageSaysWhatIsKnown) {
  NetworkFabrics ranks(fake_verbs::kNetworks[0], 2);
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  transport::Link& link = ranks[0].link(1);
  std::string why = link.why_silent();
  EXPECT_TRUE(has(why, "its process exists, and its host answers at 127.0.0.1:")) << why;
  EXPECT_TRUE(has(why, "RDMA from mlx5_0:1 (10.0.0.1) to 10.0.0.1 (mlx5_0:1) does not pass, 0 of ")) << why;
  EXPECT_TRUE(has(why, "MOECCL_IB_GID_INDEX")) << why;
  ranks[0].engine->begin();
  const std::vector<std::byte> data(4 << 20);  // more than the ring holds, so completions are asked for
  EXPECT_TRUE(until(ranks[0], [&] { return *link.put(0, data.data(), data.size()) == transport::PutState::kDone; }));
  why = link.why_silent();
  EXPECT_TRUE(!has(why, " 0 of ") && has(why, "look at its port")) << why;
  ranks[0].engine->end();
  fake().control().set_down(true);
  why = link.why_silent();
  EXPECT_TRUE(has(why, "mlx5_0:1 of this host: its port is not active")) << why;
  fake().control().set_down(false);
  fake().control().set_silent(true);
  ranks[1].engine = nullptr;  // its process has ended
  why = link.why_silent();
  EXPECT_TRUE(has(why, "its host refuses connections to 127.0.0.1:")) << why;
}

// A host that is silent keeps the engine's thread waiting. What an operation leaves to the thread meanwhile, such as a
// signal behind a put, is done afterwards, and not when the thread next wakes by itself.
TEST_F(SilentNics, AnOperationDuringTheFirstQuestionIsNotForgotten) {
  int64_t least_ms = INT64_MAX;
  for (int trial = 0; trial < 5; ++trial) {
    Crowded silent;
    const auto tamper = [&](uint32_t reader, NetworkFabrics::Offers& offers) {
      // Rank 0 asks after rank 1 in vain. Rank 1 does not ask, as that would wake rank 0.
      const std::string address = reader == 0 ? silent.address() : "127.0.0.1:00000";
      std::vector<std::byte>& offer = offers[1 - reader];
      auto* const text = reinterpret_cast<char*>(offer.data());
      const size_t at = std::string_view(text, offer.size()).find("127.0.0.1:");
      ASSERT_NE(at, std::string::npos);
      ASSERT_EQ(address.size(), 15u);  // as long as what it replaces
      std::memcpy(text + at, address.data(), 15);
    };
    NetworkFabrics ranks(fake_verbs::kNetworks[2], 2, 4 << 20, {}, tamper);
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    fake().control().set_delay_us(3000);
    std::vector<std::byte> data(64 << 10);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the thread has begun to ask
    const Stopwatch watch;
    ranks[0].engine->begin();
    const auto put = [&] {
      const auto state = ranks[0].link(1).put(0, data.data(), data.size());
      EXPECT_TRUE(state.ok());
      return !state.ok() || *state == transport::PutState::kDone;
    };
    EXPECT_TRUE(until(ranks[0], put));
    EXPECT_TRUE(ranks[0].link(1).signal(0, 1, 1).ok());
    ranks[0].engine->end();
    for (const Deadline late = Deadline::after_ms(patient_ms(3000)); !late.passed();) {
      if ((ranks[1].own->signal(0, 0).word.load() & 0xffffffff) == 1) break;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    least_ms = std::min(least_ms, watch.fair_ms());
  }
  EXPECT_LT(least_ms, 500);
}

}  // namespace
}  // namespace moeccl::tests
