// SPDX-License-Identifier: Apache-2.0
// The place where a debugger finds the flight recorders of a process; see tools/gdb/moeccl.py and docs/debugging.md. A
// stripped library has no symbols to start from, so the directory lies in its data behind a magic word and gives the
// positions of everything else as numbers.
#pragma once

#include <cstdint>

#include "src/exec/flight.h"

namespace moeccl::exec {

// One communicator of one rank, or its side for CUDA memory. Listed while it exists.
class FlightEntry {
 public:
  struct Places {
    uint64_t rank = 0, n_ranks = 0;
    const bool* cuda = nullptr;
    const FlightPage* page = nullptr;
    const uint64_t* entered = nullptr;   // [n_ranks], from Fabric
    const uint64_t* finished = nullptr;  // [n_ranks]
  };

  explicit FlightEntry(const Places& places);
  ~FlightEntry();
  FlightEntry(const FlightEntry&) = delete;
  FlightEntry& operator=(const FlightEntry&) = delete;

 private:
  // The debugger reads these as 8-byte words in this order.
  FlightEntry* next_ = nullptr;
  Places places_;
  FlightEntry** link_ = nullptr;  // the pointer to this entry
};

}  // namespace moeccl::exec
