// SPDX-License-Identifier: Apache-2.0
// pthread_cancel() of a thread that is inside the library.
#pragma once

#include <pthread.h>

namespace moeccl {

// While this object exists, a cancellation of the calling thread waits. Otherwise it would end a call at some system
// call, while peers wait for the rest of it and an engine is in the middle of a message.
class Uncancelled {
 public:
  Uncancelled() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  // A thread with PTHREAD_CANCEL_ASYNCHRONOUS is cancelled here, so that the stack unwinds through this destructor.
  ~Uncancelled() noexcept(false) { pthread_setcancelstate(before_, nullptr); }
  Uncancelled(const Uncancelled&) = delete;
  Uncancelled& operator=(const Uncancelled&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace moeccl
