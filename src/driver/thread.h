// SPDX-License-Identifier: Apache-2.0
// Threads of the library: named, and with every signal blocked, so that the application's handlers run on its own
// threads.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "src/base/status.h"

namespace moeccl::driver {

// `name` is cut at 15 bytes (the kernel's limit). A lack of threads is a Status, never an exception.
Result<std::thread> start_thread(const char* name, std::function<void()> body);

void sleep_ns(int64_t ns);

// The kernel's number of the calling thread, as /proc/PID/task and debuggers show it.
int thread_number();

// Of the machine, whatever this process is allowed.
int configured_cores();
// The core that the calling thread runs on; -1: unknown.
int current_core();
// Moves the calling thread to one of its allowed cores for which `is_free` says true, if there is one. The cores that
// it is allowed stay as they are, so the kernel may move it again.
void move_to_core(const std::function<bool(int core)>& is_free);

}  // namespace moeccl::driver
