// SPDX-License-Identifier: Apache-2.0
// Hosts that reach each other through an NCCL net plugin: which network is chosen, and which reason is given when it is
// not the plugin.
#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <thread>

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

// Sums until an operation fails. Returns its result, and how long it took.
moecclResult_t sum_until_failure(moecclComm_t comm, int64_t* took_ms) {
  std::vector<float> in(100, 1), out(100);
  for (;;) {
    const Stopwatch watch;
    const moecclResult_t result =
        moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr);
    *took_ms = watch.fair_ms();
    if (result != moecclSuccess) return result;
  }
}

// Ends rank 2 between its operations, while the plugin of the others notices nothing. The others go on without it.
void end_unnoticed(const char* script, bool leaves_a_child) {
  constexpr int kVictim = 2;
  constexpr int64_t kLimitMs = 1500;
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"FAKE_NET", script}, {"MOECCL_NET", "plugin"}};
  MAKE_HOSTS(hosts, .weights = {2, 1, 1});
  RankOptions options = on(*hosts);
  options.config.timeout_ms = static_cast<int32_t>(tests::patient_ms(20'000));
  options.may_die = {kVictim};
  options.destroy = false;
  struct Words {
    std::atomic<int> child, told;
  };
  const Shared<Words> words;
  Meeting begun;
  options.on_running = [&](const std::vector<pid_t>&) {
    for (const Stopwatch watch; words->told < 3 && watch.fair_ms() < patient_ms(30'000);)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (words->child > 0) kill(words->child, SIGKILL);
  };
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 4, comm, 1000);
        EXPECT_TRUE(begun.meet(4));  // what the victim has sent has arrived
        if (rank == kVictim) {
          const pid_t child = leaves_a_child ? fork() : -1;
          if (child == 0) pause();
          words->child = child;
          raise(SIGKILL);
        }
        int64_t took_ms = 0;
        EXPECT_EQ(sum_until_failure(comm, &took_ms), moecclRemoteError) << moecclGetLastError(comm);
        const std::string text = moecclGetLastError(comm);
        EXPECT_NE(text.find("rank 2"), std::string::npos) << text;
        EXPECT_LT(took_ms, tests::patient_ms(kLimitMs)) << text;
        moecclComm_t left = nullptr;
        MOECCL_EXPECT_COMM_OK(moecclCommShrink(comm, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT), comm);
        // The plugin would serve this process no more if requests were under way on a comm that is closed.
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        if (left != nullptr) {
          check_all_reduce(rank - (rank > kVictim), 3, left, 30'000);
          MOECCL_EXPECT_OK(moecclCommDestroy(left));
        }
        ++words->told;
      },
      options);
}

// As with plugins over datagrams, such as those for EFA.
TEST(Plugin, ThatDoesNotNoticeADeathLeavesItToTheHost) { end_unnoticed("deaf", false); }
// The child has the plugin's connections open.
TEST(Plugin, ARankThatDiesBesideAChildIsNamedSoon) { end_unnoticed("", true); }

// Rank 0 is stopped while rank 1 sends to it and leaves. It finds the message and the farewell, and not just a rank
// that acknowledges nothing and whose port is closed.
TEST(Plugin, ARankThatHasLeftIsNotDead) {
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"MOECCL_NET", "plugin"}};
  MAKE_HOSTS(hosts, .weights = {1, 1});
  RankOptions options = on(*hosts);
  options.config.timeout_ms = static_cast<int32_t>(tests::patient_ms(10'000));
  options.destroy = false;
  struct Words {
    std::atomic<int> asks, stopped, left;
  };
  const Shared<Words> words;
  const auto wait_for = [](const std::atomic<int>& word) {
    for (const Stopwatch watch; word == 0 && watch.fair_ms() < tests::patient_ms(10'000);)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  options.on_running = [&](const std::vector<pid_t>& ranks) {
    wait_for(words->asks);
    kill(ranks[0], SIGSTOP);
    words->stopped = 1;
    wait_for(words->left);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    kill(ranks[0], SIGCONT);
  };
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 2, comm, 1000);
        std::vector<float> given(1000, 7), got(1000, 0);
        if (rank == 0) {
          // Something that rank 1 must acknowledge.
          MOECCL_EXPECT_COMM_OK(moecclSend(given.data(), 10, moecclFloat32, 1, comm, nullptr), comm);
          words->asks = 1;
          wait_for(words->left);
          MOECCL_EXPECT_COMM_OK(moecclRecv(got.data(), 1000, moecclFloat32, 1, comm, nullptr), comm);
          EXPECT_EQ(got, given);
          (void)moecclCommDestroy(comm);
        } else {
          wait_for(words->stopped);
          MOECCL_EXPECT_COMM_OK(moecclRecv(got.data(), 10, moecclFloat32, 0, comm, nullptr), comm);
          MOECCL_EXPECT_COMM_OK(moecclSend(given.data(), 1000, moecclFloat32, 0, comm, nullptr), comm);
          (void)moecclCommDestroy(comm);
          words->left = 1;
        }
      },
      options);
}

// A process that is stopped is not taken for one that has ended.
TEST(Plugin, NamesAStoppedRankAtTheTimeout) {
  constexpr int kVictim = 2;
  const Variables set = {{"MOECCL_NET_PLUGIN", fake_net_file("v12")}, {"MOECCL_NET", "plugin"}};
  MAKE_HOSTS(hosts, .weights = {1, 1, 1});
  RankOptions options = on(*hosts);
  options.config.timeout_ms = 2000;
  options.may_die = {kVictim};
  struct Words {
    std::atomic<int> told, waited;
  };
  const Shared<Words> words;
  Meeting begun;
  options.on_running = [&](const std::vector<pid_t>& ranks) {
    for (const Stopwatch watch; words->told < 2 && watch.fair_ms() < tests::patient_ms(15'000);)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    kill(ranks[kVictim], SIGKILL);
  };
  run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 3, comm, 1000);
        EXPECT_TRUE(begun.meet(3));
        if (rank == kVictim) raise(SIGSTOP);
        int64_t took_ms = 0;
        EXPECT_EQ(sum_until_failure(comm, &took_ms), moecclTimeout) << moecclGetLastError(comm);
        const std::string text = moecclGetLastError(comm);
        EXPECT_NE(text.find("rank 2 (plugin Fake, its host has acknowledged nothing for "), std::string::npos) << text;
        EXPECT_NE(text.find("its process exists, and its host answers at"), std::string::npos) << text;
        // The other rank repeats as much as fits.
        words->waited += text.find("it is stopped (SIGSTOP") != std::string::npos ? 1 : 0;
        ++words->told;
      },
      options);
  EXPECT_GE(words->waited, 1);
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
