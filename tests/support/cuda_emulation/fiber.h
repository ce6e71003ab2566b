// SPDX-License-Identifier: Apache-2.0
// Threads of control that switch by hand: a stack each, all on one OS thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::emulation {

// Runs `body` again and again, once for each resume() that finds it idle, so that its stack (and what a sanitizer keeps
// with it) is made once.
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
  // From the OS thread's own stack: goes on until the fiber yields or its body ends. `as`: what the thread sanitizer
  // takes it for meanwhile (thread_sanitizer.h).
  void resume(void* as);
  // From inside: back to resume()'s caller.
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
