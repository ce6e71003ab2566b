// SPDX-License-Identifier: Apache-2.0
// The flight recorder's memory. All communicators of a process write into anonymous shared files, so that another
// process can see what an unresponsive process is doing: /proc/PID/fd shows the files to their owner.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"
#include "src/driver/fork_page.h"

namespace moeccl::exec {

// Plain numbers and texts with the same layout in every process. A reader checks kMagic and `bytes`, and trusts
// nothing.
struct FlightRecord {
  uint64_t sequence = 0;  // 0: unused, or Send/Recv, which have none
  uint64_t count = 0;
  int64_t start = 0, end = 0;  // Ticks; `end` only of timed operations that have ended
  uint32_t root = 0;           // for Send/Recv: the peer
  uint8_t op = 0, type = 0, reduce = 0;
  enum class State : uint8_t { kRunning, kDone, kDoneUntimed, kFailed } state = State::kRunning;
  uint8_t has_plan = 0;
  char algorithm[23] = {};
};

// What one blocked task waits for.
struct FlightWait {
  static constexpr uint32_t kPeers = 32;
  int64_t since_ns = 0;   // now_ns()
  uint64_t sequence = 0;  // of the operation; 0: Send/Recv
  int32_t thread = 0;     // gettid()
  uint32_t awaits = 0;    // the only rank that can unblock it; ~0: not known
  uint32_t n_peers = 0;   // ranks that have not completed their part
  uint32_t peers[kPeers] = {};
  char text[216] = {};
};

struct FlightPage {
  static constexpr uint64_t kMagic = 0x3230'5448'4749'4c46u;  // "FLIGHT02"
  static constexpr uint32_t kRecords = 64, kWaits = 8;
  std::atomic<uint64_t> magic{0};  // 0: unused
  uint32_t bytes = 0;
  uint32_t rank = 0, n_ranks = 0;
  uint32_t on_cuda_memory = 0;
  uint64_t group = 0;  // the same on all ranks of a communicator, and unique to it
  char name[64] = {};
  int64_t failed_unix_ns = 0;  // 0: has not failed
  int32_t code = 0;
  uint32_t n_waits = 0;
  // The text of FlightSlot::note_hosts(): where it lies behind the pages, and its length; 0: there is none.
  uint32_t hosts_at = 0, hosts_bytes = 0;
  char failure[480] = {};
  uint64_t count = 0;  // number of records so far
  FlightWait waits[kWaits];
  std::array<FlightRecord, kRecords> records;
};

// A page of one of the process's files, or private memory where there is none; released on destruction.
class FlightSlot {
 public:
  FlightSlot();
  ~FlightSlot();
  FlightSlot(const FlightSlot&) = delete;
  FlightSlot& operator=(const FlightSlot&) = delete;
  // Stores which ranks are on which host, as moecclStatus shows it: [{"name", "host_id", "ranks": [[first, last],
  // ...]}, ...]. The text lies in the file beside the page, so that a page has the same size for any number of ranks.
  // The text is left out if memory, or the file's room for all texts, is full.
  void note_hosts(std::string_view json);
  FlightPage* operator->() const { return page_; }
  FlightPage& operator*() const { return *page_; }

 private:
  const driver::Birth birth_;
  FlightPage* page_;
  bool shared_;
};

// Copies `text`, cut to fit, and appends a zero byte.
template <size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  to[text.copy(to, N - 1)] = 0;
}

// Returns JSON that describes all communicators of a process on this host; pid 0 is this process.
// include/moeccl/status.h describes the contents.
// RemoteError: no such process, not allowed to look, or it has no communicator.
Result<std::string> flight_json(int pid);
// Writes this process's JSON to the file that MOECCL_DUMP names, if it names one. Failures are logged.
void dump_flight() noexcept;
// Logs a warning if the file that MOECCL_DUMP names could not be made now: once in a process, when its first
// communicator is made, because a job that fails hours later leaves nothing.
void check_dump() noexcept;
// "/tmp/job" -> "/tmp/job.HOST.PID.json"; if the name contains %h or %p, only these are replaced.
std::string dump_path(const std::string& named, const std::string& host, int pid);

}  // namespace moeccl::exec
