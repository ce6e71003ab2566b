// SPDX-License-Identifier: Apache-2.0
// One-sided puts and signals between ranks of a host (ncclPutSignal, ncclSignal, ncclWaitSignal). The bytes go straight
// into the peer's window, by memcpy within a process and by process_vm_writev between two. The signal is a counter in
// memory that the ranks share. No other thread has to help, and ranks that never put cost nothing. Where the system
// forbids such writes (kernel.yama.ptrace_scope, a container's seccomp), and for windows on a device, the bytes lie in
// an in-memory file until the peer fetches them, which its process does whenever one of its ranks waits for a signal or
// for room.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "shim/nccl/abi.h"

namespace moeccl::shim {

// Where a rank can be reached. Ranks tell each other when the communicator is made. Fixed layout.
struct Door {
  uint64_t host = 0;   // equal where one rank can see the other's processes
  uint64_t nonce = 0;  // also in the rank's board and at `self`: proves that it is the rank that sent this
  uint64_t self = 0;   // address in the rank's process
  int32_t pid = 0;
  int32_t file = -1;  // descriptor of its board; -1: it has none
};

class Rma {
 public:
  static constexpr int kSignals = 64, kContexts = 16;
  static constexpr uint32_t kWindows = 1024;  // at a time
  static constexpr uint32_t kNoWindow = UINT32_MAX;
  static constexpr uint64_t kParcels = 256;  // puts that a peer has not fetched, where it has to

  Rma() = default;
  ~Rma();
  Rma(const Rma&) = delete;
  Rma& operator=(const Rma&) = delete;

  // Makes this rank's board. Without memory for it the rank cannot be reached, and its door says so.
  // `device` is the ordinal of its windows' device; -1 without one.
  Door open(int n_ranks, int device);
  // Takes the doors of all ranks, after they have met.
  void meet(int rank, std::vector<Door> doors);
  bool reaches_all() const;

  // Returns the window's number, or kNoWindow if there are kWindows already. The n-th window of a rank belongs to the
  // n-th of every other.
  // Counts a window that this rank could not register: the next one belongs to the next one of the other ranks.
  void skip_window();
  uint32_t add_window(void* buffer, size_t bytes, bool on_device);
  void remove_window(uint32_t number);

  struct Put {
    const char* function = "";
    int peer = 0, signal = 0, context = 0;
    const void* bytes = nullptr;
    size_t n_bytes = 0;
    uint32_t window = kNoWindow;  // kNoWindow: the signal alone
    size_t offset = 0;
  };
  // Ends a wait early when it returns a failure; *why then says what has become of the communicator.
  using GivenUp = std::function<ncclResult_t(std::string* why)>;
  ncclResult_t put(const Put& put, const GivenUp& given_up);
  ncclResult_t wait(std::span<const ncclWaitSignalDesc_t> signals, const GivenUp& given_up);

 private:
  struct Board;
  struct From;  // the part of a board that belongs to one rank
  struct Peer {
    Door door;
    Board* board = nullptr;            // mapped at the first use
    int process = -1;                  // pidfd: readable when it has ended
    std::atomic<bool> fetches{false};  // it cannot be written to
    std::vector<int> files;            // parcels that it has not fetched, oldest first
    uint64_t closed = 0;               // parcels whose files are closed
  };

  ncclResult_t reach(const char* function, int rank, Peer** peer);
  ncclResult_t find_target(const Put& put, Peer& peer, const GivenUp& given_up, uint64_t* address, bool* on_device);
  ncclResult_t write(const Put& put, Peer& peer, uint64_t address);
  ncclResult_t leave(const Put& put, Peer& peer, const GivenUp& given_up);
  ncclResult_t post(const Put& put, Peer& peer, bool* posted);
  ncclResult_t take(uint64_t number, int from, std::string* text);
  ncclResult_t fetch(int from, bool drops);
  static void fetch_for_others();
  bool has_left(int from);
  ncclResult_t wait_for(const ncclWaitSignalDesc_t& wanted, const GivenUp& given_up);
  static From& of(Board& board, int rank);

  const pid_t process_ = getpid();  // a forked child must not speak for it
  int rank_ = 0, n_ranks_ = 0, device_ = -1, file_ = -1;
  uint64_t nonce_ = 0;
  size_t board_bytes_ = 0;
  Board* board_ = nullptr;
  std::mutex mutex_;  // guards the members below, and this rank's changes to its windows
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::pair<int, int>, uint64_t> taken_;  // signals that were waited for, by rank and place of the counter
};

}  // namespace moeccl::shim
