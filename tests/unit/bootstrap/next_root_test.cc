// SPDX-License-Identifier: Apache-2.0
// What happens at a place whose root rank 0 has given up, and to a rank that waits there for the next one.
#include "src/bootstrap/failed_meetings.h"
#include "src/bootstrap/handout.h"
#include "src/bootstrap/place.h"
#include "src/driver/thread.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

UniqueId place_at(const std::string& address) {
  UniqueId id;
  id.address = driver::parse_ip_address(address).value();
  id.key = random_key().value();
  id.at_rank_0 = true;
  return id;
}

std::string free_address() { return format("127.0.0.1:{}", tests::free_port()); }

// Rank 0 is aborted before its own root has greeted it, and tries again. The rank that is there already learns it.
TEST(NextRoot, APlaceThatRank0LeftBeforeItsRootGreetedItIsFree) {
  const std::string address = free_address();
  for (const UniqueId& place : {place_at(address), decode_unique_id(unique_id_of_place(address, {}).value()).value()}) {
    SCOPED_TRACE(place.address.str());
    const auto first = meet_at_place(place, 0, soon(), {});
    ASSERT_TRUE(first.ok()) << first.status().message();
    std::atomic<int> n_looks{0};
    Status told;
    JoinOptions waits;
    waits.cancelled = [&] { return ++n_looks, Status(); };  // called every 20 ms while it waits for the root's answer
    std::thread rank_1([&] { told = Session::join(*first, 1, 2, soon(), waits).status(); });
    EXPECT_TRUE(eventually([&] { return n_looks.load() >= 6; }));
    JoinOptions aborted;
    aborted.cancelled = [] { return error(moecclAborted, "aborted by the test"); };
    EXPECT_EQ(Session::join(*first, 0, 2, soon(), aborted).status().code(), moecclAborted);
    const Stopwatch watch;
    const auto second = meet_at_place(place, 0, Deadline::after_ms(patient_ms(2000)), {});
    EXPECT_TRUE(second.ok()) << second.status().message();
    rank_1.join();
    MOECCL_EXPECT_WITHIN(watch, 1000);
    EXPECT_EQ(told.code(), moecclRemoteError);
    EXPECT_TRUE(contains(told.message(), "rank 0 has given up")) << told.message();
    EXPECT_TRUE(second.ok() && Session::join(*second, 0, 1, soon()).ok());
  }
}

TEST(NextRoot, AnIdCanBeMadeAgainAtThePortWhereRank0HasFailed) {
  const std::string address = free_address();
  for (int i = 0; i < 3; ++i) {
    const Stopwatch watch;
    const auto id = make_unique_id(address);
    MOECCL_EXPECT_WITHIN(watch, 1000);
    ASSERT_TRUE(id.ok()) << "try " << i << ": " << id.status().message();
    const Status s = Session::join(*id, 0, 2, Deadline::after_ms(patient_ms(100))).status();
    EXPECT_EQ(s.code(), moecclTimeout) << s.message();
  }
}

// The root of the last meeting need not have failed: it may have refused the rank for a moment when it was crowded.
TEST(NextRoot, ARankThatWaitsForItDoesNotJoinTheLastMeeting) {
  const auto root = start_root(patient_ms(20'000), "127.0.0.1");
  const UniqueId id = decode_unique_id(root->id()).value();
  FailedMeetings::add(meeting_number(id.key, 0), 1);
  Status first;
  std::thread rank_0([&] { first = Session::join(root->id(), 0, 2, Deadline::after_ms(patient_ms(1000))).status(); });
  JoinOptions waits;
  waits.wait_for_root = true;
  const Status s = Session::join(root->id(), 1, 2, Deadline::after_ms(patient_ms(300)), waits).status();
  EXPECT_EQ(s.code(), moecclTimeout) << s.message();
  EXPECT_TRUE(contains(s.message(), "rank 0 has not come again")) << s.message();
  rank_0.join();
  EXPECT_EQ(first.code(), moecclTimeout) << first.message();
  EXPECT_TRUE(contains(first.message(), "rank 1 of 2 did not join")) << first.message();
}

// Thousands of them would keep the root's thread from telling the others the reason.
TEST(NextRoot, RanksOfALargeGroupAskSeldomForIt) {
  UniqueId id = place_at("127.0.0.1:1");
  const auto listener = driver::listen_at(driver::parse_ip_address("127.0.0.1").value());
  id.address = driver::local_address(listener->get()).value();
  id.at_rank_0 = false;
  constexpr int kMany = 16'000;
  FailedMeetings::add(meeting_number(id.key, 7), 1);
  JoinOptions waits;
  waits.wait_for_root = true;
  const Deadline end = Deadline::after_ms(3000);
  std::thread rank_1([&] {
    const Status s = Session::join(encode_unique_id(id).value(), 1, kMany, end, waits).status();
    EXPECT_EQ(s.code(), moecclTimeout) << s.message();
  });
  int n_asked = 0;
  while (!end.passed()) {
    const Result<Fd> fd = tests::accept_until(listener->get(), end);
    if (!fd.ok()) break;
    ServerHandshake root(id.key, {Role::kRoot, 7, kMany}, Fresh::make(true).value());
    HandshakeFrame frame;
    ASSERT_TRUE(driver::recv_exact(fd->get(), frame, end).ok());
    ASSERT_TRUE(driver::send_all(fd->get(), root.on_hello(frame, Role::kMember).reply, end).ok());
    EXPECT_FALSE(driver::recv_exact(fd->get(), frame, end).ok()) << "a proof came";
    ++n_asked;
  }
  rank_1.join();
  EXPECT_GE(n_asked, 1);
  EXPECT_LE(n_asked, 12);  // one in two seconds on average
}

TEST(NextRoot, AStoppedMeetingPointThatHasAcceptedARankIsNotAQuestionOfTheSecret) {
  auto channel = make_pair_of_sockets();
  Children host;
  host.start([&] {
    const std::unique_ptr<Root> root = start_root(patient_ms(20'000), "127.0.0.1");
    (void)driver::send_now(channel.second.get(), std::as_bytes(std::span(root->id().internal)));
    for (;;) ::pause();
    return 0;
  });
  moecclUniqueId id{};
  ASSERT_TRUE(driver::recv_exact(channel.first.get(), std::as_writable_bytes(std::span(id.internal)), soon()).ok());
  std::atomic<int> n_looks{0};
  JoinOptions options;
  options.others_alive = [&] { return ++n_looks, Status(); };
  Status s;
  std::thread rank([&] { s = Session::join(id, 1, 2, Deadline::after_ms(patient_ms(1000)), options).status(); });
  // The root answers hello and proof within milliseconds, and is then looked at every 20 ms.
  EXPECT_TRUE(eventually([&] { return n_looks.load() >= 10; }));
  ::kill(host.pid(0), SIGSTOP);
  rank.join();
  EXPECT_EQ(s.code(), moecclTimeout) << s.message();
  EXPECT_TRUE(contains(s.message(), "has accepted this rank")) << s.message();
  EXPECT_FALSE(contains(s.message(), "MOECCL_SECRET")) << s.message();
}

}  // namespace
}  // namespace moeccl::bootstrap
