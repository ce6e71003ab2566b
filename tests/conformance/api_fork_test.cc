// SPDX-License-Identifier: Apache-2.0
// Forked children: objects that the parent made are refused or forgotten in the child, but never waited for, and
// objects that the child makes work. Also processes that end while operations run.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

// Runs body in a child that an alarm ends. body returns what went wrong, or "".
void expect_in_child(const std::function<std::string()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(static_cast<unsigned>(patient_ms(20'000) / 1000));
    const std::string wrong = body();
    if (!wrong.empty()) fprintf(stderr, "forked child: %s\n", wrong.c_str());
    _exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFSIGNALED(status)) << "signal " << WTERMSIG(status)
                                    << (WTERMSIG(status) == SIGALRM ? ": the child hung" : "");
  EXPECT_TRUE(!WIFEXITED(status) || WEXITSTATUS(status) == 0) << "its sentence is above";
}

struct Family {
  moecclComm_t comm = nullptr;
  moecclStream_t stream = nullptr;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  moecclHybrid_t hybrid = nullptr;
  moecclMigration_t migration = nullptr;
  moecclGradientReturn_t gradients = nullptr;
  moecclReplacement_t replacement = nullptr;
  moecclSampleSolver_t solver = nullptr;
  void* heap = nullptr;
  void* registration = nullptr;
};

void make(Family& f) {
  const int32_t domain = 1;
  MOECCL_ASSERT_OK(moecclStreamCreate(&f.stream));
  moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
  layer.hidden_bytes = 64, layer.top_k = 1, layer.n_experts = 2, layer.max_tokens = 2, layer.type = moecclFloat32;
  MOECCL_ASSERT_OK(moecclMoeCreate(&f.moe, f.comm, &layer));
  const int32_t choices[2] = {0, 1};
  MOECCL_ASSERT_OK(moecclRoutingCreate(&f.routing, f.moe, choices, nullptr, 2));
  moecclHybridConfig_t hybrid = MOECCL_HYBRID_CONFIG_INIT;
  hybrid.n_experts = 2, hybrid.domain = &domain, hybrid.n_levels = 1;
  MOECCL_ASSERT_OK(moecclHybridCreate(&f.hybrid, f.comm, &hybrid));
  moecclMigrationConfig_t migration = MOECCL_MIGRATION_CONFIG_INIT;
  migration.count = 16, migration.ratio = 1;
  MOECCL_ASSERT_OK(moecclMigrationCreate(&f.migration, f.hybrid, f.comm, &migration));
  moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
  back.count = 16;
  MOECCL_ASSERT_OK(moecclGradientReturnCreate(&f.gradients, f.hybrid, f.comm, &back));
  moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
  MOECCL_ASSERT_OK(moecclReplaceCreate(&f.replacement, f.moe, &replace));
  MOECCL_ASSERT_OK(moecclSampleSolverCreate(&f.solver));
  MOECCL_ASSERT_OK(moecclMemAlloc(&f.heap, 4096));
  memset(f.heap, 0x5a, 4096);
  MOECCL_ASSERT_OK(moecclCommRegister(f.comm, f.heap, 4096, &f.registration));
}

void destroy(Family& f) {
  MOECCL_EXPECT_OK(moecclSampleSolverDestroy(f.solver));
  MOECCL_EXPECT_OK(moecclReplaceDestroy(f.replacement));
  MOECCL_EXPECT_OK(moecclGradientReturnDestroy(f.gradients));
  MOECCL_EXPECT_OK(moecclMigrationDestroy(f.migration));
  MOECCL_EXPECT_OK(moecclHybridDestroy(f.hybrid));
  MOECCL_EXPECT_OK(moecclRoutingDestroy(f.routing));
  MOECCL_EXPECT_OK(moecclMoeDestroy(f.moe));
  MOECCL_EXPECT_OK(moecclStreamDestroy(f.stream));
  MOECCL_EXPECT_OK(moecclMemFree(f.heap));
}

// Makes every call on the parent's objects.
std::string use_as_child(const Family& f) {
  float x[64] = {}, y[64] = {};
  int n = 0;
  size_t bytes = 0;
  uint64_t epoch = 0;
  moecclResult_t state = moecclSuccess;
  moecclComm_t part = nullptr;
  moecclRouting_t routing = nullptr;
  moecclMoe_t layer = nullptr;
  moecclRedOp_t op{};
  void* registration = nullptr;
  const int32_t choices[2] = {0, 1};
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  moecclHybridInfo_t hybrid{};
  hybrid.size = sizeof(hybrid);
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 64, config.top_k = 1, config.n_experts = 2, config.max_tokens = 2;
  const auto f32 = moecclFloat32;
  const std::vector<std::pair<const char*, moecclResult_t>> refused = {
      {"AllReduce", moecclAllReduce(x, y, 4, f32, moecclSum, f.comm, nullptr)},
      {"AllReduce on a stream", moecclAllReduce(x, y, 4, f32, moecclSum, f.comm, f.stream)},
      {"Send", moecclSend(x, 4, f32, 0, f.comm, nullptr)},
      {"CommFinalize", moecclCommFinalize(f.comm)},
      {"CommAbort", moecclCommAbort(f.comm)},
      {"CommGetAsyncError", moecclCommGetAsyncError(f.comm, &state)},
      {"CommCount", moecclCommCount(f.comm, &n)},
      {"CommMemoryUsage", moecclCommMemoryUsage(f.comm, &bytes)},
      {"CommSplit", moecclCommSplit(f.comm, 0, 0, &part, nullptr)},
      {"CommRegister", moecclCommRegister(f.comm, x, 4, &registration)},
      {"CommDeregister", moecclCommDeregister(f.comm, f.registration)},
      {"RedOpCreatePreMulSum", moecclRedOpCreatePreMulSum(&op, x, f32, f.comm)},
      {"PlanForce", moecclPlanForce(f.comm, moecclOpAllReduce, "ring")},
      {"StreamSynchronize", moecclStreamSynchronize(f.stream)},
      {"MoeCreate", moecclMoeCreate(&layer, f.comm, &config)},
      {"RoutingCreate", moecclRoutingCreate(&routing, f.moe, choices, nullptr, 2)},
      {"RoutingUpdate", moecclRoutingUpdate(f.routing, choices, nullptr, 2)},
      {"RoutingGetInfo", moecclRoutingGetInfo(f.routing, &info)},
      {"Dispatch", moecclDispatch(f.routing, x, y, nullptr)},
      {"Combine", moecclCombine(f.routing, x, y, f.stream)},
      {"HybridGetInfo", moecclHybridGetInfo(f.hybrid, &hybrid)},
      {"HybridGather", moecclHybridGather(f.hybrid, x, y, 4, nullptr)},
      {"MigrationSend", moecclMigrationSend(f.migration, 0, x, nullptr, nullptr)},
      {"MigrationWait", moecclMigrationWait(f.migration, 0, nullptr, y, &epoch)},
      {"MigrationTest", moecclMigrationTest(f.migration, 0, &n)},
      {"MigrationBeginInto", moecclMigrationBeginInto(f.migration, 0, nullptr, y)},
      {"MigrationWaitExpert", moecclMigrationWaitExpert(f.migration, 0, 0)},
      {"MigrationSendFused", moecclMigrationSendFused(f.migration, 0, x, nullptr, nullptr, nullptr, nullptr)},
      {"MigrationWaitEncoded", moecclMigrationWaitEncoded(f.migration, 0, nullptr, &epoch)},
      {"MigrationUseExpert", moecclMigrationUseExpert(f.migration, 0, 0, nullptr)},
      {"GradientReturnReduce", moecclGradientReturnReduce(f.gradients, 0, x, y, nullptr)},
      {"GradientReturnReset", moecclGradientReturnReset(f.gradients, 0)},
      {"ReplaceRows", moecclReplaceRows(f.replacement, &bytes)},
      {"ReplaceBegin", moecclReplaceBegin(f.replacement, f.routing, nullptr, nullptr)},
      {"SampleSolverFetch", moecclSampleSolverFetch(f.solver, -1, nullptr, nullptr, nullptr)},
  };
  for (const auto& [name, code] : refused)
    if (code != moecclInvalidUsage) return std::string(name) + " gives " + moecclGetErrorString(code);
  const std::string sentence = moecclGetLastError(f.comm);
  if (sentence.find("forked from") == std::string::npos) return "the sentence is \"" + sentence + "\"";
  const std::vector<std::pair<const char*, moecclResult_t>> forgotten = {
      {"ReplaceDestroy", moecclReplaceDestroy(f.replacement)},
      {"GradientReturnDestroy", moecclGradientReturnDestroy(f.gradients)},
      {"MigrationDestroy", moecclMigrationDestroy(f.migration)},
      {"HybridDestroy", moecclHybridDestroy(f.hybrid)},
      {"RoutingDestroy", moecclRoutingDestroy(f.routing)},
      {"MoeDestroy", moecclMoeDestroy(f.moe)},
      {"SampleSolverDestroy", moecclSampleSolverDestroy(f.solver)},
      {"StreamDestroy", moecclStreamDestroy(f.stream)},
      {"CommDestroy", moecclCommDestroy(f.comm)},
      {"MemFree", moecclMemFree(f.heap)},
  };
  for (const auto& [name, code] : forgotten)
    if (code != moecclSuccess) return std::string(name) + " gives " + moecclGetErrorString(code);
  if (moecclCommDestroy(f.comm) != moecclInvalidArgument) return "CommDestroy succeeds twice";
  return "";
}

// The parent's stream has an operation that waits for its peer. The child must not wait for it.
TEST(ApiForks, AChildNeitherUsesNorHurtsWhatItsParentMade) {
  Meeting forked;
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    moecclComm_t alone = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, rank, 0, &alone, nullptr));
    float in = 1, out = 0;
    if (rank == 1) {
      EXPECT_TRUE(forked.wait_for(1));
      MOECCL_EXPECT_OK(moecclAllReduce(&in, &out, 1, moecclFloat32, moecclSum, comm, nullptr));
      MOECCL_EXPECT_OK(moecclCommDestroy(alone));
      return;
    }
    Family f;
    f.comm = alone;
    make(f);
    if (HasFatalFailure()) return;
    moecclStream_t busy = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&busy));
    MOECCL_ASSERT_OK(moecclAllReduce(&in, &out, 1, moecclFloat32, moecclSum, comm, busy));
    MOECCL_ASSERT_OK(moecclGroupStart());
    float grouped = 0;
    MOECCL_EXPECT_OK(moecclAllReduce(&in, &grouped, 1, moecclFloat32, moecclSum, alone, nullptr));
    expect_in_child([&]() -> std::string {
      if (moecclGroupEnd() != moecclInvalidUsage || grouped != 0) return "the parent's group was issued";
      if (const std::string wrong = use_as_child(f); !wrong.empty()) return wrong;
      if (moecclStreamSynchronize(busy) != moecclInvalidUsage) return "StreamSynchronize of a busy stream";
      if (moecclCommFinalize(comm) != moecclInvalidUsage) return "CommFinalize of a busy communicator";
      if (moecclAllReduce(&in, &out, 1, moecclFloat32, moecclSum, comm, nullptr) != moecclInvalidUsage)
        return "AllReduce on a busy communicator";
      if (moecclStreamDestroy(busy) != moecclSuccess) return "StreamDestroy of a busy stream";
      return moecclCommDestroy(comm) == moecclSuccess ? "" : "CommDestroy of a busy communicator";
    });
    MOECCL_EXPECT_OK(moecclGroupEnd());
    EXPECT_EQ(grouped, 1.0f);
    forked.arrive();
    MOECCL_EXPECT_OK(moecclStreamSynchronize(busy));
    EXPECT_EQ(out, 2.0f);
    for (int i = 0; i < 4096; ++i)
      ASSERT_EQ(static_cast<char*>(f.heap)[i], 0x5a) << "the child freed the parent's memory";
    MOECCL_EXPECT_OK(moecclStreamDestroy(busy));
    destroy(f);
    MOECCL_EXPECT_OK(moecclCommDestroy(alone));
  });
}

