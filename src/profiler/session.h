// SPDX-License-Identifier: Apache-2.0
// NCCL's profiler plugins, as their host: the process's plugin, and one communicator's use of it. A plugin that
// misbehaves costs its user the profile, but never the job.
#pragma once

#include <memory>
#include <string>

#include "src/profiler/abi.h"

namespace moeccl::profiler {

// A rank of a communicator as a plugin sees it.
struct Member {
  uint64_t group = 0;  // the same on all ranks of the communicator, and unique to it
  std::string name;
  int rank = 0, n_ranks = 1, n_hosts = 1;
};

// Thread-safe: a communicator's executors for host memory and for CUDA memory share one.
class Session {
 public:
  // Calls the plugin's init. The first call in a process loads the plugin that MOECCL_PROFILER_PLUGIN names. Null:
  // there is none, or it cannot serve, which is logged as a warning if the variable names it. It cannot in a process
  // that was forked from one that has called this.
  static std::shared_ptr<Session> open(const Member& member);
  ~Session();  // finalize
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Returns the events of abi::Event that the plugin wants now, as far as its version has them. A plugin may change its
  // mask at any time.
  int wanted() const;
  // The parent of an operation is its call since v5, and its group before.
  bool has_calls() const;

  // Starts an event, whose fields must be set but for the rank. Returns the plugin's handle, which may be null.
  void* start(abi::Descriptor& event);
  // These do nothing for null.
  void stop(void* event);
  void record(void* event, int state, abi::KernelChArgs& args);

 private:
  explicit Session(const Member& member) : member_(member) {}

  const Member member_;  // plugins keep the pointer to its name
  void* context_ = nullptr;
};

}  // namespace moeccl::profiler
