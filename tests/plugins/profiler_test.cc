// SPDX-License-Identifier: Apache-2.0
// What profiler plugins made for NCCL are told of, in each version, and that none of them can break a job.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/profiler_log.h"
#include "tests/support/ranks.h"

namespace {
std::atomic<int64_t> set_back_s{0};  // how far the clock of the day has been set back
}

// Also the library's, because a program's functions come before those of its libraries.
extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const int result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME && result == 0) time->tv_sec -= set_back_s.load();
  return result;
}

namespace moeccl::testing {
namespace {

void sum(moecclComm_t comm, size_t count) {
  std::vector<float> in(count, 1), out(count);
  MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, moecclFloat32, moecclSum, comm, nullptr), comm);
  int n = 0;
  MOECCL_ASSERT_OK(moecclCommCount(comm, &n));
  ASSERT_EQ(out[count - 1], static_cast<float>(n));
}

// Rank 0 sends one float to rank 1.
void pass_on(int rank, moecclComm_t comm) {
  float x = 0;
  MOECCL_ASSERT_COMM_OK(rank == 0 ? moecclSend(&x, 1, moecclFloat32, 1, comm, nullptr)
                                  : moecclRecv(&x, 1, moecclFloat32, 0, comm, nullptr),
                        comm);
}

// Expects that nothing was told against NCCL's rules, and that as many events of each type were stopped as started.
void expect_in_order(const ProfilerLog& log) {
  EXPECT_EQ(log.n("ERROR"), 0u) << log.all();
  for (const char* type : {"GroupApi", "CollApi", "P2pApi", "Group ", "Coll ", "P2p ", "KernelCh"}) {
    std::string stopped = type;
    if (stopped.ends_with(' ')) stopped.pop_back();
    const auto stops = log.lines_with("stop " + stopped);
    const auto exact = static_cast<size_t>(std::count(stops.begin(), stops.end(), "stop " + stopped));
    EXPECT_EQ(log.n(std::string("start ") + type), exact) << type << log.all();
  }
}

uint64_t number_after(const std::string& line, const std::string& key) {
  const size_t at = line.find(key);
  return at == std::string::npos ? 0 : std::stoull(line.substr(at + key.size()));
}

