// SPDX-License-Identifier: Apache-2.0
// Hosts that reach each other through an NCCL net plugin: which network is chosen, and which reason is given when it is
// not the plugin.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "tests/support/fake_nets.h"
#include "tests/support/ranks_on_hosts.h"
#include "tests/support/timing.h"
#include "tests/support/variables.h"

namespace moeccl::testing {
namespace {

using tests::fake_net_file;

// Expects `explain` to name this network after sums of several sizes.
void expect_network(const char* network) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        for (const size_t count : {1u, 5'000u, 400'000u}) check_all_reduce(rank, 3, comm, count);
        const std::string text = explain(comm);
        EXPECT_NE(text.find(std::string("hosts are reached over ") + network), std::string::npos) << text;
      },
      on(*hosts));
}

TEST(Plugin, IsTakenBeforeTcpWhereAllRanksHaveOne) {
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("all")}};
  expect_network("plugin");
}

TEST(Plugin, IsFoundByNcclsVariable) {
  const Variables set = {{"NCCL_NET_PLUGIN", fake_net_file("v6")}, {"MOECCL_NET", "plugin:Fake"}};
  expect_network("plugin");
}

TEST(Plugin, WithoutDevicesLeavesItToTheNextNetwork) {
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"FAKE_NET", "devices=0"}};
  expect_network("tcp");
}

TEST(Plugin, ThatIsNoneLeavesItToTheNextNetwork) {
  const Variables set = {{"MOECCL_NET_PLUGIN", "surely-not-there"}};
  expect_network("tcp");
}

// With no other network to use, the reason becomes the error.
TEST(Plugin, ThatIsForcedAndHasNoDevicesIsAnError) {
  const Variables set = {
      {"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"FAKE_NET", "devices=0"}, {"MOECCL_NET", "plugin:Fake"}};
  MAKE_HOSTS(hosts, .weights = {1, 1});
  RankOptions options = on(*hosts);
  options.init = false;
  run_ranks(
      2,
      [](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        EXPECT_NE(moecclCommInitRank(&comm, 2, unique_id(), rank), moecclSuccess);
        const std::string why = moecclGetLastError(nullptr);
        EXPECT_NE(why.find("devices says 0"), std::string::npos) << why;
      },
      options);
}

// A user who has asked for no plugin need not know why the one that was found does not work.
TEST(Plugin, ThatFailsWarnsOnlyTheUserWhoAskedForIt) {
  for (const bool asked : {false, true}) {
    const std::string file = ::testing::TempDir() + "moeccl_plugin_" + std::to_string(getpid()) + ".log";
    const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")},
                           {"FAKE_NET", "init"},
                           {"MOECCL_NET", asked ? "plugin" : ""},
                           {"MOECCL_DEBUG_FILE", file}};
    MAKE_HOSTS(hosts, .weights = {1, 1});
    RankOptions options = on(*hosts);
    options.init = false;
    run_ranks(
        2,
        [&](int rank, moecclComm_t) {
          moecclComm_t comm = nullptr;
          EXPECT_EQ(moecclCommInitRank(&comm, 2, unique_id(), rank) == moecclSuccess, !asked);
          if (comm == nullptr) return;
          MOECCL_ASSERT_OK(moecclCommDestroy(comm));
        },
        options);
    std::ifstream in(file);
    const std::string log((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    EXPECT_EQ(log.find("WARN net plugin: fake: init fails by script") != std::string::npos, asked) << log;
    EXPECT_TRUE(asked || log.find("init fails by script") == std::string::npos) << log;
    std::remove(file.c_str());
  }
}

// A connection that breaks in the middle of a message ends the operation on every rank, not only where it broke.
TEST(Plugin, ThatBreaksInAMessageEndsTheOperationEverywhere) {
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"FAKE_NET", "fail=150"}};
  MAKE_HOSTS(hosts, .weights = {2, 1});
  RankOptions options = on(*hosts);
  options.config.timeout_ms = static_cast<int32_t>(tests::patient_ms(8'000));
  run_ranks(
      3,
      [&](int, moecclComm_t comm) {
        std::vector<float> in(60'000, 1), out(60'000);
        moecclResult_t result = moecclSuccess;
        for (int i = 0; i < 2'000 && result == moecclSuccess; ++i)
          result = moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr);
        EXPECT_EQ(result, moecclRemoteError) << moecclGetLastError(comm);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank"), std::string::npos);
      },
      options);
}

// Many communicators, one after the other and some at once, take and release the plugin.
TEST(Plugin, ServesManyCommunicators) {
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"FAKE_NET", "null=2"}};
  MAKE_HOSTS(hosts, .weights = {2, 2});
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        for (int i = 0; i < 5; ++i) {
          moecclComm_t part = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank % 2, rank, &part, nullptr), comm);
          check_all_reduce(rank / 2, 2, part, 30'000);
          check_all_reduce(rank, 4, comm, 3'000);
          MOECCL_ASSERT_OK(moecclCommDestroy(part));
          // The plugin would serve this process no more if `part` had left requests under way.
          check_all_reduce(rank, 4, comm, 3'000);
        }
      },
      on(*hosts));
}

}  // namespace
}  // namespace moeccl::testing
