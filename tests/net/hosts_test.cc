// SPDX-License-Identifier: Apache-2.0
// Communicators whose ranks run on several hosts: how they form, what they know, and how they fail.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "tests/support/ranks_on_hosts.h"

namespace moeccl::testing {
namespace {

// Returns the bytes of all ranks between hosts as `explain` prints them: "  node           128.00 MiB, ...".
double planned_bytes(const std::string& text) {
  const size_t at = text.find("\n  node ");
  if (at == std::string::npos) return -1;
  std::istringstream words(text.substr(at + 8));
  double amount = 0;
  std::string unit;
  words >> amount >> unit;
  return amount * (unit.starts_with("MiB") ? 1 << 20 : unit.starts_with("KiB") ? 1 << 10 : 1);
}

TEST(Hosts, BecomeTheTopologysNodes) {
  MAKE_HOSTS(hosts, .weights = {2, 1, 2});
  run_ranks(
      5,
      [](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 5, comm, 10'000);
        const std::string text = explain(comm, moecclOpAllReduce, 1024, moecclFloat32);
        EXPECT_NE(text.find("node"), std::string::npos) << text;
        EXPECT_NE(text.find("hosts are reached over tcp"), std::string::npos) << text;
      },
      on(*hosts));
}

// As with --network=host: two hosts that have the same addresses.
TEST(Hosts, ThatAreContainersOfOneNetworkReachEachOther) {
  MAKE_HOSTS(containers, .containers = true);
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 2, comm, 10'000);
        const std::string text = explain(comm, moecclOpAllReduce, 1024, moecclFloat32);
        EXPECT_NE(text.find("hosts are reached over tcp"), std::string::npos) << text;
      },
      on(*containers));
}

// As in a cloud, where a rule leaves a few ports open. Survivors of a shrink meet at a port too.
TEST(Hosts, KeepToThePortsThatAFirewallLeavesOpen) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  for (int host = 0; host < 2; ++host) {
    if (!hosts->run(host,
                    "nft add table inet wall && nft 'add chain inet wall in { type filter hook input priority 0; }' && "
                    "nft add rule inet wall in iifname eth0 tcp dport != 30000-30023 tcp flags syn / syn,ack drop"))
      GTEST_SKIP() << "nft cannot drop packets here";
  }
  ASSERT_EQ(setenv("MOECCL_PORT_RANGE", "30000-30023", 1), 0);
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 4, comm, 100'000);
        moecclComm_t part = nullptr;
        const int left_out = 2;
        if (rank == left_out) return;
        MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, &left_out, 1, &part, nullptr, 0), comm);
        check_all_reduce(rank > left_out ? rank - 1 : rank, 3, part, 10'000);
        moecclCommDestroy(part);
      },
      on(*hosts));
  unsetenv("MOECCL_PORT_RANGE");
}