std::string work_as_child(const void* parents_heap) {
  constexpr size_t kCount = 70'000;
  moecclComm_t comms[2] = {};
  moecclStream_t stream = nullptr;
  void* heap[2] = {};
  const size_t bytes = kCount * sizeof(float);
  if (moecclCommInitAll(comms, 2, nullptr) || moecclStreamCreate(&stream)) return moecclGetLastError(nullptr);
  for (void*& h : heap) {
    if (moecclMemAlloc(&h, bytes)) return moecclGetLastError(nullptr);
    if (h == parents_heap) return "MemAlloc gives the parent's memory";
    for (size_t i = 0; i < kCount; ++i) static_cast<float*>(h)[i] = 1;
  }
  std::vector<float> out[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  for (const moecclStream_t on : {static_cast<moecclStream_t>(nullptr), stream}) {
    if (moecclGroupStart()) return "GroupStart";
    for (size_t r = 0; r < 2; ++r)
      if (moecclAllReduce(heap[r], out[r].data(), kCount, moecclFloat32, moecclSum, comms[r], on))
        return moecclGetLastError(comms[r]);
    if (moecclGroupEnd() || moecclStreamSynchronize(stream)) return moecclGetLastError(nullptr);
    if (out[0][kCount - 1] != 2 || out[1][0] != 2) return "a wrong sum";
  }
  for (void* h : heap)
    if (moecclMemFree(h)) return moecclGetLastError(nullptr);
  if (moecclStreamDestroy(stream) || moecclCommDestroy(comms[0]) || moecclCommDestroy(comms[1]))
    return moecclGetLastError(nullptr);
  return "";
}

TEST(ApiForks, AChildMakesItsOwn) {
  run_ranks(1, [](int, moecclComm_t comm) {
    void* heap = nullptr;
    MOECCL_ASSERT_OK(moecclMemAlloc(&heap, 1 << 20));
    memset(heap, 0x5a, 1 << 20);
    expect_in_child([&] {
      std::string wrong = work_as_child(heap);
      // Also a grandchild, of a parent that has objects of both kinds.
      if (wrong.empty()) expect_in_child([&] { return work_as_child(heap); });
      return ::testing::Test::HasFailure() ? "its own child failed" : wrong;
    });
    for (int i = 0; i < 1 << 20; ++i) ASSERT_EQ(static_cast<char*>(heap)[i], 0x5a);
    MOECCL_EXPECT_OK(moecclMemFree(heap));
    float value = 3;
    MOECCL_EXPECT_OK(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr));
  });
}