TEST(Profiler, IsToldOfEachOperationFromItsCallToItsEnd) {
  const ProfilerLog log;
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.name = "world";
  run_ranks(
      2, [](int, moecclComm_t comm) { sum(comm, 300'000); }, options);
  expect_in_order(log);
  EXPECT_EQ(log.n("init rank=0 ranks=2 hosts=1 name=world group="), 1u) << log.all();
  EXPECT_EQ(log.n("init rank=1 ranks=2 hosts=1 name=world group="), 1u);
  EXPECT_EQ(log.n("finalize rank=0 name=world"), 1u);
  for (const char* rank : {"0", "1"}) {
    const std::string r = rank;
    EXPECT_EQ(log.n(r + " start GroupApi in=none depth=1"), 1u) << log.all();
    EXPECT_EQ(log.n(r + " start CollApi in=GroupApi func=AllReduce count=300000 type=ncclFloat32 root=0"), 1u);
    const auto coll = log.lines_with(r + " start Coll in=CollApi func=AllReduce count=300000 type=ncclFloat32 root=0");
    ASSERT_EQ(coll.size(), 1u) << log.all();
    EXPECT_NE(coll[0].find(" channels=1 "), std::string::npos) << coll[0];
    EXPECT_NE(coll[0].find(" group=Group"), std::string::npos) << coll[0];
    EXPECT_EQ(coll[0].find("algo= "), std::string::npos) << "the plan's name: " << coll[0];
    EXPECT_EQ(coll[0].find("=(nil)"), std::string::npos) << "the buffers: " << coll[0];
    EXPECT_EQ(log.n(r + " start KernelCh in=Coll channel=0"), 1u);
  }
  // The kernel's event lasts as long as the operation, by its own figures.
  const auto ends = log.lines_with("record KernelCh state=22");
  for (const std::string& line : log.lines_with("start KernelCh")) {
    const uint64_t began = number_after(line, " at=");
    ASSERT_EQ(ends.size(), 2u);
    for (const std::string& end : ends) EXPECT_GT(number_after(end, " at="), began);
    EXPECT_GT(began, 1'767'225'600'000'000'000u) << "nanoseconds since 1970";
  }
}

TEST(Profiler, GetsNcclsNamesOfOperations) {
  const ProfilerLog log("all", "mask=2");  // collectives
  run_ranks(2, [](int rank, moecclComm_t comm) {
    std::vector<int32_t> in(4000), out(8000);
    const size_t n = 1000;
    const size_t counts[] = {rank == 0 ? n : 2 * n, rank == 0 ? n : 2 * n}, at[] = {0, 2 * n};
    const size_t from[] = {n, 2 * n};
    MOECCL_ASSERT_OK(moecclBroadcast(in.data(), out.data(), n, moecclInt32, 1, comm, nullptr));
    MOECCL_ASSERT_OK(moecclReduce(in.data(), out.data(), n, moecclInt64, moecclSum, 1, comm, nullptr));
    MOECCL_ASSERT_OK(moecclAllGather(in.data(), out.data(), n, moecclInt32, comm, nullptr));
    MOECCL_ASSERT_OK(moecclReduceScatter(in.data(), out.data(), n, moecclInt32, moecclSum, comm, nullptr));
    MOECCL_ASSERT_OK(moecclAllToAll(in.data(), out.data(), n, moecclUint8, comm, nullptr));
    MOECCL_ASSERT_OK(moecclAllToAllv(in.data(), counts, at, out.data(), from, at, moecclInt32, comm, nullptr));
    MOECCL_ASSERT_OK(moecclGather(in.data(), out.data(), n, moecclFloat64, 0, comm, nullptr));
    MOECCL_ASSERT_OK(moecclScatter(in.data(), out.data(), n, moecclInt32, 1, comm, nullptr));
  });
  expect_in_order(log);
  for (const char* told :
       {"func=Broadcast count=1000 type=ncclInt32 root=1 ", "func=Reduce count=1000 type=ncclInt64 root=1 ",
        "func=AllGather count=1000 type=ncclInt32 root=0 ", "func=ReduceScatter count=1000 ",
        "func=AlltoAll count=1000 type=ncclInt8 ", "func=Gather count=1000 type=ncclFloat64 root=0 ",
        "func=Scatter count=1000 type=ncclInt32 root=1 "})
    EXPECT_EQ(log.n(std::string("start Coll in=CollApi ") + told), 2u) << told << "\n" << log.all();
  // What this rank sends, which only it knows.
  EXPECT_EQ(log.n("0 start Coll in=CollApi func=AllToAllv count=2000 "), 1u) << log.all();
  EXPECT_EQ(log.n("1 start Coll in=CollApi func=AllToAllv count=4000 "), 1u) << log.all();
  EXPECT_EQ(log.n("start KernelCh"), 0u) << "it did not ask for kernels";
  // The operations of a communicator are numbered.
  uint64_t last = 0;
  for (const std::string& line : log.lines_with("0 start Coll ")) {
    const uint64_t sequence = number_after(line, "sequence=");
    EXPECT_GT(sequence, last) << line;
    last = sequence;
  }
}

// Plugins learn the difference of two clocks from the times that they are told, so none may be in the future.
TEST(Profiler, IsToldNoFutureTimesWhenTheClockIsSetBack) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const ProfilerLog log;
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    sum(comm, 300'000);
    if (rank == 1) {
      int64_t left_ms = patient_ms(10'000);
      while (log.n("0 start CollApi in=GroupApi func=AllReduce count=300001") == 0 && left_ms-- > 0) usleep(1000);
      EXPECT_GT(left_ms, 0) << log.all();
      set_back_s = 100;
    }
    sum(comm, 300'001);
  });
  expect_in_order(log);
  const auto ends = log.lines_with("record KernelCh");
  const auto n_late = std::count_if(ends.begin(), ends.end(), [&](const std::string& line) {
    return number_after(line, " at=") > static_cast<uint64_t>(now.tv_sec) * 1'000'000'000;
  });
  EXPECT_EQ(n_late, 2) << "those of the first operation alone: " << log.all();
}

// Small operations run in another way and are timed only sometimes.
TEST(Profiler, IsToldOfEverySmallOperation) {
  const ProfilerLog log;
  run_ranks(2, [](int, moecclComm_t comm) {
    for (int i = 0; i < 100; ++i) sum(comm, 4);
  });
  expect_in_order(log);
  EXPECT_EQ(log.n("start Coll in=CollApi func=AllReduce count=4 "), 200u);
  EXPECT_EQ(log.n("record KernelCh"), 200u);
}

TEST(Profiler, IsToldOfEveryMessageOfALargeGroup) {
  constexpr int kMessages = 100;
  const ProfilerLog log;
  run_ranks(2, [](int rank, moecclComm_t comm) {
    std::vector<uint16_t> in(kMessages * 10), out(kMessages * 10);
    MOECCL_ASSERT_OK(moecclGroupStart());
    for (size_t i = 0; i < kMessages; ++i) {
      MOECCL_ASSERT_OK(moecclSend(&in[i * 10], 10, moecclFloat16, 1 - rank, comm, nullptr));
      MOECCL_ASSERT_OK(moecclRecv(&out[i * 10], 10, moecclFloat16, 1 - rank, comm, nullptr));
    }
    MOECCL_ASSERT_OK(moecclGroupEnd());
  });
  expect_in_order(log);
  const std::string told = " count=10 type=ncclFloat16 peer=1 channels=1";
  EXPECT_EQ(log.n("0 start P2p in=P2pApi func=Send" + told), static_cast<size_t>(kMessages)) << log.all();
  EXPECT_EQ(log.n("0 start P2p in=P2pApi func=Recv" + told), static_cast<size_t>(kMessages));
  EXPECT_EQ(log.n("0 start P2pApi in=GroupApi func=Send count=10 type=ncclFloat16"), static_cast<size_t>(kMessages));
}

TEST(Profiler, GetsOurNamesOfWhatNcclDoesNotHave) {
  const ProfilerLog log("all", "mask=2");
  RankOptions options;
  options.config.topology = "node:2 gpu:1";
  const auto calls = [](int, moecclComm_t comm) {
    constexpr size_t kTokens = 50;
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 64;
    config.top_k = 1;
    config.n_experts = 2;
    config.max_tokens = kTokens;
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    const std::vector<int32_t> index(kTokens, 1);  // all tokens go to rank 1
    const std::vector<float> weight(kTokens, 0.5f);
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), kTokens), comm);
    std::vector<uint16_t> in(kTokens * 32), out(2 * kTokens * 32);
    MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), out.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclCombine(routing, out.data(), in.data(), nullptr), comm);
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.mode = moecclReplaceGiven;
    moecclReplacement_t replacement = nullptr;
    std::vector<int32_t> homes(2 * kTokens);  // the ranks exchange their tokens
    for (size_t i = 0; i < homes.size(); ++i) homes[i] = i < kTokens ? 1 : 0;
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, homes.data()), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, out.data(), in.data(), nullptr), comm);
    MOECCL_EXPECT_OK(moecclReplaceDestroy(replacement));
    MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
    const size_t counts[] = {1, 20, 30, 4};  // rank 0 receives 31, and rank 1 sends 34
    MOECCL_ASSERT_COMM_OK(moecclTensorAllToAllv(in.data(), out.data(), counts, moecclFloat16, comm, nullptr), comm);
  };
  run_ranks(2, calls, options);
  expect_in_order(log);
  // Rank 0 sends 50 rows of 64 bytes, and rank 1 receives 100.
  EXPECT_EQ(log.n("0 start Coll in=CollApi func=Dispatch count=3200 type=ncclInt8 "), 1u) << log.all();
  EXPECT_EQ(log.n("1 start Coll in=CollApi func=Dispatch count=6400 type=ncclInt8 "), 1u) << log.all();
  EXPECT_EQ(log.n("1 start Coll in=CollApi func=Combine count=3200 type=ncclBfloat16 "), 2u) << log.all();
  EXPECT_EQ(log.n("0 start Coll in=CollApi func=Combine count=1600 type=ncclBfloat16 "), 2u) << log.all();
  EXPECT_EQ(log.n("0 start Coll in=CollApi func=TensorAllToAllv count=31 type=ncclFloat16 "), 1u) << log.all();
  EXPECT_EQ(log.n("1 start Coll in=CollApi func=TensorAllToAllv count=34 type=ncclFloat16 "), 1u) << log.all();
}

