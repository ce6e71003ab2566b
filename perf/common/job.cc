// SPDX-License-Identifier: Apache-2.0
#include "perf/common/job.h"

#include <moeccl/collectives.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "perf/common/children.h"
#include "perf/common/fail.h"
#include "perf/common/gpu.h"
#include "perf/common/team.h"

namespace perf {

// Lies in memory that forked processes inherit.
struct SharedId {
  std::atomic<bool> ready;  // released after id is written, acquired before it is read
  moecclUniqueId id;
};

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kIdDeadline = std::chrono::seconds(60);

// As moecclCommInitEnv() reads them, in its order. It also refuses launchers that contradict each other.
struct Launcher {
  const char* rank;
  const char* size;
};
constexpr Launcher kLaunchers[] = {{"RANK", "WORLD_SIZE"},
                                   {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                   {"PMI_RANK", "PMI_SIZE"},
                                   {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}};  // not set in a batch script

// Returns -1 for a text that is no whole number from 0 on.
int whole_number_of(const char* text) {
  int number = -1;
  const char* const end = text + std::strlen(text);
  const auto [last, code] = std::from_chars(text, end, number);
  return code == std::errc() && last == end ? number : -1;
}

bool find_launcher(int& proc, int& n_procs) {
  for (const Launcher& launcher : kLaunchers) {
    const char* rank = std::getenv(launcher.rank);
    const char* size = std::getenv(launcher.size);
    if (rank == nullptr || size == nullptr) continue;
    proc = whole_number_of(rank);
    n_procs = whole_number_of(size);
    if (n_procs < 1 || proc < 0 || proc >= n_procs)
      fail(std::string("the launcher's ") + launcher.rank + "=" + rank + " and " + launcher.size + "=" + size +
           " are not a rank and a number of ranks");
    return true;
  }
  return false;
}

SharedId* map_shared_id() {
  void* memory = mmap(nullptr, sizeof(SharedId), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail(std::string("no memory shared between forked ranks: ") + std::strerror(errno));
  return new (memory) SharedId{};
}

// Returns the number of the process in each child. The parent does not return: it ends with the children's result.
int fork_processes(int n) {
  Children children;
  const int number = fork_children(n, children);
  if (number >= 0) return number;
  const bool good = wait_for(children);
  if (!children.failure.empty()) fail(children.failure);
  _exit(good ? 0 : 1);
}

}  // namespace

bool leads_launch() {
  int proc = 0, n_procs = 1;
  return !find_launcher(proc, n_procs) || proc == 0;
}

void check_ranks(const JobOptions& job, int n_procs) {
  constexpr int64_t kMostRanks = 65535;
  const int64_t local = int64_t{job.threads} * job.per_thread;
  if (local <= kMostRanks && local * n_procs <= kMostRanks) return;
  fail(std::to_string(n_procs) + " (processes) x " + std::to_string(job.threads) + " (threads) x " +
       std::to_string(job.per_thread) + " (-g) are too many: a communicator has at most " + std::to_string(kMostRanks) +
       " ranks");
}

Job::Job(const JobOptions& options) : options_(options) {
  if (options_.procs > 0) {
    source_ = Source::kForked;
    n_procs_ = options_.procs;
  } else if (find_launcher(proc_, n_procs_)) {
    source_ = Source::kLauncher;
  }
  check_ranks(options_, n_procs_);
  if (source_ != Source::kForked) return;
  shared_ = map_shared_id();
  proc_ = fork_processes(n_procs_);
}

moecclConfig_t Job::config() const {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.timeout_ms = options_.timeout_s * 1000;
  config.deterministic = options_.deterministic;
  config.pace = options_.pace;
  config.topology = options_.topology.empty() ? nullptr : options_.topology.c_str();
  config.name = "perf";
  return config;
}

// With several ranks per process the launcher's environment is not enough, so the processes broadcast an id.
moecclUniqueId Job::id_from_launcher() {
  moecclUniqueId id = {};
  moecclComm_t meeting = nullptr;
  check(moecclCommInitEnv(&meeting, nullptr), "moecclCommInitEnv");
  if (proc_ == 0) check(moecclGetUniqueId(&id), "moecclGetUniqueId");
  check(moecclBroadcast(&id, &id, sizeof id, moecclUint8, 0, meeting, nullptr), "moecclBroadcast", proc_, meeting);
  check(moecclCommDestroy(meeting), "moecclCommDestroy");
  return id;
}

moecclUniqueId Job::agree_on_id() {
  if (source_ == Source::kLauncher) return id_from_launcher();
  moecclUniqueId id = {};
  if (proc_ == 0) {
    check(moecclGetUniqueId(&id), "moecclGetUniqueId");
    if (shared_ != nullptr) {
      shared_->id = id;
      shared_->ready.store(true, std::memory_order_release);  // acquired below, in the other processes
    }
    return id;
  }
  const auto deadline = Clock::now() + kIdDeadline;
  while (!shared_->ready.load(std::memory_order_acquire)) {
    if (Clock::now() > deadline) fail("process 0 gave no unique id in 60 s");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return shared_->id;
}

std::vector<moecclComm_t> Job::join(const moecclUniqueId& id, int first, int count) {
  std::vector<moecclComm_t> comms(static_cast<size_t>(count));
  const moecclConfig_t settings = config();
  if (count > 1) check(moecclGroupStart(), "moecclGroupStart");
  for (int i = 0; i < count; i++) {
    if (options_.on_cuda()) gpu::use(first + i);
    check(moecclCommInitRankConfig(&comms[static_cast<size_t>(i)], n_ranks(), id, first + i, &settings),
          "moecclCommInitRankConfig", first + i);
  }
  if (count > 1) check(moecclGroupEnd(), "moecclGroupEnd");
  return comms;
}

std::vector<moecclComm_t> Job::join_all() {
  std::vector<moecclComm_t> comms(static_cast<size_t>(local_ranks()));
  const moecclConfig_t settings = config();
  if (source_ == Source::kAlone && !options_.on_cuda()) {
    check(moecclCommInitAll(comms.data(), local_ranks(), &settings), "moecclCommInitAll");
  } else if (source_ == Source::kLauncher && local_ranks() == 1) {
    if (options_.on_cuda()) gpu::use(proc_);
    check(moecclCommInitEnv(&comms[0], &settings), "moecclCommInitEnv", proc_);
  } else {
    comms = join(agree_on_id(), first_rank(), local_ranks());
  }
  return comms;
}

void Job::run(bool apart, const std::function<void(int thread, const Team& team)>& body) {
  const bool together = !options_.parallel_init || local_ranks() == 1;
  const std::vector<moecclComm_t> comms = together ? join_all() : std::vector<moecclComm_t>();
  const moecclUniqueId id = together ? moecclUniqueId{} : agree_on_id();
  const auto run_one = [&](int thread) {
    const int first = thread * options_.per_thread;
    std::vector<moecclComm_t> mine =
        together ? std::vector<moecclComm_t>(comms.begin() + first, comms.begin() + first + options_.per_thread)
                 : join(id, first_rank() + first, options_.per_thread);
    body(thread, Team(std::move(mine), first_rank() + first, apart, options_));
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < options_.threads; t++) threads.emplace_back(run_one, t);
  run_one(0);
  for (std::thread& t : threads) t.join();
}

}  // namespace perf