// One of two ranks that ends by exit() while its stream works on heap memory of both processes.
// Rank 0 makes the id: a thread of the parent that serves it could hold a lock of the address sanitizer during the
// fork.
struct SharedId {
  std::atomic<bool> made{false};
  moecclUniqueId id{};
};
int end_amid_operations(int rank, SharedId& shared, int delay_us) {
  if (rank == 0) {
    if (moecclGetUniqueId(&shared.id)) return 49;
    shared.made = true;
  }
  while (!shared.made) usleep(1000);
  const moecclUniqueId& id = shared.id;
  moecclComm_t comm = nullptr;
  moecclStream_t stream = nullptr;
  void *in = nullptr, *out = nullptr;
  constexpr size_t kCount = 1 << 20;
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.timeout_ms = 5000;
  if (moecclCommInitRankConfig(&comm, 2, id, rank, &config) || moecclStreamCreate(&stream)) return 50;
  if (moecclMemAlloc(&in, kCount * 4) || moecclMemAlloc(&out, kCount * 4)) return 51;
  if (moecclAllReduce(in, out, kCount, moecclFloat32, moecclSum, comm, nullptr)) return 52;
  for (int i = 0; i < 100; ++i)
    if (moecclAllReduce(in, out, kCount, moecclFloat32, moecclSum, comm, stream)) return 53;
  usleep(static_cast<useconds_t>(delay_us));
  return 0;
}

