// SPDX-License-Identifier: Apache-2.0
// What the parts of Rma share.
#pragma once

#include "shim/nccl/rma.h"

namespace moeccl::shim {

// What one rank shares with the ranks of its host. It is zero at first, and followed by a From for each rank.
struct Rma::Board {
  // A place for a window, which the next one may take when it is gone. Its rank's windows are told apart by their
  // numbers.
  struct Window {
    std::atomic<uint64_t> name;  // its number + 1, 0: free; released when the other fields are set
    std::atomic<uint64_t> address, bytes;
    std::atomic<uint32_t> on_device;
  };
  // Returns the place of the window, nullptr if it is gone or has not come yet.
  Window* find(uint32_t number) { return named(uint64_t{number} + 1, number); }
  Window* free_place(uint32_t number) { return named(0, number); }
  uint64_t nonce;
  std::atomic<uint32_t> n_windows;  // so far; released when the last one is in its place
  std::atomic<uint32_t> is_over;    // all windows are gone with their communicator
  Window windows[kWindows];

 private:
  // Looks first where a window of this number lies if its place was free.
  Window* named(uint64_t name, uint32_t number) {
    for (uint32_t i = 0; i < kWindows; ++i) {
      Window& w = windows[(number + i) % kWindows];
      if (w.name.load(std::memory_order_acquire) == name) return &w;  // released in add_window()
    }
    return nullptr;
  }
};
struct Rma::From {
  struct Parcel {
    uint32_t window;
    int32_t file;  // descriptor in its sender
    uint64_t offset, bytes;
  };
  std::atomic<uint64_t> signals[kContexts][kSignals];
  std::atomic<uint64_t> posted, fetched;  // counts of parcels; each released by the side that raises it
  Parcel parcels[kParcels];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline Rma::From& Rma::of(Board& board, int rank) { return reinterpret_cast<From*>(&board + 1)[rank]; }

// The ranks of this process that can be put to. A thread may drive several of them, and while it waits for one, only it
// can serve the others.
struct RanksHere {
  const pid_t process = getpid();
  std::mutex mutex;  // also held while one of them fetches
  std::vector<Rma*> all;
};
RanksHere& ranks_here();

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace moeccl::shim
