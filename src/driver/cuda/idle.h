// SPDX-License-Identifier: Apache-2.0
// Calls of the driver that wait for all work of a context, such as cuMemFree. On an H200, no other call of the context
// returns while one of them waits. It must therefore not come while a thread of this process still has to make calls
// for an operation that a stream waits for: neither would end.
#pragma once

#include <functional>

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

// An operation of this process on a context, from before a stream waits for it until none does. Any thread.
class InFlight {
 public:
  // Waits while the calls below run.
  explicit InFlight(Context context);
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

 private:
  const Context context_;
};

// Runs `call` now if no operation is in flight, and otherwise when the last one ends, on that thread. The context is
// current.
void when_idle(Context context, std::function<void()> call);
// Waits until no operation is in flight, and runs `call`.
void wait_until_idle(Context context, const std::function<void()>& call);

}  // namespace moeccl::driver::cuda
