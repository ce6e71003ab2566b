// SPDX-License-Identifier: Apache-2.0
// Threads of control that switch explicitly: each has a stack, and all run on one OS thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::emulation {

// Runs `body` again and again, once for each resume() that finds it idle, so that its stack (and the sanitizer's data
// for it) is created only once.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void start(void (*body)(void*), void* argument) {
    body_ = body;
    argument_ = argument;
    running_ = true;
  }
  bool running() const { return running_; }
  // Continues the fiber from the OS thread's own stack, until it yields or its body ends. `as`: the thread that the
  // thread sanitizer takes it for in the meantime (thread_sanitizer.h).
  void resume(void* as);
  // Returns from inside the fiber to resume()'s caller.
  void yield();

 private:
  static void enter(Fiber* self);
  void loop();

  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool running_ = false;
  void* stack_ = nullptr;
  void* context_ = nullptr;  // of the fiber while it waits
  void* caller_ = nullptr;   // of resume()'s caller while the fiber runs
  void *fake_ = nullptr, *caller_fake_ = nullptr;
  const void* caller_stack_ = nullptr;
  size_t caller_bytes_ = 0;
  void* caller_thread_ = nullptr;  // the thread sanitizer's
};

}  // namespace moeccl::emulation
