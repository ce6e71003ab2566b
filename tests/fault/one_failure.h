// SPDX-License-Identifier: Apache-2.0
// Runs two ranks through init, operations, a layer, a split and destroy while any one of the intercepted calls fails.
// The program that includes this defines which calls are intercepted, and asks fails() in each.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {

inline std::atomic<long> n_calls{0}, failing{0};  // the number of the call that fails, from 1; 0: none
inline std::atomic<bool> counts{false};
inline bool survives = false;  // whether all ranks must succeed nevertheless

inline bool fails() {
  if (!counts.load(std::memory_order_relaxed)) return false;
  return ++n_calls == failing.load(std::memory_order_relaxed);
}

inline constexpr int kRanks = 2;
inline constexpr size_t kMost = 20'000;  // floats, more than one staging chunk

struct Buffers {
  std::vector<float> in, out, rows;
  std::vector<int32_t> choices;
};

enum Verdict : int { kGood, kWrongData, kInternalError, kFailed };

// The calls of one rank. The first failure ends them.
struct Rank {
  int rank;
  Buffers& b;
  moecclResult_t first = moecclSuccess;
  bool wrong = false;

  Verdict verdict() const {
    if (wrong) return kWrongData;
    if (first == moecclInternalError) return kInternalError;
    return survives && first != moecclSuccess ? kFailed : kGood;
  }

  bool ok(moecclResult_t result) {
    if (first == moecclSuccess) first = result;
    return result == moecclSuccess;
  }

  bool sum(moecclComm_t comm, size_t count, moecclStream_t stream) {
    if (!ok(moecclAllReduce(b.in.data(), b.out.data(), count, moecclFloat32, moecclSum, comm, stream))) return false;
    if (stream != nullptr && !ok(moecclStreamSynchronize(stream))) return false;
    wrong =
        wrong || std::any_of(b.out.begin(), b.out.begin() + static_cast<long>(count), [](float f) { return f != 3; });
    return true;
  }

  bool on_a_stream(moecclComm_t comm) {
    moecclStream_t stream = nullptr;
    if (!ok(moecclStreamCreate(&stream))) return false;
    const bool done = sum(comm, 300, stream) &&
                      ok(moecclBroadcast(b.in.data(), b.out.data(), 3000, moecclFloat32, 0, comm, stream)) &&
                      ok(moecclStreamSynchronize(stream));
    return ok(moecclStreamDestroy(stream)) && done;
  }

  bool messages(moecclComm_t comm) {
    moecclGroupStart();
    (void)ok(moecclSend(b.in.data(), 100, moecclFloat32, 1 - rank, comm, nullptr));
    (void)ok(moecclRecv(b.out.data(), 100, moecclFloat32, 1 - rank, comm, nullptr));
    return ok(moecclGroupEnd()) && first == moecclSuccess;
  }

