// SPDX-License-Identifier: Apache-2.0
// The messages to the other ranks when a rank is missing, doubled, different, dead or at odds: they always name the
// rank, and always come soon.
#include <sys/prctl.h>

#include <atomic>
#include <optional>

#include "src/base/random.h"
#include "src/base/wire.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "src/driver/socket.h"
#include "tests/support/hosts.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

Status join_and_close(const moecclUniqueId& id, int rank, int n_ranks, Deadline deadline = soon()) {
  MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(id, rank, n_ranks, deadline));
  session->close();
  return {};
}

TEST(Failure, MissingRanksAreNamedAtTheDeadlineOfARank) {
  std::unique_ptr<Root> root = start_root();
  const Stopwatch watch;
  for (const Status& s : run_threads(3, [&](int i) {
         return join_and_close(root->id(), i * 2, 8, Deadline::after_ms(patient_ms(300)));  // 0, 2, 4 of 8
       })) {
    EXPECT_EQ(s.code(), moecclTimeout);
    EXPECT_TRUE(contains(s.message(), "ranks 1, 3, 5-7 of 8 did not join")) << s.message();
  }
  MOECCL_EXPECT_WITHIN(watch, 1300);
}

TEST(Failure, ARankWithAnotherSecretIsToldThatTheSecretAdmits) {
  std::unique_ptr<Root> root = start_root(patient_ms(20'000), "127.0.0.1");
  UniqueId id = decode_unique_id(root->id()).value();
  id.key = random_key().value();
  const Status s = join_and_close(encode_unique_id(id).value(), 0, 2, Deadline::after_ms(patient_ms(300)));
  EXPECT_EQ(s.code(), moecclTimeout);
  EXPECT_TRUE(contains(s.message(), "its id or its MOECCL_SECRET")) << s.message();
}

TEST(Failure, ARankWithAnotherSecretIsNamedToTheOthers) {
  for (const bool over_unix : {true, false}) {
    std::unique_ptr<Root> root = start_root(patient_ms(20'000), over_unix ? "" : "127.0.0.1");
    UniqueId other = decode_unique_id(root->id()).value();
    other.key = random_key().value();
    const std::vector<Status> joined = run_threads(2, [&](int rank) {
      const Deadline deadline = Deadline::after_ms(patient_ms(300));
      return join_and_close(rank == 0 ? root->id() : encode_unique_id(other).value(), rank, 2, deadline);
    });
    EXPECT_EQ(joined[0].code(), moecclTimeout);
    const std::string from = over_unix ? format("a rank in process {} came", getpid()) : "a rank at 127.0.0.1 came";
    EXPECT_TRUE(contains(joined[0].message(), "rank 1 of 2 did not join")) << joined[0].message();
    EXPECT_TRUE(contains(joined[0].message(), from)) << joined[0].message();
    EXPECT_TRUE(contains(joined[0].message(), "MOECCL_SECRET")) << joined[0].message();
  }
}

TEST(Failure, AMeetingPointThatDoesNotOpenIsALaunchersAddress) {
  UniqueId id;
  id.key = random_key().value();
  id.address = driver::local_address(driver::listen_at(driver::parse_ip_address("127.0.0.1").value())->get()).value();
  const Deadline deadline = Deadline::after_ms(patient_ms(300));
  const Status s = Session::join(encode_unique_id(id).value(), 1, 2, deadline,
                                 {.wait_for_root = true, .others_alive = {}, .gone = {}})
                       .status();
  EXPECT_EQ(s.code(), moecclTimeout);
  EXPECT_TRUE(contains(s.message(), "MASTER_ADDR")) << s.message();
  EXPECT_FALSE(contains(s.message(), "its group is complete")) << s.message();
}

// A rank waits until rank 0 listens, but not until it listens again.
TEST(Failure, AMeetingPointThatWasThereAndIsGoneIsNotWaitedFor) {
  std::unique_ptr<Root> root = start_root(patient_ms(20'000), "127.0.0.1");
  std::atomic<bool> joined{false};
  JoinOptions options;
  options.wait_for_root = true;
  options.others_alive = [&] { return joined = true, Status(); };
  Status status;
  const moecclUniqueId id = root->id();
  std::thread rank([&] { status = Session::join(id, 1, 2, soon(), options).status(); });
  EXPECT_TRUE(eventually([&] { return joined.load(); }));
  const Stopwatch watch;
  root.reset();
  rank.join();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_EQ(status.code(), moecclRemoteError) << status.message();
  EXPECT_TRUE(contains(status.message(), "in rank 0's process")) << status.message();
}

// Without a launcher, too, only a refusal shows that the meeting point has ended.
TEST(Failure, AMeetingPointWithoutARouteIsTriedAgain) {
  std::string why;
  const auto hosts = testing::TestHosts::create({}, &why);
  if (hosts == nullptr) GTEST_SKIP() << why;
  ASSERT_TRUE(hosts->run(1, "ip link set eth0 down"));
  auto told = make_pair_of_sockets(), tried = make_pair_of_sockets();
  Children ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.start([&, rank] {
      if (!hosts->enter(rank)) return 10;
      std::unique_ptr<Root> root;
      moecclUniqueId id{};
      if (rank == 0) {
        root = start_root(patient_ms(20'000), testing::TestHosts::address(0));
        id = root->id();
        (void)driver::send_now(told.second.get(), std::as_bytes(std::span(id.internal)));
      } else {
        (void)driver::recv_exact(told.first.get(), std::as_writable_bytes(std::span(id.internal)), soon());
        const Status s = join_and_close(id, 1, 2, Deadline::after_ms(300));
        if (s.code() != moecclTimeout || !contains(s.message(), "cannot be reached from here")) return 11;
        const std::byte one{};
        (void)driver::send_now(tried.second.get(), {&one, 1});
      }
      return join_and_close(id, rank, 2).ok() ? 0 : 12;
    });
  }
  std::byte one;
  ASSERT_TRUE(driver::recv_exact(tried.first.get(), {&one, 1}, soon()).ok());
  ::usleep(200'000);
  ASSERT_TRUE(hosts->run(1, "ip link set eth0 up"));
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
}

// What accepts no connections, or accepts and says nothing, holds an attempt for up to 5 s.
TEST(Failure, AnAbortEndsAnAttempt) {
  UniqueId id;
  id.key = random_key().value();
  const Result<Fd> mute = driver::listen_at(driver::parse_ip_address("127.0.0.1").value(), 0);
  id.address = driver::local_address(mute->get()).value();
  std::vector<Fd> queue;
  for (const bool full : {false, true}) {
    while (full) {
      Result<Fd> one = driver::connect_to(id.address, Deadline::after_ms(100));
      if (!one.ok()) break;
      queue.push_back(std::move(*one));
    }
    const Stopwatch watch;
    const Deadline abort = Deadline::after_ms(100);
    JoinOptions options;
    options.cancelled = [&] { return abort.passed() ? error(moecclAborted, "aborted") : Status(); };
    EXPECT_EQ(Session::join(encode_unique_id(id).value(), 1, 2, soon(), options).status().code(), moecclAborted);
    MOECCL_EXPECT_WITHIN(watch, 400);
  }
}

// A timeout of the communicator travels whole.
TEST(Failure, TimesBeyondAnHourAreKept) {
  EXPECT_GT(wire_timeout(Deadline::after_ms(86'400'000)), 86'300'000u);
  EXPECT_EQ(wire_timeout(Deadline::after_ms(int64_t{1} << 40)), UINT32_MAX);
  EXPECT_EQ(wire_timeout(Deadline::after_ms(0)), 1u);
  EXPECT_EQ(wire_timeout(Deadline::never()), 0u);
}

TEST(Failure, MissingRanksAreNamedAtTheDeadlineOfTheRoot) {
  std::unique_ptr<Root> root = start_root(300);
  const Status s = join_and_close(root->id(), 1, 2, Deadline::never());
  EXPECT_EQ(s.code(), moecclTimeout);
  EXPECT_TRUE(contains(s.message(), "rank 0 of 2 did not join")) << s.message();
  EXPECT_TRUE(contains(s.message(), "300 ms")) << s.message();
  EXPECT_TRUE(contains(s.message(), "MOECCL_INIT_TIMEOUT_MS")) << s.message();
}

// A config may give init longer than the environment of the process with the meeting point.
TEST(Failure, ARankMayGiveMoreTimeThanTheRoot) {
  std::unique_ptr<Root> root = start_root(100);
  const int64_t begun = now_ns();
  const Status s = join_and_close(root->id(), 1, 2, Deadline::after_ms(1000));
  EXPECT_EQ(s.code(), moecclTimeout);
  EXPECT_TRUE(contains(s.message(), "the time of rank 1")) << s.message();
  EXPECT_GE(now_ns() - begun, 900'000'000);
}

TEST(Failure, ARankThatNeverCallsIsNamed) {
  std::atomic<int> n_given_up = 0;
  std::unique_ptr<Root> root = start_root();
  const auto body = [&](int rank) -> Status {
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 3, soon()));
    if (rank == 1) {
      EXPECT_TRUE(eventually([&] { return n_given_up == 2; }));
      return {};
    }
    const Status s = session->barrier(Deadline::after_ms(300));
    ++n_given_up;
    return s;
  };
  const std::vector<Status> results = run_threads(3, body);
  for (const int rank : {0, 2}) {
    const Status& s = results[static_cast<size_t>(rank)];
    EXPECT_EQ(s.code(), moecclTimeout);
    EXPECT_TRUE(contains(s.message(), "rank 1 of 3 did not call barrier")) << s.message();
  }
}

TEST(Failure, ADoubledRankIsNamedToAll) {
  std::unique_ptr<Root> root = start_root();
  const Stopwatch watch;
  const int ranks[] = {0, 1, 1};
  for (const Status& s : run_threads(3, [&](int i) { return join_and_close(root->id(), ranks[i], 4); })) {
    EXPECT_EQ(s.code(), moecclMismatch);
    EXPECT_TRUE(contains(s.message(), "rank 1 was joined twice")) << s.message();
    EXPECT_TRUE(contains(s.message(), format("process {}", ::getpid()))) << s.message();
  }
  // Ranks that come later are told too.
  const Status late = join_and_close(root->id(), 3, 4);
  EXPECT_TRUE(contains(late.message(), "rank 1 was joined twice")) << late.message();
  MOECCL_EXPECT_WITHIN(watch, 1000);
}

// Between hosts, where no process is known, the message says from where each has come.
TEST(Failure, ADoubledRankOfAnotherHostIsNamedWithItsAddress) {
  std::unique_ptr<Root> root = start_root(patient_ms(20'000), "127.0.0.1");
  const int ranks[] = {0, 1, 1};
  for (const Status& s : run_threads(3, [&](int i) { return join_and_close(root->id(), ranks[i], 4); })) {
    EXPECT_EQ(s.code(), moecclMismatch);
    EXPECT_TRUE(contains(s.message(), "by rank 1 (at 127.0.0.1) and by another (at 127.0.0.1): give")) << s.message();
  }
}

TEST(Failure, DifferentGroupSizesAreNamedToAll) {
  std::unique_ptr<Root> root = start_root();
  const Stopwatch watch;
  for (const Status& s : run_threads(2, [&](int rank) { return join_and_close(root->id(), rank, 4 + rank); })) {
    EXPECT_EQ(s.code(), moecclMismatch);
    for (const char* part : {"rank 0", "rank 1", "4", "5"}) EXPECT_TRUE(contains(s.message(), part)) << s.message();
  }
  MOECCL_EXPECT_WITHIN(watch, 1000);
}

TEST(Failure, BadArgumentsAreRefusedBeforeAnythingIsSent) {
  std::unique_ptr<Root> root = start_root();
  EXPECT_EQ(join_and_close(root->id(), -1, 4).code(), moecclInvalidArgument);
  EXPECT_EQ(join_and_close(root->id(), 4, 4).code(), moecclInvalidArgument);
  EXPECT_EQ(join_and_close(root->id(), 0, 0).code(), moecclInvalidArgument);
  EXPECT_EQ(join_and_close(root->id(), 0, kMaxRanks + 1).code(), moecclInvalidArgument);
  EXPECT_EQ(join_and_close(moecclUniqueId{}, 0, 1).code(), moecclInvalidArgument);
  EXPECT_TRUE(join_and_close(root->id(), 0, 1).ok());
}

TEST(Failure, DifferentCallsAreNamed) {
  std::unique_ptr<Root> root = start_root();
  const auto body = [&](int rank) -> Status {
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 2, soon()));
    if (rank == 0) return session->barrier(soon());
    return session->all_gather({}, soon()).status();
  };
  for (const Status& s : run_threads(2, body)) {
    EXPECT_EQ(s.code(), moecclMismatch);
    for (const char* part : {"rank 0", "rank 1", "calls barrier", "calls all_gather"}) {
      EXPECT_TRUE(contains(s.message(), part)) << s.message();
    }
  }
}

TEST(Failure, ARankThatLeavesGivesUpOrFailsIsNamed) {
  const struct {
    std::function<void(std::unique_ptr<Session>*)> end;
    const char* sentence;
  } cases[] = {
      {[](std::unique_ptr<Session>* s) { (*s)->close(); }, "has left, but rank"},
      {[](std::unique_ptr<Session>* s) { s->reset(); }, "failed: it gave up"},
      {[](std::unique_ptr<Session>* s) { (*s)->abandon(error(moecclOutOfMemory, "no memory for {} MiB", 64)); },
       "failed: no memory for 64 MiB"},
  };
  for (const auto& c : cases) {
    std::unique_ptr<Root> root = start_root();
    const Stopwatch watch;
    const auto body = [&](int rank) -> Status {
      MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 3, soon()));
      if (rank != 2) return session->barrier(soon());
      c.end(&session);
      return {};
    };
    const std::vector<Status> results = run_threads(3, body);
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(results[rank].code(), moecclRemoteError);
      EXPECT_TRUE(contains(results[rank].message(), "rank 2 (process ")) << results[rank].message();
      EXPECT_TRUE(contains(results[rank].message(), c.sentence)) << results[rank].message();
    }
    MOECCL_EXPECT_WITHIN(watch, 1000);
  }
}

TEST(Failure, AFailureIsFinal) {
  std::unique_ptr<Root> root = start_root();
  Result<std::unique_ptr<Session>> session = Session::join(root->id(), 0, 1, soon());
  ASSERT_TRUE(session.ok());
  root.reset();
  const Status first = (*session)->barrier(soon());
  EXPECT_EQ(first.code(), moecclRemoteError);
  const Status second = (*session)->all_gather({}, soon()).status();
  EXPECT_EQ(second.message(), first.message());
}

// Kills rank 2 of 4, which is a separate process, between its joining and its second gather. The others are threads.
TEST(Failure, AProcessKilledWhileRanksGatherIsNamedWithinASecond) {
  SplitMix64 random(5);
  for (int i = 0; i < 10; ++i) {
    std::unique_ptr<Root> root = start_root();
    auto joined = make_pair_of_sockets();
    Children victim;
    victim.start([&] {
      Result<std::unique_ptr<Session>> session = Session::join(root->id(), 2, 4, soon());
      if (!session.ok()) return 1;
      static_cast<void>(driver::send_now(joined.second.get(), as_bytes_of('x')));
      while ((*session)->all_gather({}, soon()).ok()) {
      }
      return 0;
    });
    std::optional<Stopwatch> since_kill;
    std::thread killer([&] {
      std::byte byte;
      EXPECT_TRUE(driver::recv_exact(joined.first.get(), std::span(&byte, 1), soon()).ok());
      ::usleep(static_cast<useconds_t>(random.below(5000)));
      since_kill.emplace();
      victim.kill(0);
    });
    const std::vector<Status> results = run_threads(3, [&](int thread) -> Status {
      const int rank = thread == 2 ? 3 : thread;
      MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 4, soon()));
      for (;;) MOECCL_TRY(session->all_gather({}, soon()).status());
    });
    killer.join();
    MOECCL_EXPECT_WITHIN(*since_kill, 1000);
    for (const Status& s : results) {
      EXPECT_EQ(s.code(), moecclRemoteError);
      EXPECT_TRUE(contains(s.message(), format("rank 2 (process {})", victim.pid(0)))) << s.message();
    }
  }
}

// The rank is killed at any moment of joining, while rank 3 never comes. Until a rank has proved its identity, the
// others can only report it as missing.
TEST(Failure, AProcessKilledWhileRanksJoinIsNamed) {
  SplitMix64 random(6);
  int n_named_at_once = 0;
  // At least 10 rounds, and more until one was killed late enough.
  for (int i = 0; i < 10 || (n_named_at_once == 0 && i < 60); ++i) {
    const Stopwatch watch;
    std::unique_ptr<Root> root = start_root();
    Children victim;
    victim.start([&] { return Session::join(root->id(), 2, 4, soon()).ok() ? 0 : 1; });
    std::thread killer([&] {
      ::usleep(static_cast<useconds_t>(random.below(80'000) * static_cast<uint64_t>(1 + i / 10)));
      victim.kill(0);
    });
    const std::vector<Status> results = run_threads(
        2, [&](int rank) { return Session::join(root->id(), rank, 4, Deadline::after_ms(patient_ms(1000))).status(); });
    killer.join();
    if (watch.ms() - watch.fair_ms() > 200) continue;  // the machine was stopped: the first rank to run gave up first
    for (const Status& s : results) {
      EXPECT_TRUE(contains(s.message(), s.code() == moecclTimeout ? "ranks 2-3 of 4 did not join"
                                                                  : format("rank 2 (process {})", victim.pid(0))))
          << s.message();
      n_named_at_once += s.code() == moecclRemoteError;
    }
  }
  EXPECT_GT(n_named_at_once, 0);
}

// A child that a rank forked keeps the rank's socket open when the rank dies.
TEST(Failure, AKilledProcessIsNoticedThoughItsChildKeepsTheSocket) {
  std::unique_ptr<Root> root = start_root();
  Children victim;
  auto ready = make_pair_of_sockets();
  victim.start([&] {
    Result<std::unique_ptr<Session>> session = Session::join(root->id(), 1, 2, soon());
    if (::fork() == 0) {
      ::alarm(20);
      ::prctl(PR_SET_PDEATHSIG, 0);
      for (;;) ::pause();
    }
    static_cast<void>(driver::send_now(ready.second.get(), as_bytes_of('x')));
    for (;;) ::pause();
    return 0;
  });
  Result<std::unique_ptr<Session>> session = Session::join(root->id(), 0, 2, soon());
  ASSERT_TRUE(session.ok()) << session.status().message();
  std::byte byte;
  ASSERT_TRUE(driver::recv_exact(ready.first.get(), std::span(&byte, 1), soon()).ok());
  victim.kill(0);
  const Stopwatch watch;
  const Status s = (*session)->barrier(soon());
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_TRUE(contains(s.message(), format("rank 1 (process {})", victim.pid(0)))) << s.message();
}

// Starts a child process that has the root and rank 0 of two ranks, and that waits from then on.
moecclUniqueId start_root_and_rank_0(Children& host, const std::string& address) {
  auto channel = make_pair_of_sockets();
  host.start([&] {
    std::unique_ptr<Root> root = start_root(patient_ms(20'000), address);
    static_cast<void>(driver::send_now(channel.second.get(), std::as_bytes(std::span(root->id().internal))));
    Result<std::unique_ptr<Session>> session = Session::join(root->id(), 0, 2, soon());
    for (;;) ::pause();
    return 0;
  });
  moecclUniqueId id{};
  EXPECT_TRUE(driver::recv_exact(channel.first.get(), std::as_writable_bytes(std::span(id.internal)), soon()).ok());
  return id;
}

TEST(Failure, TheDeathOfTheRootsProcessNamesItAndItsRank) {
  Children host;
  const moecclUniqueId id = start_root_and_rank_0(host, "");
  Result<std::unique_ptr<Session>> session = Session::join(id, 1, 2, soon());
  ASSERT_TRUE(session.ok()) << session.status().message();
  std::thread killer([&] {
    ::usleep(50'000);
    host.kill(0);
  });
  const Stopwatch watch;
  const Status s = (*session)->barrier(soon());
  killer.join();
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_EQ(s.code(), moecclRemoteError);
  EXPECT_TRUE(contains(s.message(), format("process {} with rank 0", host.pid(0)))) << s.message();
  // A rank that comes now is told as well.
  const Status late = join_and_close(id, 1, 2);
  EXPECT_EQ(late.code(), moecclRemoteError);
  MOECCL_EXPECT_WITHIN(watch, 2000);
}

TEST(Failure, ARootThatIsStoppedIsNamedWithItsRank) {
  for (const char* address : {"", "127.0.0.1"}) {
    Children host;
    const moecclUniqueId id = start_root_and_rank_0(host, address);
    Result<std::unique_ptr<Session>> session = Session::join(id, 1, 2, soon());
    ASSERT_TRUE(session.ok()) << session.status().message();
    ::kill(host.pid(0), SIGSTOP);
    const Status s = (*session)->barrier(Deadline::after_ms(300));
    EXPECT_EQ(s.code(), moecclTimeout);
    EXPECT_TRUE(contains(s.message(), "rank 0) did not answer in time")) << s.message();
  }
}

TEST(Failure, AnotherVersionIsNamedToAllAtOnce) {
  std::unique_ptr<Root> root = start_root();
  Result<UniqueId> id = decode_unique_id(root->id());
  ASSERT_TRUE(id.ok());
  const Stopwatch watch;
  Status seen_by_newer;
  std::thread newer([&] {
    ::usleep(50'000);
    Result<Fd> fd = driver::connect_to(id->address, soon());
    ASSERT_TRUE(fd.ok());
    Party party = {Role::kMember, 1, 2};
    party.protocol = kProtocolVersion + 1;
    seen_by_newer = client_handshake(fd->get(), id->key, party, {Role::kRoot}, soon()).status();
  });
  const Status s = join_and_close(root->id(), 0, 2);
  newer.join();
  MOECCL_EXPECT_WITHIN(watch, 2000);
  for (const Status& status : {s, seen_by_newer}) {
    EXPECT_EQ(status.code(), moecclUnsupported);
    EXPECT_TRUE(contains(status.message(), format("protocol {} ", kProtocolVersion))) << status.message();
    EXPECT_TRUE(contains(status.message(), format("protocol {} ", kProtocolVersion + 1))) << status.message();
  }
  EXPECT_TRUE(contains(s.message(), "rank 1")) << s.message();
}

// An attacker that overheard a hello of another version has no answer to the refusal.
TEST(Failure, AnOverheardHelloOfAnotherVersionFailsNobody) {
  std::unique_ptr<Root> root = start_root();
  Result<UniqueId> id = decode_unique_id(root->id());
  ASSERT_TRUE(id.ok());
  Party party = {Role::kMember, 1, 2};
  party.protocol = kProtocolVersion + 1;
  const ClientHandshake overheard(id->key, party, Nonce{});
  Result<Fd> fd = driver::connect_to(id->address, soon());
  ASSERT_TRUE(fd.ok());
  ASSERT_TRUE(driver::send_all(fd->get(), overheard.hello(), soon()).ok());
  HandshakeFrame refusal;
  ASSERT_TRUE(driver::recv_exact(fd->get(), refusal, soon()).ok());
  ASSERT_TRUE(driver::send_all(fd->get(), overheard.hello(), soon()).ok());  // not the proof
  const std::vector<Status> results = run_threads(2, [&](int rank) { return join_and_close(root->id(), rank, 2); });
  for (const Status& s : results) EXPECT_TRUE(s.ok()) << s.message();
}

TEST(Failure, AForkedChildMayNotUseASessionAndDoesNotHarmIt) {
  std::unique_ptr<Root> root = start_root();
  Result<std::unique_ptr<Session>> session = Session::join(root->id(), 0, 1, soon());
  ASSERT_TRUE(session.ok());
  Children child;
  child.start([&] {
    const bool refused = (*session)->barrier(soon()).code() == moecclInvalidUsage;
    session->reset();
    root.reset();
    return refused ? 0 : 1;
  });
  EXPECT_EQ(child.wait(0), 0);
  EXPECT_TRUE((*session)->barrier(soon()).ok());
  (*session)->close();
}

}  // namespace
}  // namespace moeccl::bootstrap