TEST(ApiExit, AProgramMayEndAmidOperations) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "this sanitizer cannot start threads in a child of a process with threads";
#endif
  run_ranks(1,
            [](int, moecclComm_t) {
              for (int trial = 0; trial < scaled(12); ++trial) {
                Shared<SharedId> shared;
                pid_t ranks[2];
                for (int r = 0; r < 2; ++r) {
                  ranks[r] = fork();
                  if (ranks[r] == 0) {
                    alarm(static_cast<unsigned>(patient_ms(20'000) / 1000));
                    std::exit(end_amid_operations(r, *shared, trial * 1700 % 20'000));
                  }
                }
                for (const pid_t rank : ranks) {
                  int status = 0;
                  ASSERT_EQ(waitpid(rank, &status, 0), rank);
                  EXPECT_FALSE(WIFSIGNALED(status)) << "signal " << WTERMSIG(status) << " in trial " << trial;
                  // A rank may find that the other has ended before its own calls were made.
                  EXPECT_TRUE(!WIFEXITED(status) || WEXITSTATUS(status) == 0 || WEXITSTATUS(status) >= 52)
                      << WEXITSTATUS(status) << " in trial " << trial;
                }
              }
            },
            {.init = false});
}

}  // namespace
}  // namespace moeccl::testing