  bool layer(moecclComm_t comm) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 256;
    config.type = moecclFloat32;
    config.top_k = 2;
    config.n_experts = 8;
    config.max_tokens = 16;
    moecclMoe_t moe = nullptr;
    if (!ok(moecclMoeCreate(&moe, comm, &config))) return false;
    moecclRouting_t routing = nullptr;
    moecclRoutingInfo_t info{};
    info.size = sizeof info;
    bool done = ok(moecclRoutingCreate(&routing, moe, b.choices.data(), nullptr, 16));
    done = done && ok(moecclRoutingGetInfo(routing, &info)) && info.n_rows * 64 <= b.rows.size();
    done = done && ok(moecclDispatch(routing, b.in.data(), b.rows.data(), nullptr)) &&
           ok(moecclCombine(routing, b.rows.data(), b.out.data(), nullptr));
    if (routing != nullptr) (void)ok(moecclRoutingDestroy(routing));
    (void)ok(moecclMoeDestroy(moe));
    return done;
  }

  bool part(moecclComm_t comm, const moecclConfig_t& config) {
    moecclComm_t all = nullptr;
    if (!ok(moecclCommSplit(comm, 0, rank, &all, &config))) return false;
    const bool done = sum(all, 100, nullptr) && on_two(comm, all);
    return ok(moecclCommDestroy(all)) && done;
  }

  // Calls whose communicator is another one than that of the object that they are given.
  bool on_two(moecclComm_t comm, moecclComm_t other) {
    moecclHybridConfig_t domains = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t sizes[2] = {2, 1};  // ranks on two hosts have a level of hosts above their own
    domains.n_experts = 4, domains.n_levels = getenv("MOECCL_HOST_ID") != nullptr ? 2 : 1, domains.domain = sizes;
    moecclHybrid_t hybrid = nullptr;
    if (!ok(moecclHybridCreate(&hybrid, comm, &domains))) return false;
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 256, config.type = moecclFloat32, config.top_k = 2, config.max_tokens = 16;
    moecclMoe_t held = nullptr, swapped = nullptr;
    moecclGradientReturn_t gradients = nullptr;
    moecclMigration_t migration = nullptr;
    moecclExpertSwap_t swap = nullptr;
    moecclGradientReturnConfig_t of_gradients = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    moecclMigrationConfig_t of_migration = MOECCL_MIGRATION_CONFIG_INIT;
    of_gradients.count = of_migration.count = 64;
    bool done = ok(moecclHybridMoeCreate(&held, hybrid, other, &config)) &&
                ok(moecclGradientReturnCreate(&gradients, hybrid, other, &of_gradients)) &&
                ok(moecclMigrationCreate(&migration, hybrid, other, &of_migration));
    moecclExpertSwapConfig_t often = MOECCL_EXPERT_SWAP_CONFIG_INIT;
    often.interval = 1, often.min_gain = -1;
    config.n_experts = 4;
    const moecclSwapTensor_t tensors[2] = {{b.rows.data(), 512, 0, 0}, {b.rows.data() + 512, 512, 1, 0}};
    done = done && ok(moecclMoeCreate(&swapped, comm, &config)) && ok(moecclExpertSwapCreate(&swap, comm, &often)) &&
           ok(moecclExpertSwapAttach(swap, swapped, tensors, 2, nullptr, nullptr)) && ok(moecclExpertSwapBegin(swap)) &&
           ok(moecclExpertSwapFinish(swap, nullptr));
    if (swap != nullptr) (void)ok(moecclExpertSwapDestroy(swap));
    if (migration != nullptr) (void)ok(moecclMigrationDestroy(migration));
    if (gradients != nullptr) (void)ok(moecclGradientReturnDestroy(gradients));
    if (held != nullptr) (void)ok(moecclMoeDestroy(held));
    if (swapped != nullptr) (void)ok(moecclMoeDestroy(swapped));
    (void)ok(moecclHybridDestroy(hybrid));
    return done;
  }

  void run(const moecclUniqueId& id) {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.timeout_ms = 60'000;  // longer than the test waits: a peer that is not told counts as a hang
    config.init_timeout_ms = 1'000;
    config.staging_bytes = 1 << 16;
    moecclComm_t comm = nullptr;
    if (!ok(moecclCommInitRankConfig(&comm, kRanks, id, rank, &config))) return;
    (void)(sum(comm, 1, nullptr) && sum(comm, kMost, nullptr) && on_a_stream(comm) && messages(comm) && layer(comm) &&
           part(comm, config));
    (void)ok(moecclCommDestroy(comm));
  }
};

inline Buffers buffers_of(int rank) {
  Buffers b;
  b.in.assign(kMost, static_cast<float>(rank + 1));
  b.out.resize(2 * kMost);
  b.rows.resize(64 * 64);
  for (int i = 0; i < 32; ++i) b.choices.push_back((i * 3 + rank) % 8);
  return b;
}