TEST(Profiler, OfOldVersionsIsToldWhatTheyKnow) {
  for (const char* version : {"v2", "v3", "v4", "v5"}) {
    const ProfilerLog log(version);
    RankOptions options{.mode = RankMode::kProcesses};
    options.config.name = "world";
    run_ranks(
        2,
        [](int rank, moecclComm_t comm) {
          sum(comm, 5000);
          pass_on(rank, comm);
        },
        options);
    expect_in_order(log);
    const bool calls = std::string(version) == "v5", kernels = calls || std::string(version) == "v4";
    const std::string in = calls ? "CollApi" : "Group";
    const auto coll = log.lines_with("0 start Coll in=" + in + " func=AllReduce count=5000 type=ncclFloat32 root=0");
    ASSERT_EQ(coll.size(), 1u) << version << "\n" << log.all();
    if (!kernels) {
      EXPECT_NE(coll[0].find("name=world group="), std::string::npos) << coll[0];
      EXPECT_NE(number_after(coll[0], "sequence="), 0u);
    }
    EXPECT_EQ(coll[0].find("algo= "), std::string::npos) << coll[0];
    EXPECT_NE(coll[0].find("channels=1"), std::string::npos) << coll[0];
    EXPECT_EQ(log.n(std::string("0 start P2p in=") + (calls ? "P2pApi" : "Group") +
                    " func=Send count=1 type=ncclFloat32 peer=1"),
              1u)
        << version << "\n"
        << log.all();
    EXPECT_EQ(log.n("start KernelCh"), kernels ? 4u : 0u);
    EXPECT_EQ(log.n("Api"), calls ? 20u : 0u) << log.all();
    EXPECT_EQ(log.n("ERROR"), 0u) << log.all();
  }
}

