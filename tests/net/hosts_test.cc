// Communicators whose ranks live on several hosts: how they come about, what they know, and what ends them.
#include "tests/support/hosts.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

// Hosts for one test, or the reason to skip it.
#define MAKE_HOSTS(name, ...)                                               \
  std::string why_not;                                                      \
  const auto name = TestHosts::create(HostsOptions{__VA_ARGS__}, &why_not); \
  if (name == nullptr) GTEST_SKIP() << why_not

RankOptions on(const TestHosts& hosts) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = const_cast<TestHosts*>(&hosts);
  return options;
}

// Bytes of payload that this rank's host has sent over eth0: what Linux counts, less the 66 bytes of Ethernet, IP and
// TCP headers of each packet as it left TCP (a large one that nobody had to cut counts once).
int64_t sent_payload() {
  std::ifstream in("/proc/thread-self/net/dev");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find("eth0:");
    if (colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 5));
    std::vector<int64_t> counted;
    for (int64_t value = 0; words >> value;) counted.push_back(value);
    return counted.at(8) - 66 * counted.at(9);
  }
  return -1;
}

// Bytes between hosts as `explain` has them, of all ranks: "  node           128.00 MiB, ...".
double planned_bytes(const std::string& text) {
  const size_t at = text.find("\n  node ");
  if (at == std::string::npos) return -1;
  std::istringstream words(text.substr(at + 8));
  double amount = 0;
  std::string unit;
  words >> amount >> unit;
  return amount * (unit.starts_with("MiB") ? 1 << 20 : unit.starts_with("KiB") ? 1 << 10 : 1);
}

// A sum that only right data from all ranks gives.
void check_all_reduce(int rank, int n, moecclComm_t comm, size_t count) {
  std::vector<int32_t> in(count), out(count);
  for (size_t i = 0; i < count; ++i) in[i] = static_cast<int32_t>(i) * (rank + 1);
  MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, moecclInt32, moecclSum, comm, nullptr), comm);
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(out[i], static_cast<int32_t>(i) * n * (n + 1) / 2) << i;
  }
}

std::string explain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type) {
  char text[16384] = {};
  size_t needed = 0;
  EXPECT_EQ(moecclPlanExplain(comm, op, count, type, text, sizeof(text), &needed), moecclSuccess);
  return text;
}

TEST(Hosts, BecomeTheTopologysNodes) {
  MAKE_HOSTS(hosts, .weights = {2, 1, 2});
  run_ranks(
      5,
      [](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 5, comm, 10'000);
        const std::string text = explain(comm, moecclOpAllReduce, 1024, moecclFloat32);
        EXPECT_NE(text.find("node"), std::string::npos) << text;
      },
      on(*hosts));
}

TEST(Hosts, WithSeveralInterfacesUseAllOfThem) {
  MAKE_HOSTS(hosts, .weights = {1, 1}, .interfaces = 2);
  run_ranks(
      2, [](int rank, moecclComm_t comm) { check_all_reduce(rank, 2, comm, 4 << 20); }, on(*hosts));
  for (int host = 0; host < 2; ++host) {
    const double sent[2] = {static_cast<double>(hosts->sent_bytes(host, 0)),
                            static_cast<double>(hosts->sent_bytes(host, 1))};
    EXPECT_GT(std::min(sent[0], sent[1]), 0.3 * std::max(sent[0], sent[1])) << sent[0] << " " << sent[1];
  }
}

// Both hosts send the same; a plan's bytes are those of all ranks.
TEST(Hosts, SendTheBytesOfThePlan) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        constexpr int kTimes = 4;
        constexpr size_t kBytes = 4 << 20;
        const std::vector<uint8_t> in(4 * kBytes, 1);
        std::vector<uint8_t> out(in.size());
        for (const moecclOp_t op : {moecclOpAllReduce, moecclOpAllToAll, moecclOpAllGather}) {
          const std::string text = explain(comm, op, kBytes, moecclUint8);
          const double planned = planned_bytes(text) / 2 * kTimes;
          ASSERT_GT(planned, 0) << text;
          check_all_reduce(rank, 4, comm, 1);
          const int64_t before = sent_payload();
          for (int i = 0; i < kTimes; ++i) {
            const moecclResult_t result =
                op == moecclOpAllReduce
                    ? moecclAllReduce(in.data(), out.data(), kBytes, moecclUint8, moecclSum, comm, nullptr)
                : op == moecclOpAllToAll ? moecclAllToAll(in.data(), out.data(), kBytes, moecclUint8, comm, nullptr)
                                         : moecclAllGather(in.data(), out.data(), kBytes, moecclUint8, comm, nullptr);
            MOECCL_ASSERT_COMM_OK(result, comm);
          }
          check_all_reduce(rank, 4, comm, 1);
          EXPECT_NEAR(static_cast<double>(sent_payload() - before) / planned, 1, 0.03) << text;
        }
      },
      on(*hosts));
}

