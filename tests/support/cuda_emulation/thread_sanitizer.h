// SPDX-License-Identifier: Apache-2.0
// Tells the thread sanitizer about the launch emulation: which thread a fiber is, and what barriers order. The sources
// that include this are not instrumented themselves, because fibers share their data without locks.
// MOECCL_EMULATION_TSAN means that the program around them is instrumented.
#pragma once

#if defined(MOECCL_EMULATION_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace moeccl::emulation::tsan {

#if defined(MOECCL_EMULATION_TSAN)
inline constexpr bool kOn = true;
inline void* make_thread() { return __tsan_create_fiber(0); }
inline void end_thread(void* thread) { __tsan_destroy_fiber(thread); }
inline void* this_thread() { return __tsan_get_current_fiber(); }
// Orders nothing; release() and acquire() of one address do.
inline void become(void* thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }
inline void release(void* at) { __tsan_release(at); }
inline void acquire(void* at) { __tsan_acquire(at); }
#else
inline constexpr bool kOn = false;
inline void* make_thread() { return nullptr; }
inline void end_thread(void*) {}
inline void* this_thread() { return nullptr; }
inline void become(void*) {}
inline void release(void*) {}
inline void acquire(void*) {}
#endif

// One of the sanitizer's threads.
class Thread {
 public:
  Thread() : thread_(make_thread()) {}
  ~Thread() { end_thread(thread_); }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  void* get() const { return thread_; }

 private:
  void* thread_;
};

}  // namespace moeccl::emulation::tsan
