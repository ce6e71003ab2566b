// SPDX-License-Identifier: Apache-2.0
// Work that may wait for others longer than its caller wants to.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>

#include "src/driver/thread.h"

namespace moeccl::exec {

// Runs `work` on a thread of its own and returns when it has ended, or after `most_ns`; the work then goes on. If there
// is no memory or thread for that, the calling thread does the work.
inline void bounded_run(int64_t most_ns, const std::function<void()>& work) {
  std::future<void> ended;
  const Status started = contained([&]() -> Status {
    auto end = std::make_shared<std::promise<void>>();
    ended = end->get_future();
    MOECCL_ASSIGN_OR_RETURN(std::thread thread,
                            driver::start_thread("moeccl-end", [work, end] { work(), end->set_value(); }));
    thread.detach();
    return {};
  });
  if (started.ok())
    (void)ended.wait_for(std::chrono::nanoseconds(most_ns));
  else
    work();
}

}  // namespace moeccl::exec
