// SPDX-License-Identifier: Apache-2.0
// Any one system call of a process fails (scoreboard line 16). A call that was interrupted (EINTR) is repeated, and all
// ranks succeed. A call that lacks memory, descriptors or space is an error of its rank, and the peers hear of it at
// once. MOECCL_TEST_SCALE tries more calls.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdarg>

#include "tests/fault/one_failure.h"

namespace {

enum class Means { kInterrupted, kScarce };
std::atomic<Means> means{Means::kInterrupted};

// Returns whether this call of a kind is the one that fails, and then sets errno to `code`.
bool denied(Means kind, int code) {
  if (means.load(std::memory_order_relaxed) != kind || !moeccl::testing::fails()) return false;
  errno = code;
  return true;
}

template <class F>
F real(F, const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// These are found before libc's functions, by the library as well.
#define WAITS(result, name, parameters, arguments)                           \
  extern "C" __attribute__((visibility("default"))) result name parameters { \
    static const auto next = real(&name, #name);                             \
    return denied(Means::kInterrupted, EINTR) ? -1 : next arguments;         \
  }
#define TAKES(result, name, parameters, arguments, code, failure)            \
  extern "C" __attribute__((visibility("default"))) result name parameters { \
    static const auto next = real(&name, #name);                             \
    return denied(Means::kScarce, code) ? failure : next arguments;          \
  }

WAITS(int, poll, (pollfd * fds, nfds_t n, int ms), (fds, n, ms))
WAITS(int, ppoll, (pollfd * fds, nfds_t n, const timespec* t, const sigset_t* set), (fds, n, t, set))
WAITS(int, epoll_wait, (int epoll, epoll_event* events, int n, int ms), (epoll, events, n, ms))
WAITS(ssize_t, read, (int fd, void* to, size_t n), (fd, to, n))
WAITS(ssize_t, write, (int fd, const void* from, size_t n), (fd, from, n))
WAITS(ssize_t, recv, (int fd, void* to, size_t n, int flags), (fd, to, n, flags))
WAITS(ssize_t, send, (int fd, const void* from, size_t n, int flags), (fd, from, n, flags))
WAITS(ssize_t, recvmsg, (int fd, msghdr* m, int flags), (fd, m, flags))
WAITS(ssize_t, sendmsg, (int fd, const msghdr* m, int flags), (fd, m, flags))
WAITS(int, accept4, (int fd, sockaddr* a, socklen_t* n, int flags), (fd, a, n, flags))

TAKES(int, socket, (int domain, int type, int protocol) noexcept, (domain, type, protocol), EMFILE, -1)
TAKES(int, pipe2, (int* fds, int flags) noexcept, (fds, flags), EMFILE, -1)
TAKES(int, eventfd, (unsigned value, int flags) noexcept, (value, flags), EMFILE, -1)
TAKES(int, epoll_create1, (int flags) noexcept, (flags), EMFILE, -1)
TAKES(int, epoll_ctl, (int epoll, int op, int fd, epoll_event* e) noexcept, (epoll, op, fd, e), ENOSPC, -1)
TAKES(int, memfd_create, (const char* name, unsigned flags) noexcept, (name, flags), EMFILE, -1)
TAKES(int, ftruncate64, (int fd, off64_t n) noexcept, (fd, n), ENOSPC, -1)
TAKES(int, listen, (int fd, int n) noexcept, (fd, n), EADDRINUSE, -1)
TAKES(void*, mmap64, (void* at, size_t n, int protection, int flags, int fd, off64_t offset) noexcept,
      (at, n, protection, flags, fd, offset), ENOMEM, MAP_FAILED)

namespace moeccl::testing {
namespace {

void interrupt_some(Scenario scenario, int most) {
  means = Means::kInterrupted;
  survives = true;
  fail_some(scenario, most, "interrupted call", 5);
}
void deny_some(Scenario scenario, int most) {
  means = Means::kScarce;
  survives = false;
  fail_some(scenario, most, "denied call", 5);
}

TEST(SystemCalls, OnesThatAreInterruptedAreMadeAgain) { interrupt_some(scenario, 60); }
TEST(SystemCalls, OnesThatAreInterruptedAreMadeAgainBetweenHosts) { interrupt_some(between_hosts, 60); }
TEST(SystemCalls, OnesThatAreDeniedAreErrorsForAll) { deny_some(scenario, 40); }
TEST(SystemCalls, OnesThatAreDeniedAreErrorsForAHostToo) { deny_some(between_hosts, 40); }

}  // namespace
}  // namespace moeccl::testing