TEST(Profiler, HasAContextForEachCommunicator) {
  const ProfilerLog log;
  run_ranks(4, [](int rank, moecclComm_t comm) {
    moecclComm_t half = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank % 2, rank, &half, nullptr), comm);
    sum(half, 100);
    MOECCL_ASSERT_OK(moecclCommDestroy(half));
    sum(comm, 200);
  });
  expect_in_order(log);
  EXPECT_EQ(log.n("init "), 8u) << log.all();
  EXPECT_EQ(log.n("finalize "), 8u);
  EXPECT_EQ(log.n("start Coll in=CollApi func=AllReduce count=100 "), 4u);
  EXPECT_EQ(log.n("3 start Coll in=CollApi func=AllReduce count=200 "), 1u) << "by the rank in its communicator";
  std::vector<std::string> groups;
  for (const std::string& line : log.lines_with("init ")) groups.push_back(line.substr(line.find("group=")));
  std::sort(groups.begin(), groups.end());
  EXPECT_EQ(std::unique(groups.begin(), groups.end()) - groups.begin(), 3) << log.all();
}

TEST(Profiler, SeesTheEndOfOperationsThatFail) {
  const ProfilerLog log;
  run_ranks(2, [](int rank, moecclComm_t comm) {
    std::vector<float> x(2000);
    const size_t count = rank == 0 ? 1000 : 2000;
    EXPECT_EQ(moecclAllReduce(x.data(), x.data(), count, moecclFloat32, moecclSum, comm, nullptr), moecclMismatch);
  });
  expect_in_order(log);
  EXPECT_EQ(log.n("start CollApi"), 2u) << log.all();
}

