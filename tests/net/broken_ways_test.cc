// SPDX-License-Identifier: Apache-2.0
// What a rank says of a network that is broken in a way that a ping does not show.
#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "tests/support/ranks_on_hosts.h"

namespace moeccl::testing {
namespace {

constexpr const char* kAnswers = "answers new connections: large packets may be lost";
constexpr const char* kCut = "look at this host's network";

// Breaks the way between two ranks, which then begin a sum. Their errors must have `cause`, and not `other`.
void break_the_way(const TestHosts& hosts, const std::function<bool()>& break_it, const char* cause,
                   const char* other) {
  Meeting broken;
  RankOptions options = on(hosts);
  options.config.timeout_ms = 2000;
  options.on_running = [&](const std::vector<pid_t>&) {
    EXPECT_TRUE(break_it());
    broken.arrive();
  };
  run_ranks(
      2,
      [&](int, moecclComm_t comm) {
        EXPECT_TRUE(broken.wait_for(1));
        std::vector<float> in(60'000, 1), out(60'000);
        EXPECT_EQ(moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr),
                  moecclTimeout);
        const std::string said = moecclGetLastError(comm);
        EXPECT_NE(said.find(cause), std::string::npos) << said;
        EXPECT_EQ(said.find(other), std::string::npos) << said;
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
      },
      options);
}

// As where a switch silently drops frames that the hosts' MTU allows.
TEST(BrokenWay, ThatLosesLargePacketsIsToldFromOneThatIsCut) {
  MAKE_HOSTS(hosts, .weights = {1, 1});
  const auto on_both = [&](const char* command) { return hosts->run(0, command) && hosts->run(1, command); };
  const auto loses_large_ones = [&] {
    return on_both(
        "nft add table inet wall && nft 'add chain inet wall in { type filter hook input priority 0; }' && "
        "nft add rule inet wall in meta length gt 1000 drop");
  };
  if (!loses_large_ones()) GTEST_SKIP() << "nft cannot drop packets here";
  ASSERT_TRUE(on_both("nft delete table inet wall"));
  break_the_way(*hosts, loses_large_ones, kAnswers, kCut);
  ASSERT_TRUE(on_both("nft delete table inet wall"));
  break_the_way(
      *hosts, [&] { return hosts->pull_cable(1); }, kCut, kAnswers);
}

// The other way still answers, which says nothing of this one.
TEST(BrokenWay, ThatIsOneOfTwoIsNotTakenForTheOther) {
  MAKE_HOSTS(hosts, .weights = {1, 1}, .interfaces = 2);
  Meeting running;
  RankOptions options = on(*hosts);
  options.config.timeout_ms = 2000;
  options.on_running = [&](const std::vector<pid_t>&) {
    EXPECT_TRUE(running.wait_for(2));
    EXPECT_TRUE(hosts->run(1, "ip link set eth1 down"));
  };
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        std::vector<float> in(1 << 20, 1), out(1 << 20);
        moecclResult_t result = moecclSuccess;
        bool began = false;
        for (const Stopwatch watch; result == moecclSuccess && watch.ms() < patient_ms(20'000);) {
          result = moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr);
          if (!std::exchange(began, true)) running.arrive();
        }
        const std::string said = moecclGetLastError(comm);
        EXPECT_NE(result, moecclSuccess) << "rank " << rank << " goes on";
        EXPECT_EQ(said.find(kAnswers), std::string::npos) << said;
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
      },
      options);
}

// The first large message is often one of init: the list of all ranks.
TEST(BrokenWay, ThatLosesLargePacketsWhileRanksMeetIsSaid) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  if (!hosts->run(1,
                  "nft add table inet wall && nft 'add chain inet wall in { type filter hook input priority 0; }' "
                  "&& nft add rule inet wall in meta length gt 420 drop"))
    GTEST_SKIP() << "nft cannot drop packets here";
  RankOptions options = on(*hosts);
  options.init = false;
  run_ranks(
      4,
      [](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.init_timeout_ms = 4000;
        EXPECT_EQ(moecclCommInitRankConfig(&comm, 4, unique_id(), rank, &config), moecclTimeout);
        const std::string said = moecclGetLastError(nullptr);
        const char* cause = rank < 2 ? "the host of ranks 2-3 has acknowledged nothing for"
                                     : "its packets are lost on the way (MTU, firewall)";
        EXPECT_NE(said.find(cause), std::string::npos) << said;
      },
      options);
}

TEST(PortsOfAHost, ThatAreAllTakenAreSaid) {
  MAKE_HOSTS(hosts, .weights = {1, 1});
  if (!hosts->run(1, "echo 40000 40001 >/proc/sys/net/ipv4/ip_local_port_range"))
    GTEST_SKIP() << "the ports of a host cannot be limited here";
  RankOptions options = on(*hosts);
  options.init = false;
  run_ranks(
      2,
      [](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        EXPECT_NE(moecclCommInitRank(&comm, 2, unique_id(), rank), moecclSuccess);
        const std::string said = moecclGetLastError(nullptr);
        const std::string cause =
            "no port of " + TestHosts::address(1) + " is free: widen net.ipv4.ip_local_port_range";
        EXPECT_NE(said.find(cause), std::string::npos) << said;
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
