// SPDX-License-Identifier: Apache-2.0
// Threads that leave signals to the application's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace moeccl {

// While this object exists, the calling thread takes no signals. A thread that it starts meanwhile never takes any: it
// inherits the mask, so no signal can reach it before it sets one itself.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace moeccl
