// SPDX-License-Identifier: Apache-2.0
// Threads of the library. They have names, and all signals are blocked on them, so that the application's handlers run
// on its own threads.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "src/base/status.h"

namespace moeccl::driver {

// Truncates `name` to 15 bytes (the kernel's limit). If no thread can be started, returns a Status and never throws.
Result<std::thread> start_thread(const char* name, std::function<void()> body);

// The same for constructors: throws std::system_error if no thread can be started.
std::thread started_thread(const char* name, std::function<void()> body);

void sleep_ns(int64_t ns);

// Returns the kernel's number of the calling thread, as /proc/PID/task and debuggers show it.
int thread_number();

// Counts the machine's cores, including those that this process may not use.
int configured_cores();
// Returns the core on which the calling thread runs, or -1 if unknown.
int current_core();
// Returns whether a core belongs to the NUMA node on which the calling thread runs, as far as the kernel says.
bool in_this_node(int core);
// Moves the calling thread to one of its allowed cores for which `is_free` returns true, if there is one, and to one
// for which `is_near` does too if possible. The set of allowed cores stays as it is, so the kernel may move the thread
// again.
void move_to_core(const std::function<bool(int core)>& is_free,
                  const std::function<bool(int core)>& is_near = in_this_node);

}  // namespace moeccl::driver