// The first address of an interface may be a service's, which all hosts have.
TEST(Hosts, SendByTheAddressByWhichTheyHaveMet) {
  MAKE_HOSTS(hosts, .weights = {1, 1});
  for (int host = 0; host < 2; ++host) {
    const std::string own = TestHosts::address(host) + "/24 dev eth0";
    if (!hosts->run(host, "ip addr flush dev eth0 && ip addr add 10.99.0.9/32 dev eth0 && ip addr add " + own))
      GTEST_SKIP() << "an interface cannot be given two addresses here";
  }
  run_ranks(
      2, [](int rank, moecclComm_t comm) { check_all_reduce(rank, 2, comm, 10'000); }, on(*hosts));
}

// Strangers find nothing to connect to: while ranks run, nothing listens on any host (scoreboard line 22). A part that
// meets, and a shrink, listen for as long as they meet.
TEST(Hosts, ListenToNobodyAfterInit) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  Meeting looked;
  RankOptions options = on(*hosts);
  options.on_running = [&](const std::vector<pid_t>&) {
    // A meeting point's thread ends a moment after the last rank has joined.
    const std::string quiet =
        "for i in $(seq 100); do test -z \"$(ss -ltnH)\" && exit; sleep 0.02; done; ss -ltnp; exit 1";
    for (int host = 0; host < 2; ++host) EXPECT_TRUE(hosts->run(host, quiet)) << "something listens on host " << host;
    looked.arrive();
  };
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 4, comm, 10'000);
        EXPECT_TRUE(looked.wait_for(1));
        check_all_reduce(rank, 4, comm, 10'000);
      },
      options);
}

// Returns whether `ss` with these options lists a socket of one of the processes.
bool listens(const std::string& options, const std::vector<pid_t>& pids) {
  std::FILE* pipe = popen(("ss " + options).c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t n; pipe != nullptr && (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  EXPECT_TRUE(pipe != nullptr && pclose(pipe) == 0) << "ss " << options;
  return std::any_of(pids.begin(), pids.end(),
                     [&](pid_t pid) { return text.find("pid=" + std::to_string(pid) + ",") != std::string::npos; });
}

TEST(Hosts, MeetAtAUnixSocketWhereAllRanksAreOnOne) {
  Meeting looked;
  RankOptions options{.mode = RankMode::kProcesses, .init = false};
  options.on_running = [&](const std::vector<pid_t>& pids) {  // rank 0 has made the id, and the last rank has not come
    EXPECT_TRUE(listens("-lxpH", pids));
    EXPECT_FALSE(listens("-ltnpH", pids));
    looked.arrive();
  };
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        if (rank == 2) {
          EXPECT_TRUE(looked.wait_for(1));
        }
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
        moecclComm_t comm = nullptr;
        MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 3, unique_id(), rank, &config));
        check_all_reduce(rank, 3, comm, 1000);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

// A topology without link figures takes the network's figures at the level of the hosts.
TEST(Hosts, FillATopologyThatSaysNothingOfItsLinks) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  for (const bool figures : {false, true}) {
    RankOptions options = on(*hosts);
    options.config.topology = figures ? "node:2(bw=9.55Gbit/s,lat=25us) gpu:2" : "node:2 gpu:2";
    run_ranks(
        4,
        [&](int rank, moecclComm_t comm) {
          check_all_reduce(rank, 4, comm, 10'000);
          const std::string text = explain(comm, moecclOpAllReduce, 1 << 20, moecclFloat32);
          EXPECT_NE(text.find("links from the topology"), std::string::npos) << text;
          EXPECT_NE(text.find("hosts are reached over tcp"), std::string::npos) << text;
        },
        options);
  }
}

// "auto" puts what each host finds for its own ranks below the hosts.
TEST(Hosts, AreALevelOfTheTopologyAuto) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  RankOptions options = on(*hosts);
  options.config.topology = "auto";
  run_ranks(
      3,
      [](int rank, moecclComm_t comm) {
        check_all_reduce(rank, 3, comm, 10'000);
        const std::string text = explain(comm, moecclOpAllReduce, 1 << 20, moecclFloat32);
        EXPECT_NE(text.find("\n  host "), std::string::npos) << text;
        EXPECT_NE(text.find("hosts are reached over tcp"), std::string::npos) << text;
      },
      options);
}

TEST(Hosts, AreAtLeastThoseOfATopologyFile) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  char path[] = "/tmp/moeccl_hosts_XXXXXX.json";
  const int fd = mkstemps(path, 5);
  ASSERT_GE(fd, 0);
  close(fd);
  for (const int count : {1, 2}) {
    std::ofstream(path) << R"({"moeccl_topology": 1, "hosts": [{"count": )" << count
                        << R"(, "nodes": [{"id": "host", "kind": "host", "cores": 2}]}]})";
    RankOptions options = on(*hosts);
    options.init = false;
    run_ranks(
        4,
        [&](int rank, moecclComm_t) {
          moecclConfig_t config = MOECCL_CONFIG_INIT;
          config.topology = path;
          config.init_timeout_ms = static_cast<int32_t>(patient_ms(20'000));
          moecclComm_t comm = nullptr;
          const moecclResult_t made = moecclCommInitRankConfig(&comm, 4, unique_id(), rank, &config);
          const std::string why = moecclGetLastError(nullptr);
          EXPECT_EQ(made, count == 1 ? moecclInvalidArgument : moecclSuccess) << why;
          if (count == 1) {
            EXPECT_NE(why.find("describes 1 host, the communicator's ranks are on 2: write \"count\": 2"),
                      std::string::npos)
                << why;
          }
          if (made == moecclSuccess) {
            MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          }
        },
        options);
  }
  unlink(path);
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

// Exchanges blocks that are large enough for several chunks, in and out of place: TCP stores arriving data directly in
// the output where that is safe.
TEST(Hosts, ExchangeLargeBlocks) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  run_ranks(
      3,
      [](int rank, moecclComm_t comm) {
        constexpr size_t kN = 3;
        const auto value = [](size_t from, size_t to, size_t i) {
          return static_cast<uint32_t>(from * 1'000'003 + to * 7919 + i * 13);
        };
        for (const size_t count : {5'000u, 70'001u, 1'500'001u}) {
          for (const bool in_place : {false, true}) {
            const auto me = static_cast<size_t>(rank);
            std::vector<uint32_t> in(kN * count), other(kN * count);
            for (size_t p = 0; p < kN; ++p)
              for (size_t i = 0; i < count; ++i) in[p * count + i] = value(me, p, i);
            std::vector<uint32_t>& out = in_place ? in : other;
            MOECCL_ASSERT_COMM_OK(moecclAllToAll(in.data(), out.data(), count, moecclUint32, comm, nullptr), comm);
            for (size_t p = 0; p < kN; ++p)
              for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[p * count + i], value(p, me, i)) << p << " " << i;
            for (size_t i = 0; i < count; ++i) out[me * count + i] = value(me, 0, i);
            MOECCL_ASSERT_COMM_OK(
                moecclAllGather(out.data() + me * count, out.data(), count, moecclUint32, comm, nullptr), comm);
            for (size_t p = 0; p < kN; ++p)
              for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[p * count + i], value(p, 0, i)) << p << " " << i;
          }
        }
      },
      on(*hosts));
}

// Both hosts send the same number of bytes; the bytes of a plan are those of all ranks.
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
          check_all_reduce(rank, 4, comm, 1);  // no rank sends more before all ranks of a host have read the counter
          for (int i = 0; i < kTimes; ++i) {
            const moecclResult_t result =
                op == moecclOpAllReduce
                    ? moecclAllReduce(in.data(), out.data(), kBytes, moecclUint8, moecclSum, comm, nullptr)
                : op == moecclOpAllToAll ? moecclAllToAll(in.data(), out.data(), kBytes, moecclUint8, comm, nullptr)
                                         : moecclAllGather(in.data(), out.data(), kBytes, moecclUint8, comm, nullptr);
            MOECCL_ASSERT_COMM_OK(result, comm);
          }
          check_all_reduce(rank, 4, comm, 1);
          const int64_t after = sent_payload();
          check_all_reduce(rank, 4, comm, 1);
          EXPECT_NEAR(static_cast<double>(after - before) / planned, 1, 0.03) << text;
        }
      },
      on(*hosts));
}

