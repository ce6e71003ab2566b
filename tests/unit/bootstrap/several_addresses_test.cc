// SPDX-License-Identifier: Apache-2.0
// Rank 0's host has several addresses, and each host's name service knows others of them.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string_view>
#include <thread>

#include "src/base/env.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/launcher.h"
#include "src/bootstrap/place.h"
#include "src/bootstrap/unique_id.h"
#include "src/driver/thread.h"
#include "tests/support/hosts.h"
#include "tests/unit/bootstrap/group.h"

// The name service of this program is silent about one host, as one whose server has gone is for all.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** found) {
  static const auto next = reinterpret_cast<decltype(&getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  const bool asks = hints == nullptr || (hints->ai_flags & AI_NUMERICHOST) == 0;
  const bool silent = asks && host != nullptr && std::string_view(host) == "silent.test";
  if (silent) moeccl::driver::sleep_ns(moeccl::tests::patient_ms(5'000) * 1'000'000);
  return next(host, service, hints, found);
}

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(5000)); }

constexpr const char* kMaster = "test-master";

constexpr const char* kSilent = "silent.test";

// Gives the calling process a hosts file of its own.
bool use_hosts_file(const std::string& text) {
  char path[] = "/tmp/moeccl-hosts-XXXXXX";
  const Fd fd(::mkstemp(path));
  if (!fd || ::fchmod(fd.get(), 0644) != 0) return false;
  const bool used = ::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                    ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                    ::mount(path, "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
  ::unlink(path);
  return used;
}

struct Case {
  const char* name;
  const char* at_home;    // rank 0's hosts file
  const char* elsewhere;  // the other's
};
constexpr Case kCases[] = {
    {"only IPv4 at home", "10.77.0.1 test-master\n", "fd77::1 test-master\n10.77.0.1 test-master\n"},
    {"loopback at home", "127.0.1.1 test-master\n", "fd77::1 test-master\n10.77.0.1 test-master\n"},
    {"loopback at home and only IPv6 elsewhere", "127.0.1.1 test-master\n", "fd77::1 test-master\n"},
    {"both at home and only IPv4 elsewhere", "fd77::1 test-master\n10.77.0.1 test-master\n", "10.77.0.1 test-master\n"},
    {"one that is gone elsewhere", "10.77.0.1 test-master\n", "10.77.0.99 test-master\n10.77.0.1 test-master\n"},
};

// Makes this child a new program that runs `test`, with what it has set.
int become(const std::string& test) {
  ::execl("/proc/self/exe", "self", "--gtest_also_run_disabled_tests", ("--gtest_filter=*" + test).c_str(),
          static_cast<char*>(nullptr));
  return 1;
}

// Runs `test` as two ranks on two hosts, each with a hosts file of its own.
void meet_in_each_case(const std::string& test) {
  std::string why;
  const auto hosts = testing::TestHosts::create({}, &why);
  if (hosts == nullptr) GTEST_SKIP() << why;
  for (int h = 0; h < 2; ++h) {
    const std::string address = "fd77::" + std::to_string(h + 1);
    if (!hosts->run(h, "ip addr add " + address + "/64 dev eth0 nodad")) GTEST_SKIP() << "no IPv6";
  }
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    Children children;
    for (int rank = 0; rank < 2; ++rank) {
      children.start([&, rank] {
        if (!hosts->enter(rank)) return 10;
        ::unsetenv("MOECCL_SOCKET_ADDR");
        if (!use_hosts_file(rank == 0 ? c.at_home : c.elsewhere)) return 77;
        // exec gives a fresh env(), which reads the secret.
        ::setenv("MOECCL_SECRET", "a secret of the test", 1);
        ::setenv("MOECCL_TEST_NAMED_RANK", rank == 0 ? "0" : "1", 1);
        return become(test);
      });
    }
    const int codes[] = {children.wait(0), children.wait(1)};
    if (codes[0] == 77) GTEST_SKIP() << "this user may not mount";
    EXPECT_EQ(codes[0], 0);
    EXPECT_EQ(codes[1], 0);
  }
}

void join_and_leave(const Result<moecclUniqueId>& id, int rank, Deadline deadline) {
  ASSERT_TRUE(id.ok()) << id.status().message();
  auto session = Session::join(*id, rank, 2, deadline, {.wait_for_root = true, .others_alive = {}, .gone = {}});
  ASSERT_TRUE(session.ok()) << session.status().message();
  ASSERT_TRUE((*session)->barrier(deadline).ok());
  (*session)->close();
}

