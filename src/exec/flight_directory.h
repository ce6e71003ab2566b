// SPDX-License-Identifier: Apache-2.0
// Where a debugger finds the flight recorders of a process: tools/gdb/moeccl.py, docs/debugging.md. A stripped library
// has no names to start from, so the directory lies in its data behind a magic word, and says by numbers where all else
// is.
#pragma once

#include <cstdint>

#include "src/exec/flight.h"

namespace moeccl::exec {

// One communicator of one rank, or its side for CUDA memory. Listed while it lives.
class FlightEntry {
 public:
  struct Places {
    uint64_t rank = 0, n_ranks = 0;
    const bool* cuda = nullptr;
    const FlightPage* page = nullptr;
    const uint64_t* entered = nullptr;   // [n_ranks], of Fabric
    const uint64_t* finished = nullptr;  // [n_ranks]
  };

  explicit FlightEntry(const Places& places);
  ~FlightEntry();
  FlightEntry(const FlightEntry&) = delete;
  FlightEntry& operator=(const FlightEntry&) = delete;

 private:
  // Read by the debugger as words of 8 bytes in this order.
  FlightEntry* next_ = nullptr;
  Places places_;
  FlightEntry** link_ = nullptr;  // what points here
};

}  // namespace moeccl::exec