// Runs in a separate process, with the nth intercepted call failing, or counts the calls (nth is 0). Returns 0 when all
// is well.
inline Verdict scenario(long nth, long* counted) {
  Buffers buffers[kRanks] = {buffers_of(0), buffers_of(1)};
  Rank ranks[kRanks] = {{0, buffers[0]}, {1, buffers[1]}};
  moecclUniqueId id{};
  std::atomic<int> state{0};
  std::thread other([&] {  // created before any call fails, because failures must hit only the library
    state.wait(0);
    if (state == 1) ranks[1].run(id);
  });
  failing = nth;
  counts = true;
  const moecclResult_t made = moecclGetUniqueId(&id);
  state = made == moecclSuccess ? 1 : 2;
  state.notify_all();
  if (made == moecclSuccess) ranks[0].run(id);
  other.join();
  counts = false;
  *counted = n_calls;
  if (made != moecclSuccess) return made == moecclInternalError ? kInternalError : kGood;
  return ranks[0].verdict() != kGood ? ranks[0].verdict() : ranks[1].verdict();
}

// Runs the same over TCP: rank 1, whose call fails, is a process of another host.
inline Verdict between_hosts(long nth, long* counted) {
  setenv("MOECCL_SOCKET_ADDR", "127.0.0.1", 1);
  setenv("MOECCL_SOCKET_IFNAME", "lo", 1);
  struct Id {
    std::atomic<bool> made{false};
    moecclUniqueId id{};
  };
  Shared<Id> shared;
  const pid_t other = fork();  // before the library reads the environment
  const int rank = other == 0 ? 1 : 0;
  setenv("MOECCL_HOST_ID", rank == 0 ? "host-0" : "host-1", 1);
  Buffers buffers = buffers_of(rank);
  Rank mine{rank, buffers};
  if (other == 0) {
    alarm(static_cast<unsigned>(patient_ms(15'000) / 1000));
    while (!shared->made) usleep(1000);
    failing = nth;
    counts = true;
    mine.run(shared->id);
    counts = false;
    *counted = n_calls;
    _exit(mine.verdict());
  }
  if (moecclGetUniqueId(&shared->id) != moecclSuccess) return kInternalError;
  shared->made = true;
  mine.run(shared->id);
  int status = 0;
  while (waitpid(other, &status, 0) < 0 && errno == EINTR) continue;
  if (!WIFEXITED(status)) raise(WTERMSIG(status));
  return mine.verdict() != kGood ? mine.verdict() : static_cast<Verdict>(WEXITSTATUS(status));
}

using Scenario = Verdict (*)(long nth, long* counted);

// Returns the process's wait status.
inline int in_child(Scenario scenario, long nth, long* counted) {
  Shared<long> count;
  fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(static_cast<unsigned>(patient_ms(20'000) / 1000));
    (void)!freopen("/dev/null", "w", stderr);
    _exit(scenario(nth, &*count));
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  if (counted != nullptr) *counted = *count;
  return status;
}

// Fails at most `most` calls, spread over all. There must be more than `least` calls.
inline void fail_some(Scenario scenario, int most, const char* what, long least) {
  long n = 0;
  ASSERT_EQ(in_child(scenario, 0, &n), 0) << "without a failure";
  ASSERT_GT(n, least);
  const long samples = std::min<long>(n, scaled(most));
  std::mt19937_64 random(test_seed());
  for (long i = 0; i < samples; ++i) {
    // Takes one call from each of equally long stretches.
    const long first = n * i / samples + 1, next = n * (i + 1) / samples + 1;
    const long nth = first + static_cast<long>(random() % static_cast<uint64_t>(next - first));
    const int status = in_child(scenario, nth, nullptr);
    if (status == 0) continue;
    std::string how = "verdict " + std::to_string(WEXITSTATUS(status));
    if (WIFSIGNALED(status)) how = "ended by signal " + std::to_string(WTERMSIG(status));
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) how = "a rank hangs";
    ADD_FAILURE() << what << " " << nth << " of " << n << ": " << how;
  }
  printf("%ld calls failed of %ld, one in each run\n", samples, n);
}

}  // namespace moeccl::testing