TEST(Hosts, SplitIntoPartsThatCrossThem) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        size_t bytes[2] = {};
        for (const bool crosses : {false, true}) {
          const int color = crosses ? rank % 2 : rank / 2;
          moecclComm_t part = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, color, rank, &part, nullptr), comm);
          int part_rank = -1;
          MOECCL_EXPECT_OK(moecclCommUserRank(part, &part_rank));
          check_all_reduce(part_rank, 2, part, 1000);
          MOECCL_EXPECT_OK(moecclCommMemoryUsage(part, &bytes[crosses]));
          MOECCL_EXPECT_OK(moecclCommDestroy(part));
        }
        EXPECT_GE(bytes[1], bytes[0] + (64 << 10)) << "the connection's buffers";
      },
      on(*hosts));
}

// The variables in which a launcher describes a rank, besides MASTER_ADDR and MASTER_PORT, which mpirun and srun pass
// on from the user.
struct Dialect {
  const char* launcher;
  const char *rank, *n_ranks, *local_rank, *n_local, *n_hosts;
};
constexpr Dialect kDialects[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr, "SLURM_STEP_NUM_NODES"},
};
class HostsLauncher : public ::testing::TestWithParam<Dialect> {};
INSTANTIATE_TEST_SUITE_P(All, HostsLauncher, ::testing::ValuesIn(kDialects),
                         [](const auto& param) { return param.param.launcher; });