TEST(Profiler, IsFoundByNcclsVariable) {
  const ProfilerLog log("all", "", "NCCL_PROFILER_PLUGIN");
  run_ranks(2, [](int, moecclComm_t comm) { sum(comm, 10); });
  EXPECT_EQ(log.n("start Coll "), 2u);
}

TEST(Profiler, IsToldOfAProgramForNccl) {
  const char *const shim = std::getenv("MOECCL_TEST_SHIM"), *const program = std::getenv("MOECCL_TEST_PROGRAM");
  if (shim == nullptr || program == nullptr) GTEST_SKIP() << "MOECCL_TEST_SHIM and MOECCL_TEST_PROGRAM name no files";
  if (sanitized()) GTEST_SKIP() << "a sanitizer must be preloaded before the shim";
  const ProfilerLog log("all", "", "NCCL_PROFILER_PLUGIN");
  const std::string command = "MOECCL_SHIM_QUIET=1 CUDA_VISIBLE_DEVICES= LD_PRELOAD=" + std::string(shim) + " ";
  ASSERT_EQ(std::system((command + program + " 3").c_str()), 0);
  expect_in_order(log);
  EXPECT_EQ(log.n("start Coll in=CollApi func=AllReduce count=1 type=ncclFloat32"), 3u) << log.all();
}

TEST(Profiler, ThatIsNoneIsNotLoaded) {
  const ProfilerLog log("all", "", "NCCL_PROFILER_PLUGIN");
  const Variables ours = {{"MOECCL_PROFILER_PLUGIN", "None"}};
  run_ranks(2, [](int, moecclComm_t comm) { sum(comm, 10); });
  EXPECT_EQ(log.lines().size(), 0u);
  EXPECT_EQ(log.warnings().size(), 0u);
}

TEST(Profiler, ThatIsMissingIsSaid) {
  for (const std::string variable : {"MOECCL_PROFILER_PLUGIN", "NCCL_PROFILER_PLUGIN"}) {
    const ProfilerLog log("v99", "", variable.c_str());
    run_ranks(2, [](int, moecclComm_t comm) { sum(comm, 10); });
    ASSERT_EQ(log.warnings().size(), 1u);
    const std::string said = log.warnings()[0];
    EXPECT_NE(said.find(" " + variable + ": "), std::string::npos) << said;
    EXPECT_NE(said.find("MOECCL_PROFILER_PLUGIN=none"), std::string::npos) << said;
    EXPECT_NE(said.find("libnccl-profiler-fake_v99.so"), std::string::npos) << said;
  }
}

// A job must go on, and its user must learn once why there is no profile.
class MisbehavingProfiler : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(MisbehavingProfiler, WarnsOnceAndTheJobGoesOn) {
  const auto [script, said] = GetParam();
  const ProfilerLog log("all", script);
  const bool fine = run_ranks(2, [](int rank, moecclComm_t comm) {
    for (int i = 0; i < 20; ++i) sum(comm, i % 2 == 0 ? 4 : 50'000);
    pass_on(rank, comm);
  });
  EXPECT_TRUE(fine);
  EXPECT_EQ(log.n("ERROR"), 0u) << log.all();
  const auto warnings = log.warnings();
  ASSERT_EQ(warnings.size(), *said == 0 ? 0u : 1u) << (warnings.empty() ? "" : warnings[0]);
  if (*said != 0) {
    EXPECT_NE(warnings[0].find(said), std::string::npos) << warnings[0];
    // It hears of nothing that begins after its failure. The other thread may be in a call at that time.
    EXPECT_LE(log.n("start Coll "), 2u) << log.all();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, MisbehavingProfiler,
    ::testing::Values(std::pair("init", "init returned 3"), std::pair("start", "startEvent returned 3"),
                      std::pair("stop", "stopEvent returned 3"), std::pair("record", "recordEventState returned 3"),
                      std::pair("throws", "startEvent threw: unexpected: the profiler's own trouble"),
                      std::pair("null=init", "has no init"), std::pair("null=startEvent", "has no startEvent"),
                      std::pair("null=stopEvent", "has no stopEvent"),
                      std::pair("null=recordEventState", "has no recordEventState"),
                      std::pair("null=finalize", "has no finalize"), std::pair("nothing", ""),
                      std::pair("scribbles", ""), std::pair("mask=0", ""), std::pair("mask=-1", "")),
    [](const auto& way) {
      std::string name = way.param.first;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return isalnum(c) == 0; }, '_');
      return name;
    });

