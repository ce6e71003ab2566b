// SPDX-License-Identifier: Apache-2.0
// A rank is gone although a part of its process lives on: a worker that it forked, as data loaders do, or another
// program that its process executes. The others are told within 1 s, and none of their operations that returned success
// has wrong data.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kLimitMs = 1000;

enum class End { kKilledWithWorker, kKilledWithWorkerOfAnotherProgram, kExecutesAnotherProgram };

struct What {
  End end;
  bool tcp;
};

class Outlive : public ::testing::TestWithParam<What> {};

[[noreturn]] void end_as(End end, std::atomic<int>* left) {
  if (end == End::kExecutesAnotherProgram) {
    left->store(getpid());
    execl("/bin/sleep", "sleep", "60", nullptr);
    _exit(1);
  }
  const pid_t worker = fork();
  if (worker == 0) {
    if (end == End::kKilledWithWorkerOfAnotherProgram) execl("/bin/sleep", "sleep", "60", nullptr);
    sleep(60);
    _exit(0);
  }
  left->store(worker);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the worker has begun
  raise(SIGKILL);
  abort();
}

TEST_P(Outlive, TheRankThatIsGoneIsNamedSoon) {
  constexpr int kRanks = 3, kVictim = 2;
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000, .may_die = {kVictim}};
  std::string why_not;
  const auto hosts = TestHosts::create(HostsOptions{.weights = {2, 1}, .named = true}, &why_not);
  if (GetParam().tcp) options.hosts = hosts.get();
  struct Words {
    std::atomic<int> left, told;
    std::atomic<int64_t> gone_ms;
  };
  const Shared<Words> words;
  options.on_running = [&](const std::vector<pid_t>&) {
    for (const Stopwatch watch; words->told < kRanks - 1 && watch.fair_ms() < patient_ms(15'000);)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (words->left > 0) kill(words->left, SIGKILL);
  };
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        moecclResult_t result = moecclSuccess;
        const Stopwatch watch;
        for (int i = 0; result == moecclSuccess && watch.fair_ms() < patient_ms(10'000); ++i) {
          if (rank == kVictim && i == 50) {
            words->gone_ms = fair_now_ms();
            end_as(GetParam().end, &words->left);
          }
          int32_t in[3] = {i, rank, 1}, out[3] = {};
          result = moecclAllReduce(in, out, 3, moecclInt32, moecclSum, comm, nullptr);
          if (result != moecclSuccess) break;
          ASSERT_EQ(out[0], kRanks * i);
          ASSERT_EQ(out[1], kRanks * (kRanks - 1) / 2);
          ASSERT_EQ(out[2], kRanks);
        }
        ++words->told;
        const int64_t late = fair_now_ms() - words->gone_ms;
        const std::string text = moecclGetLastError(comm);
        EXPECT_EQ(result, moecclRemoteError) << text;
        EXPECT_NE(text.find("rank 2"), std::string::npos) << text;
        EXPECT_LE(late, patient_ms(kLimitMs)) << text;
      },
      options);
}

std::string name_of(const ::testing::TestParamInfo<What>& info) {
  static constexpr const char* kNames[] = {"KilledWithWorker", "KilledWithProgram", "ExecutesAnotherProgram"};
  return std::string(kNames[static_cast<int>(info.param.end)]) + (info.param.tcp ? "OverTcp" : "");
}

INSTANTIATE_TEST_SUITE_P(, Outlive,
                         ::testing::Values(What{End::kKilledWithWorker, false}, What{End::kKilledWithWorker, true},
                                           What{End::kKilledWithWorkerOfAnotherProgram, true},
                                           What{End::kExecutesAnotherProgram, false},
                                           What{End::kExecutesAnotherProgram, true}),
                         name_of);

}  // namespace
}  // namespace moeccl::testing