TEST(SeveralAddresses, OfTheMasterAreTriedInTurn) { meet_in_each_case("DISABLED_NamedRank"); }
TEST(SeveralAddresses, OfAPlaceNeedNotBeTheSameOnAllHosts) { meet_in_each_case("DISABLED_RankOfAPlace"); }

TEST(SeveralAddresses, DISABLED_RankOfAPlace) {
  const char* rank = std::getenv("MOECCL_TEST_NAMED_RANK");
  if (rank == nullptr) GTEST_SKIP() << "a part of OfAPlaceNeedNotBeTheSameOnAllHosts";
  const Deadline deadline = Deadline::after_ms(patient_ms(10'000));
  for (int comm = 0; comm < 2; ++comm) {
    const Result<moecclUniqueId> place = unique_id_of_place(format("{}:4711", kMaster), deadline);
    ASSERT_TRUE(place.ok()) << place.status().message();
    const UniqueId id = decode_unique_id(*place).value();
    join_and_leave(meet_at_place(id, static_cast<uint32_t>(std::atoi(rank)), deadline, {}), std::atoi(rank), deadline);
  }
}

// Containers with a network each may share the folder of the handouts.
TEST(SeveralAddresses, APlaceOnLoopbackBelongsToItsNetwork) {
  std::string why;
  const auto hosts = testing::TestHosts::create({}, &why);
  if (hosts == nullptr) GTEST_SKIP() << why;
  const std::string place = "localhost:" + std::to_string(tests::free_port());
  auto waits = make_pair_of_sockets();
  Children ranks;
  ranks.start([&] {
    if (!hosts->enter(0)) return 10;
    const UniqueId id = decode_unique_id(unique_id_of_place(place, soon()).value()).value();
    const auto real = meet_at_place(id, 0, Deadline::after_ms(patient_ms(20'000)), {});
    const std::byte ready{real.ok()};
    (void)driver::send_all(waits.second.get(), {&ready, 1}, Deadline::after_ms(1000));
    for (;;) ::pause();
  });
  std::byte ready{};
  ASSERT_TRUE(driver::recv_exact(waits.first.get(), {&ready, 1}, Deadline::after_ms(patient_ms(5000))).ok());
  ASSERT_EQ(ready, std::byte{1});
  for (int host = 0; host < 2; ++host) {
    ranks.start([&, host] {
      if (!hosts->enter(host)) return 10;
      const UniqueId id = decode_unique_id(unique_id_of_place(place, soon()).value()).value();
      return meet_at_place(id, 1, Deadline::after_ms(300), {}).ok() ? 1 : 0;
    });
  }
  EXPECT_EQ(ranks.wait(1), 1);
  EXPECT_EQ(ranks.wait(2), 0) << "the other network's place was found";
}

TEST(SeveralAddresses, DISABLED_NamedRank) {
  const char* rank = std::getenv("MOECCL_TEST_NAMED_RANK");
  if (rank == nullptr) GTEST_SKIP() << "a part of OfTheMasterAreTriedInTurn";
  LauncherInfo info;
  info.launcher = "torchrun";
  info.rank = std::atoi(rank);
  info.n_ranks = 2;
  info.n_local = 1;
  info.master_addr = kMaster;
  const Deadline deadline = Deadline::after_ms(patient_ms(10'000));
  for (int comm = 0; comm < 2; ++comm) join_and_leave(meet_from_environment(info, deadline), info.rank, deadline);
}

// Two networks of a cluster, without a way out, and a name that is loopback.
TEST(SeveralAddresses, OfTwoNetworksTheOneThatIsNamedIsThatOfALoopbackName) {
  for (const char* named : {"", "eth0", "=eth1", "^eth0"}) {
    SCOPED_TRACE(named);
    Children children;
    children.start([named] {
      if (::unshare(CLONE_NEWNET) != 0 || !use_hosts_file("127.0.1.1 test-master\n")) return 77;
      const char* setup =
          "ip link set lo up && for k in 0 1; do ip link add eth$k type veth peer name p$k && "
          "ip addr add 10.7$k.0.1/24 dev eth$k && ip link set eth$k up && ip link set p$k up || exit 1; done; "
          "for i in $(seq 100); do [ $(ip -br link | grep -c '^eth.* UP ') = 2 ] && exit; sleep 0.05; done; exit 1";
      if (std::system(setup) != 0) return 77;
      ::setenv("MOECCL_SOCKET_IFNAME", named, 1);
      ::unsetenv("MOECCL_SOCKET_ADDR");
      return become("DISABLED_LoopbackName");
    });
    const int code = children.wait(0);
    if (code == 77) GTEST_SKIP() << "this user may not make networks";
    EXPECT_EQ(code, 0);
  }
}

TEST(SeveralAddresses, DISABLED_LoopbackName) {
  const std::string named = env().socket_ifname;
  ::testing::internal::CaptureStderr();
  const Result<UniqueId> place = place_of_rank_0("MASTER_ADDR", kMaster, 4711, soon());
  const std::string said = ::testing::internal::GetCapturedStderr();
  if (named.empty()) {
    EXPECT_EQ(place.status().code(), moecclInvalidArgument) << place.status().message();
    EXPECT_FALSE(contains(said, "the ranks meet at")) << said;
    return;
  }
  ASSERT_TRUE(place.ok()) << place.status().message();
  EXPECT_EQ(place->address.host(), named == "eth0" ? "10.70.0.1" : "10.71.0.1");
}

// A pod's name is known only when the pod runs.
TEST(SeveralAddresses, AMasterWithoutAnAddressIsWaitedFor) {
  Children children;
  children.start([] {
    // Without a network no name service is asked.
    if (::unshare(CLONE_NEWNET) != 0 || !use_hosts_file("127.0.0.1 localhost\n")) return 77;
    ::setenv("MOECCL_SECRET", "a secret of the test", 1);
    ::setenv("MOECCL_TEST_NAMED_RANK", "1", 1);
    return become("DISABLED_EarlyRank");
  });
  const int code = children.wait(0);
  if (code == 77) GTEST_SKIP() << "this user may not mount";
  EXPECT_EQ(code, 0);
}

TEST(SeveralAddresses, DISABLED_EarlyRank) {
  if (std::getenv("MOECCL_TEST_NAMED_RANK") == nullptr) GTEST_SKIP() << "a part of AMasterWithoutAnAddressIsWaitedFor";
  LauncherInfo info;
  info.launcher = "torchrun";
  info.rank = 1;
  info.n_ranks = 2;
  info.n_local = 1;
  info.master_addr = kMaster;
  const Status late = meet_from_environment(info, Deadline::after_ms(50)).status();
  EXPECT_EQ(late.code(), moecclTimeout) << late.message();
  for (const char* part : {kMaster, "MASTER_ADDR"}) EXPECT_TRUE(contains(late.message(), part)) << late.message();
  for (const char* never : {"test-master:29500", "10.0.0.999", "[fd77::1"}) {
    info.master_addr = never;
    const Status s = meet_from_environment(info, Deadline::never()).status();
    EXPECT_EQ(s.code(), moecclInvalidArgument) << s.message();
  }
  std::thread name_service([] {
    driver::sleep_ns(100'000'000);
    std::ofstream("/etc/hosts", std::ios::app) << "10.77.0.1 " << kMaster << '\n';
  });
  info.master_addr = kMaster;
  const Result<moecclUniqueId> id = meet_from_environment(info, Deadline::after_ms(patient_ms(20'000)));
  name_service.join();
  ASSERT_TRUE(id.ok()) << id.status().message();
  EXPECT_EQ(decode_unique_id(*id)->address.host(), "10.77.0.1");
}

TEST(SeveralAddresses, ANameServiceThatIsSilentIsNotWaitedForBeyondTheDeadline) {
  LauncherInfo info;
  info.launcher = "torchrun";
  info.rank = 1;
  info.n_ranks = 2;
  info.master_addr = kSilent;
  const std::string place = format("{}:4711", kSilent);
  const std::function<Status(Deadline)> calls[] = {
      [&](Deadline d) { return meet_from_environment(info, d).status(); },
      [&](Deadline d) { return place_of_rank_0("MASTER_ADDR", kSilent, 4711, d).status(); },
      [&](Deadline d) { return address_for_other_hosts(info, d).status(); },
      [&](Deadline d) { return unique_id_of_place(place, d).status(); },
  };
  for (const auto& call : calls) {
    const Stopwatch watch;
    const Status s = call(Deadline::after_ms(patient_ms(300)));
    EXPECT_EQ(s.code(), moecclTimeout) << s.message();
    for (const char* part : {kSilent, "name service", "or give an IP address"})
      EXPECT_TRUE(contains(s.message(), part)) << s.message();
    MOECCL_EXPECT_WITHIN(watch, 900);
  }
}

// The root of an earlier communicator leaves the place soon; another program does not.
TEST(SeveralAddresses, APlaceThatIsInUseIsNotWaitedForBeyondTheDeadline) {
  const auto taken = driver::listen_at(driver::parse_ip_address("127.0.0.1").value());
  ASSERT_TRUE(taken.ok());
  UniqueId id;
  id.address = driver::local_address(taken->get()).value();
  id.at_rank_0 = true;
  const Stopwatch watch;
  const Status s = meet_at_place(id, 0, Deadline::after_ms(patient_ms(300)), {}).status();
  EXPECT_EQ(s.code(), moecclInvalidUsage) << s.message();
  EXPECT_TRUE(contains(s.message(), id.address.str())) << s.message();
  EXPECT_TRUE(contains(s.message(), "a place of its own (MASTER_PORT")) << s.message();
  MOECCL_EXPECT_WITHIN(watch, 1000);
}

TEST(SeveralAddresses, TheTimeOfARootIncludesTheWaitForItsPlace) {
  Result<Fd> taken = driver::listen_at(driver::parse_ip_address("127.0.0.1").value());
  ASSERT_TRUE(taken.ok());
  RootOptions options;
  options.timeout_ms = patient_ms(800);
  options.socket_addr = driver::local_address(taken->get())->str();
  std::thread earlier([&] {
    driver::sleep_ns(patient_ms(600) * 1'000'000);
    taken->reset();
  });
  const Stopwatch watch;
  const Result<moecclUniqueId> id = Root::start_detached(options, soon());
  earlier.join();
  ASSERT_TRUE(id.ok()) << id.status().message();
  EXPECT_EQ(Session::join(*id, 0, 2, Deadline::never()).status().code(), moecclTimeout);
  MOECCL_EXPECT_WITHIN(watch, 1100);
}

TEST(SeveralAddresses, OneThatIsInUseIsLeftOut) {
  const auto taken = driver::listen_at(driver::parse_ip_address("127.0.0.2").value());
  ASSERT_TRUE(taken.ok());
  RootOptions options;
  options.timeout_ms = patient_ms(20'000);
  options.socket_addr = "127.0.0.1:" + std::to_string(driver::local_address(taken->get())->port());
  for (const char* other : {"127.0.0.2", "127.0.0.3"})
    options.other_addrs.push_back(driver::parse_ip_address(other).value());
  const auto root = Root::start(options);
  ASSERT_TRUE(root.ok()) << root.status().message();
  const UniqueId id = decode_unique_id((*root)->id()).value();
  ASSERT_EQ(id.others.size(), 1u);
  EXPECT_EQ(id.others[0].host(), "127.0.0.3");
  UniqueId by_other = id;
  by_other.address = id.others[0];
  by_other.others.clear();
  const auto session = Session::join(encode_unique_id(by_other).value(), 0, 1, Deadline::after_ms(patient_ms(5000)));
  ASSERT_TRUE(session.ok()) << session.status().message();
  (*session)->close();
}

TEST(SeveralAddresses, ARefusalOfAnotherVersionIsFinal) {
  const auto listener = driver::listen_at(driver::parse_ip_address("127.0.0.2").value());
  ASSERT_TRUE(listener.ok());
  UniqueId id;
  id.key = random_key().value();
  id.address = driver::local_address(listener->get()).value();
  id.others.push_back(driver::parse_ip_address("127.0.0.3").value());  // has no listener
  id.others[0].set_port(id.address.port());
  std::thread newer([&] {
    Result<Fd> fd = tests::accept_until(listener->get(), Deadline::after_ms(patient_ms(5000)));
    Party party = {Role::kRoot, 0, 2};
    party.protocol = kProtocolVersion + 1;
    party.exchanges_keys = true;
    if (fd.ok()) (void)server_handshake(fd->get(), id.key, party, Role::kMember, Deadline::after_ms(patient_ms(5000)));
  });
  const Stopwatch watch;
  const Status s = Session::join(encode_unique_id(id).value(), 1, 2, Deadline::after_ms(patient_ms(20'000)),
                                 {.wait_for_root = true, .others_alive = {}, .gone = {}})
                       .status();
  newer.join();
  EXPECT_EQ(s.code(), moecclUnsupported) << s.message();
  MOECCL_EXPECT_WITHIN(watch, 2000);
}

TEST(SeveralAddresses, AreAllNamedWhenNobodyListens) {
  UniqueId id;
  id.address = driver::parse_ip_address("127.0.0.1:" + std::to_string(tests::free_port())).value();
  id.others.push_back(driver::parse_ip_address("127.0.0.2").value());
  id.others[0].set_port(id.address.port());
  const Status s = Session::join(encode_unique_id(id).value(), 1, 2, Deadline::after_ms(200),
                                 {.wait_for_root = true, .others_alive = {}, .gone = {}})
                       .status();
  EXPECT_EQ(s.code(), moecclTimeout);
  const std::string both = id.address.str() + " or " + id.others[0].str();
  EXPECT_TRUE(contains(s.message(), both)) << s.message();
  EXPECT_TRUE(contains(s.message(), "MASTER_ADDR is its host")) << s.message();
}

}  // namespace
}  // namespace moeccl::bootstrap