// Another thread of the parent holds the plugin's lock, and may hold the plugin's own.
TEST(Profiler, OfAParentDoesNotHoldUpAForkedChild) {
  const ProfilerLog log("all", "slow");
  RankOptions options;
  options.init = false;
  run_ranks(
      1,
      [&](int, moecclComm_t) {
        std::thread other([] {
          moecclComm_t comm = nullptr;
          MOECCL_ASSERT_OK(moecclCommInitAll(&comm, 1, nullptr));
          sum(comm, 10);
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        });
        while (log.n("init ") == 0) usleep(1000);
        const pid_t child = fork();
        if (child == 0) {
          alarm(static_cast<unsigned>(patient_ms(10'000) / 1000));
          moecclComm_t comm = nullptr;
          if (moecclCommInitAll(&comm, 1, nullptr) != moecclSuccess) _exit(1);
          float x = 1;
          if (moecclAllReduce(&x, &x, 1, moecclFloat32, moecclSum, comm, nullptr) != moecclSuccess) _exit(2);
          _exit(moecclCommDestroy(comm) == moecclSuccess ? 0 : 3);
        }
        int status = 0;
        EXPECT_EQ(waitpid(child, &status, 0), child);
        EXPECT_EQ(status, 0) << "of the child";
        other.join();
      },
      options);
  expect_in_order(log);
  EXPECT_EQ(log.n("init "), 1u) << "the child has no profile: " << log.all();
  EXPECT_EQ(log.n("start Coll "), 1u) << log.all();
  ASSERT_EQ(log.warnings().size(), 1u);
  EXPECT_NE(log.warnings()[0].find("fork before the first communicator"), std::string::npos) << log.warnings()[0];
}

// Plugins for NCCL's one rank per process have no locks for this.
TEST(Profiler, IsInOneInitOrFinalizeAtATime) {
  const ProfilerLog log("all", "slow");
  RankOptions options;
  options.init = false;
  run_ranks(
      2,
      [](int rank, moecclComm_t) {
        moecclComm_t comm = nullptr;
        usleep(static_cast<useconds_t>(rank) * 50'000);
        for (int i = 0; i < 2; ++i) {
          MOECCL_ASSERT_OK(moecclCommInitAll(&comm, 1, nullptr));
          MOECCL_ASSERT_OK(moecclCommDestroy(comm));
        }
      },
      options);
  EXPECT_EQ(log.n("ERROR"), 0u) << log.all();
  EXPECT_EQ(log.n("finalize "), 4u);
}

TEST(Profiler, OfAParentIsLeftAloneInAForkedChild) {
  const ProfilerLog log;
  RankOptions options{.mode = RankMode::kProcesses};
  options.destroy = false;
  run_ranks(
      2,
      [](int, moecclComm_t comm) {
        sum(comm, 10);
        const pid_t child = fork();
        if (child == 0) {
          (void)moecclCommDestroy(comm);
          _exit(0);
        }
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_EQ(status, 0);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
  EXPECT_EQ(log.n("finalize "), 2u) << log.all();
}

}  // namespace
}  // namespace moeccl::testing
