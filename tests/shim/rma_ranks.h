// SPDX-License-Identifier: Apache-2.0
// What the tests of puts and signals share.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {

inline std::string last() { return ncclGetLastError(nullptr); }

// A communicator with one window of this many bytes of ordinary memory on each rank.
struct WithWindow {
  WithWindow(Board& board, int n, int rank, size_t bytes) : memory(bytes) {
    if (ncclCommInitRank(&comm, n, meet(board, rank), rank) != ncclSuccess ||
        ncclCommWindowRegister(comm, memory.data(), bytes, &window, NCCL_WIN_COLL_SYMMETRIC) != ncclSuccess) {
      ADD_FAILURE() << last();
      _exit(1);
    }
  }
  ~WithWindow() {
    EXPECT_NCCL(ncclCommWindowDeregister(comm, window));
    EXPECT_NCCL(ncclCommDestroy(comm));
  }
  WithWindow(const WithWindow&) = delete;
  WithWindow& operator=(const WithWindow&) = delete;
  ncclResult_t put(const void* bytes, size_t n, int peer, size_t offset, int signal = 0, int context = 0) const {
    return ncclPutSignal(bytes, n, ncclUint8, peer, window, offset, signal, context, 0, comm, nullptr);
  }
  ncclResult_t wait(int peer, int times = 1, int signal = 0, int context = 0) const {
    ncclWaitSignalDesc_t wanted = {times, peer, signal, context};
    return ncclWaitSignal(1, &wanted, comm, nullptr);
  }
  std::vector<unsigned char> memory;
  ncclComm_t comm = nullptr;
  ncclWindow_t window = nullptr;
};

// As in a container, or where kernel.yama.ptrace_scope is 1, no process may write into another one.
inline void forbid_writing() {
  sock_filter steps[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_process_vm_writev, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program = {std::size(steps), steps};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
  const iovec none = {nullptr, 0};
  ASSERT_EQ(process_vm_writev(getpid(), &none, 1, &none, 1, 0), -1);
}

inline int elapsed_ms(std::chrono::steady_clock::time_point start) {
  return static_cast<int>(
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start).count());
}

}  // namespace moeccl::testing