TEST(Hosts, SplitIntoPartsThatCrossThem) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        for (const int color : {rank % 2, rank / 2}) {
          moecclComm_t part = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, color, rank, &part, nullptr), comm);
          int part_rank = -1;
          MOECCL_EXPECT_OK(moecclCommUserRank(part, &part_rank));
          check_all_reduce(part_rank, 2, part, 1000);
          MOECCL_EXPECT_OK(moecclCommDestroy(part));
        }
      },
      on(*hosts));
}

// The ranks know from their launcher where to meet, and some come before rank 0.
TEST(Hosts, MeetByTheLaunchersVariables) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  RankOptions options = on(*hosts);
  options.init = false;
  setenv("MOECCL_SECRET", "a secret of the tests", 1);  // before the library reads its variables, once in a process
  run_ranks(
      3,
      [](int rank, moecclComm_t) {
        const auto set = [](const char* name, int value) { setenv(name, std::to_string(value).c_str(), 1); };
        set("RANK", rank);
        set("WORLD_SIZE", 3);
        set("LOCAL_RANK", rank % 2);
        set("LOCAL_WORLD_SIZE", rank < 2 ? 2 : 1);
        setenv("MASTER_ADDR", TestHosts::address(0).c_str(), 1);
        setenv("MASTER_PORT", "29500", 1);
        if (rank == 0) usleep(300'000);
        moecclComm_t comm = nullptr;
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.init_timeout_ms = 20'000;
        MOECCL_ASSERT_OK(moecclCommInitEnv(&comm, &config));
        check_all_reduce(rank, 3, comm, 1000);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
  unsetenv("MOECCL_SECRET");
}

// Everybody calls until it fails. Returns what the rank was told and when, after the event.
struct Outcome {
  std::atomic<int64_t> event_ms, latest_ms;
};

constexpr int kTimeoutMs = 1500;
// The limit is the timeout and a second; on a machine where others stop this test for a while, some more.
constexpr int kSlackMs = 1000 + 4000;

void loop_until_failure(int rank, int n, moecclComm_t comm, Outcome& outcome,
                        const std::vector<std::string>& culprits) {
  std::vector<float> in(60'000, 1), out(60'000);
  moecclResult_t result = moecclSuccess;
  const int64_t start = now_ms();
  while (result == moecclSuccess && now_ms() - start < 30'000) {
    result = moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr);
  }
  const int64_t end = now_ms();
  ASSERT_NE(result, moecclSuccess) << "rank " << rank << " of " << n;
  const std::string said = moecclGetLastError(comm);
  bool named = false;
  for (const std::string& c : culprits) named = named || said.find(c) != std::string::npos;
  EXPECT_TRUE(named) << said;
  const int64_t event = outcome.event_ms.load();
  EXPECT_LT(end - event, kTimeoutMs + kSlackMs) << said;
  int64_t latest = outcome.latest_ms.load();
  while (latest < end && !outcome.latest_ms.compare_exchange_weak(latest, end)) {
  }
}

void fail_while_running(const TestHosts& hosts, int n, const std::vector<std::string>& culprits,
                        const std::function<void(const std::vector<pid_t>&)>& event, const std::set<int>& may_die) {
  const Shared<Outcome> outcome;
  RankOptions options = on(hosts);
  options.config.timeout_ms = kTimeoutMs;
  options.may_die = may_die;
  options.check_leaks = false;
  options.on_running = [&](const std::vector<pid_t>& pids) {
    usleep(300'000);
    outcome->event_ms = now_ms();
    event(pids);
  };
  run_ranks(
      n,
      [&](int rank, moecclComm_t comm) {
        loop_until_failure(rank, n, comm, *outcome, culprits);
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
      },
      options);
  printf("[          ] the last rank's error came %lld ms after the event, timeout %d ms\n",
         static_cast<long long>(outcome->latest_ms - outcome->event_ms), kTimeoutMs);
}

TEST(HostsFailure, ACableIsPulled) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  fail_while_running(*hosts, 4, {"rank"}, [&](const auto&) { EXPECT_TRUE(hosts->pull_cable(1)); }, {});
}

TEST(HostsFailure, PacketsAreDroppedOneWay) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  fail_while_running(*hosts, 3, {"rank"}, [&](const auto&) { EXPECT_TRUE(hosts->drop_what_it_sends(0)); }, {});
}

TEST(HostsFailure, APeersProcessOnAnotherHostIsKilled) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  fail_while_running(*hosts, 4, {"rank 3"}, [&](const std::vector<pid_t>& pids) { kill(pids[3], SIGKILL); }, {3});
}

}  // namespace
}  // namespace moeccl::testing
