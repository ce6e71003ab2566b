// SPDX-License-Identifier: Apache-2.0
// Where nothing fails, no call reports a failure: ranks that outnumber the cores beside busy neighbours, ranks across a
// line that loses packets, and communicators that come and go (scoreboard lines 4, 7 and 11). MOECCL_TEST_CALM_S sets
// the seconds of the first two, and MOECCL_TEST_CHURN the number of communicators of the third.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/fault/random_worker.h"
#include "tests/support/held.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

int setting(const char* name, int usual) {
  const char* text = getenv(name);
  return text != nullptr ? atoi(text) : usual;
}

// Processes that each use a core until they are ended.
class Neighbours {
 public:
  explicit Neighbours(int n) {
    for (int i = 0; i < n; ++i) {
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (volatile unsigned work = 0;;) work = work + 1;
      }
      pids_.push_back(pid);
    }
  }
  ~Neighbours() {
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  Neighbours(const Neighbours&) = delete;
  Neighbours& operator=(const Neighbours&) = delete;

 private:
  std::vector<pid_t> pids_;
};

// Runs the ranks for `seconds`. Rank 0 announces the end, in a separate broadcast after every 16 operations.
void run_calmly(int n, int seconds, TestHosts* hosts) {
  Shared<std::atomic<uint64_t>> done;
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = seconds * 1000 + 60'000};
  options.hosts = hosts;
  options.config.timeout_ms = static_cast<int32_t>(patient_ms(10'000));
  run_ranks(
      n,
      [&](int rank, moecclComm_t comm) {
        Worker worker({.n = n, .heap = false, .seed = test_seed()}, rank, comm);
        const int64_t until = now_ms() + seconds * 1000;
        uint64_t it = 0;
        for (int32_t goes_on = 1; goes_on != 0;) {
          for (int i = 0; i < 16; ++i) {
            ASSERT_EQ(worker.step(++it), moecclSuccess)
                << worker.name() << " #" << it << ": " << moecclGetLastError(comm);
          }
          ASSERT_EQ(worker.wrong(), 0u) << worker.what();
          goes_on = now_ms() < until ? 1 : 0;
          ASSERT_EQ(moecclBroadcast(&goes_on, &goes_on, 1, moecclInt32, 0, comm, nullptr), moecclSuccess)
              << moecclGetLastError(comm);
        }
        *done += it;
      },
      options);
  printf("%d s, %d ranks: %llu operations, all right\n", seconds, n, static_cast<unsigned long long>(done->load()));
}

TEST(Calm, EightRanksBesideFourBusyNeighbours) {
  const Neighbours busy(4);
  run_calmly(8, setting("MOECCL_TEST_CALM_S", 4), nullptr);
}

// 1 % of 10 Gbit/s, with 1 % of the packets lost in each direction.
TEST(Calm, ALineThatLosesPackets) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {1, 1}, .rate = "100mbit"}, &why);
  if (hosts == nullptr) GTEST_SKIP() << why;
  for (int host = 0; host < 2; ++host) {
    if (!hosts->run(host,
                    "nft add table inet loss && nft 'add chain inet loss in { type filter hook input priority 0; }' && "
                    "nft add rule inet loss in iifname eth0 numgen random mod 100 lt 1 counter drop"))
      GTEST_SKIP() << "nft cannot drop packets here";
  }
  run_calmly(4, setting("MOECCL_TEST_CALM_S", 4), hosts.get());
  EXPECT_TRUE(hosts->run(0, "nft list ruleset | grep -q 'packets [1-9]'")) << "nothing was lost";
}

// Counts after the first tenth, in which pools and caches take the resources that they keep.
TEST(Calm, CommunicatorsThatComeAndGoLeaveNothing) {
  const int n_made = setting("MOECCL_TEST_CHURN", scaled(200));
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 60'000 + 100 * n_made};
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        Held before;
        for (int i = 0; i < n_made; ++i) {
          if (i == n_made / 10) before = held();
          moecclComm_t part = nullptr;
          ASSERT_EQ(moecclCommSplit(comm, 0, 1 - rank, &part, nullptr), moecclSuccess) << moecclGetLastError(comm);
          int32_t in = rank + i, out = 0;
          ASSERT_EQ(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, part, nullptr), moecclSuccess)
              << moecclGetLastError(part);
          ASSERT_EQ(out, 2 * i + 1);
          ASSERT_EQ(moecclCommDestroy(part), moecclSuccess);
        }
        // A meeting point's thread ends a moment after its communicator.
        for (const Stopwatch watch; watch.fair_ms() < patient_ms(2'000);) {
          const Held now = held();
          if (now.descriptors <= before.descriptors && now.threads <= before.threads) break;
          usleep(1000);
        }
        const Held after = held();
        EXPECT_LE(after.descriptors, before.descriptors);
        EXPECT_LE(after.threads, before.threads);
        EXPECT_LE(after.shared_files, before.shared_files);
        if (!sanitized()) {
          EXPECT_LE(after.resident_kib - before.resident_kib, 1024);
        }
        if (rank == 0)
          set_note("growth of resident memory: " + std::to_string(after.resident_kib - before.resident_kib) + " KiB");
      },
      options);
  printf("%d communicators made and destroyed\n", n_made);
}

}  // namespace
}  // namespace moeccl::testing
