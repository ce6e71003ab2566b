// SPDX-License-Identifier: Apache-2.0
// Where ranks come from: a launcher's environment, forked processes and threads, in any mix.
#ifndef PERF_COMMON_JOB_H_
#define PERF_COMMON_JOB_H_

#include <moeccl/comm.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "perf/common/grouping.h"

namespace perf {

class Team;

// kCuda: each rank joins with its own device, or shares one.
enum class Memory { kHeap, kMalloc, kCuda };

// Returns the name that --mem takes.
inline const char* memory_name(Memory memory) {
  return memory == Memory::kCuda ? "cuda" : memory == Memory::kHeap ? "heap" : "malloc";
}

struct JobOptions {
  int threads = 1;     // per process
  int per_thread = 1;  // ranks that one thread drives
  int procs = 0;       // processes to fork; 0: the launcher's, or one
  bool parallel_init = false;
  int timeout_s = 0;
  std::string topology;
  bool pace = false;
  bool deterministic = false;
  Grouping grouping;  // each group gets communicators of its own
  Memory memory = Memory::kHeap;
  bool on_cuda() const { return memory == Memory::kCuda; }
};
// More processes take a host down before they are ranks.
inline constexpr int kMostProcs = 1024;
// Fails if there are more ranks than a communicator has. n_procs: processes of the job.
void check_ranks(const JobOptions& job, int n_procs);

// This process's part of the job.
class Job {
 public:
  // Forks if the options ask for it, so call it before anything starts a thread. The parent does not return: it exits
  // when its children have ended, with status 1 if one of them failed.
  explicit Job(const JobOptions& options);

  int n_ranks() const { return n_procs_ * local_ranks(); }
  int local_ranks() const { return options_.threads * options_.per_thread; }
  int first_rank() const { return proc_ * local_ranks(); }
  int n_procs() const { return n_procs_; }
  const JobOptions& options() const { return options_; }
  // True in the process of rank 0, which is the only one that prints.
  bool leads() const { return proc_ == 0; }

  // Joins all ranks and runs body(thread, its ranks) on each thread, thread 0 on the caller's. apart: as Team has it.
  void run(bool apart, const std::function<void(int thread, const Team& team)>& body);
  // Does the same with a body that returns a T, and returns thread 0's.
  template <class T, class Body>
  T run(bool apart, Body&& body) {
    T first{};
    run(apart, [&](int thread, const Team& team) {
      T own = body(thread, team);
      if (thread == 0) first = std::move(own);
    });
    return first;
  }

  // Returns the configuration of the ranks, which borrows from this object.
  moecclConfig_t config() const;

 private:
  enum class Source { kAlone, kForked, kLauncher };

  moecclUniqueId agree_on_id();
  moecclUniqueId id_from_launcher();
  std::vector<moecclComm_t> join(const moecclUniqueId& id, int first, int count);
  std::vector<moecclComm_t> join_all();

  JobOptions options_;
  Source source_ = Source::kAlone;
  int n_procs_ = 1, proc_ = 0;
  struct SharedId* shared_ = nullptr;  // with forked processes
};

// Returns whether this process is the first of a launcher's job, or has no launcher.
bool leads_launch();

}  // namespace perf

#endif  // PERF_COMMON_JOB_H_
