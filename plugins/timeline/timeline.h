// SPDX-License-Identifier: Apache-2.0
// The newest operations of a process, and the trace that shows them: Chrome's JSON, which Perfetto opens.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plugins/profiler_entry.h"

namespace moeccl::timeline {

// A context of the plugin.
struct Rank : plugins::Member {
  // The clock of kernels and this host's differ by about the least time that the news of an event takes, over all
  // events so far.
  int64_t host_minus_kernel_ns = std::numeric_limits<int64_t>::max();
};

struct Operation {
  std::shared_ptr<Rank> rank;
  // NCCL and MoECCL pass texts that stay.
  const char *func = "", *type = "", *algorithm = "", *protocol = "";
  uint64_t count = 0, sequence = 0;
  int64_t began_ns = 0, ended_ns = 0;  // of the host's call, since 1970; ended_ns 0: it has not returned
  // The kernels' earliest beginning and latest end by their clock; 0: not told.
  int64_t kernel_began_ns = 0, kernel_ended_ns = 0;
  int with = 0;  // root or peer
  uint8_t n_channels = 0;
  bool is_message = false;
};

// Thread-safe.
class Timeline {
 public:
  // `capacity`: how many operations are kept.
  Timeline(std::string path, size_t capacity) : path_(std::move(path)), operations_(capacity) {}

  std::shared_ptr<Rank> join(Rank rank);
  // Writes the trace when the last rank of the process leaves. Returns why it could not be written, or "".
  std::string leave();
  // Writes the trace if something has happened since it was written.
  std::string write();

  // Return handles of events, which are no pointers: an operation may be forgotten before its events end.
  void* begin(const std::shared_ptr<Rank>& rank, bool is_message, const profiler::abi::Descriptor& event);
  void* begin_kernel(void* parent, const profiler::abi::KernelCh& event);
  void end_kernel(void* kernel, int64_t kernel_ns);
  void end(void* event);

 private:
  Operation* find(void* handle);

  std::string path_;
  bool is_made_ = false;  // the file, by this process
  std::mutex mutex_;
  std::vector<Operation> operations_;  // a ring: operation i is at i % size
  uint64_t count_ = 0;                 // operations so far
  uint64_t first_group_ = 0;
  std::vector<int> first_ranks_;  // of this process in the first communicator
  int members_ = 0;
  bool changed_ = false;
};

// Writes the trace of `operations`, in the order in which they began. `older`: how many have been forgotten. The caller
// asks ferror().
void write_trace(const std::vector<const Operation*>& operations, const std::string& process, uint64_t older,
                 std::FILE* file);

}  // namespace moeccl::timeline
