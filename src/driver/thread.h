// Threads of the library: named, and with every signal blocked, so that the application's handlers run on its own
// threads.
#pragma once

#include <functional>
#include <thread>

#include "src/base/status.h"

namespace moeccl::driver {

// `name` is cut at 15 bytes (the kernel's limit). A lack of threads is a Status, never an exception.
Result<std::thread> start_thread(const char* name, std::function<void()> body);

}  // namespace moeccl::driver
