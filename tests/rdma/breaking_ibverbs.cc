// SPDX-License-Identifier: Apache-2.0
// For MOECCL_IB_LIBRARY: the machine's own libibverbs, on which it depends, with one more ability. At SIGUSR2, the
// queue pair that this process made last goes to the error state, as after a fault of its NIC.
#include <dlfcn.h>
#include <semaphore.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "src/driver/ibv_abi.h"

namespace ibv = moeccl::driver::ibv_abi;

// Makes the linker keep the dependency.
extern "C" const char* ibv_wc_status_str(int status);
extern "C" __attribute__((visibility("default"))) const char* (*const moeccl_needs_libibverbs)(int);
const char* (*const moeccl_needs_libibverbs)(int) = ibv_wc_status_str;

namespace {

std::atomic<ibv::QueuePair*> last{nullptr};
sem_t asked;

void break_last() {
  const auto modify =
      reinterpret_cast<int (*)(ibv::QueuePair*, ibv::QueuePairAttr*, int)>(dlsym(RTLD_NEXT, "ibv_modify_qp"));
  for (;;) {
    while (sem_wait(&asked) != 0) {
    }
    ibv::QueuePairAttr attr = {};
    attr.qp_state = ibv::kStateError;
    if (ibv::QueuePair* const pair = last.exchange(nullptr); pair != nullptr) modify(pair, &attr, ibv::kMaskState);
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ibv::QueuePair* ibv_create_qp(void* pd, void* init) {
  static const auto create = reinterpret_cast<ibv::QueuePair* (*)(void*, void*)>(dlsym(RTLD_NEXT, "ibv_create_qp"));
  static const bool once = [] {
    sem_init(&asked, 0, 0);
    std::thread(break_last).detach();
    return signal(SIGUSR2, [](int) { sem_post(&asked); }) != SIG_ERR;
  }();
  ibv::QueuePair* const made = create(pd, init);
  if (once && made != nullptr) last = made;
  return made;
}

extern "C" __attribute__((visibility("default"))) int ibv_destroy_qp(ibv::QueuePair* pair) {
  static const auto destroy = reinterpret_cast<int (*)(ibv::QueuePair*)>(dlsym(RTLD_NEXT, "ibv_destroy_qp"));
  ibv::QueuePair* expected = pair;
  last.compare_exchange_strong(expected, nullptr);
  return destroy(pair);
}
