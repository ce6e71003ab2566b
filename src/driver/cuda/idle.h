// SPDX-License-Identifier: Apache-2.0
// Calls of the driver that wait for all work of a context, and of the devices that reach its memory, such as cuMemFree.
// On an H200, no other call of the context returns while one of them waits. It must therefore not come while a thread
// of this process still has to make calls for an operation that a stream or a kernel waits for: neither would end.
#pragma once

#include <functional>

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

// An operation of this process, from before a stream waits for it, or its kernel starts, until it has ended. Any
// thread.
class InFlight {
 public:
  // Waits while the calls below run.
  InFlight();
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
};

// Graphs of this process that may be in flight at any time.
class Replays {
 public:
  Replays();
  ~Replays();
  Replays(const Replays&) = delete;
  Replays& operator=(const Replays&) = delete;
};

// Runs `call` now if nothing of this process is in flight, and otherwise when it is so, on the thread that ends the
// last operation. The context is current.
void when_idle(Context context, std::function<void()> call);
// As when_idle(), but waits for that moment, for a second at most: an operation in flight may wait for this very
// thread.
void soon_idle(Context context, std::function<void()> call);

}  // namespace moeccl::driver::cuda