// The ranks learn from their launcher where to meet, and some arrive before rank 0.
TEST_P(HostsLauncher, SaysWhereToMeet) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  RankOptions options = on(*hosts);
  options.init = false;
  setenv("MOECCL_SECRET", "a secret of the tests",
         1);  // the library reads its variables once per process, so this comes first
  run_ranks(
      3,
      [](int rank, moecclComm_t) {
        const auto set = [](const char* name, int value) {
          if (name != nullptr) setenv(name, std::to_string(value).c_str(), 1);
        };
        const Dialect& d = GetParam();
        set(d.rank, rank);
        set(d.n_ranks, 3);
        set(d.local_rank, rank % 2);
        set(d.n_local, rank < 2 ? 2 : 1);
        set(d.n_hosts, 2);
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

// Shared by all ranks, which call until a call fails: the times of the event and of the last rank's error.
struct Outcome {
  std::atomic<int64_t> event_ms, latest_ms;
  std::atomic<int> exact;  // ranks whose error names only culprits
};

// Returns the ranks that a message calls unresponsive or lost, without the rank that reported them.
std::set<std::string> blamed(const std::string& said) {
  std::set<std::string> ranks;
  const size_t at = std::max(said.rfind("unresponsive: ") + 1, said.rfind("lost the connection to ") + 1);
  if (at == 0) return ranks;
  for (size_t i = said.find("rank ", at); i != std::string::npos; i = said.find("rank ", i + 1))
    ranks.insert(said.substr(i, said.find_first_not_of("0123456789", i + 5) - i));
  return ranks;
}

constexpr int kTimeoutMs = 1500;

void loop_until_failure(int rank, int n, moecclComm_t comm, Outcome& outcome,
                        const std::vector<std::string>& culprits) {
  std::vector<float> in(60'000, 1), out(60'000);
  moecclResult_t result = moecclSuccess;
  for (const Stopwatch watch; result == moecclSuccess && watch.ms() < 30'000;) {
    result = moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr);
  }
  const int64_t end = fair_now_ms();
  ASSERT_NE(result, moecclSuccess) << "rank " << rank << " of " << n;
  const std::string said = moecclGetLastError(comm);
  bool named = false;
  for (const std::string& c : culprits) named = named || said.find(c) != std::string::npos;
  EXPECT_TRUE(named) << said;
  const std::set<std::string> names = blamed(said);
  if (!names.empty() && std::includes(culprits.begin(), culprits.end(), names.begin(), names.end())) ++outcome.exact;
  const int64_t event = outcome.event_ms.load();
  EXPECT_LE(end - event, kTimeoutMs + patient_ms(1000)) << said;
  int64_t latest = outcome.latest_ms.load();
  while (latest < end && !outcome.latest_ms.compare_exchange_weak(latest, end)) {
  }
}

// Returns the ranks that `rank` may blame, in ascending order.
using Culprits = std::function<std::vector<std::string>(int rank)>;

// Returns the number of ranks whose error names only culprits.
int fail_while_running(const TestHosts& hosts, int n, const Culprits& culprits,
                       const std::function<void(const std::vector<pid_t>&)>& event, const std::set<int>& may_die) {
  const Shared<Outcome> outcome;
  RankOptions options = on(hosts);
  options.config.timeout_ms = kTimeoutMs;
  options.may_die = may_die;
  options.check_leaks = false;
  options.on_running = [&](const std::vector<pid_t>& pids) {
    usleep(300'000);
    outcome->event_ms = fair_now_ms();
    event(pids);
  };
  run_ranks(
      n,
      [&](int rank, moecclComm_t comm) {
        loop_until_failure(rank, n, comm, *outcome, culprits(rank));
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
      },
      options);
  printf(
      "[          ] the last rank's error came %lld ms after the event, timeout %d ms; %d of %d ranks blame culprits "
      "alone\n",
      static_cast<long long>(outcome->latest_ms - outcome->event_ms), kTimeoutMs, outcome->exact.load(), n);
  return outcome->exact;
}

// A rank that waits for a rank of its own host notices nothing else; a rank that waits for the other host tells it.
TEST(HostsFailure, ACableIsPulled) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  const auto beyond = [](int rank) {
    return rank < 2 ? std::vector<std::string>{"rank 2", "rank 3"} : std::vector<std::string>{"rank 0", "rank 1"};
  };
  EXPECT_GE(fail_while_running(*hosts, 4, beyond, [&](const auto&) { EXPECT_TRUE(hosts->pull_cable(1)); }, {}), 1);
}

TEST(HostsFailure, PacketsAreDroppedOneWay) {
  MAKE_HOSTS(hosts, .weights = {2, 1});
  const auto beyond = [](int rank) {
    return rank < 2 ? std::vector<std::string>{"rank 2"} : std::vector<std::string>{"rank 0", "rank 1"};
  };
  fail_while_running(*hosts, 3, beyond, [&](const auto&) { EXPECT_TRUE(hosts->drop_what_it_sends(0)); }, {});
}

TEST(HostsFailure, APeersProcessOnAnotherHostIsKilled) {
  MAKE_HOSTS(hosts, .weights = {2, 2});
  const auto it = [](int) { return std::vector<std::string>{"rank 3"}; };
  fail_while_running(*hosts, 4, it, [&](const std::vector<pid_t>& pids) { kill(pids[3], SIGKILL); }, {3});
}

}  // namespace
}  // namespace moeccl::testing
