// SPDX-License-Identifier: Apache-2.0
// Any one system call of a process fails (scoreboard line 16). A call that was interrupted (EINTR) is repeated, and all
// ranks succeed. A call that lacks memory, descriptors or space is an error of its rank, and the peers hear of it at
// once. MOECCL_TEST_SCALE tries more calls.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

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
#define EITHER(result, name, parameters, arguments, code)                                            \
  extern "C" __attribute__((visibility("default"))) result name parameters {                         \
    static const auto next = real(&name, #name);                                                     \
    return denied(Means::kInterrupted, EINTR) || denied(Means::kScarce, code) ? -1 : next arguments; \
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
TAKES(int, bind, (int fd, const sockaddr* a, socklen_t n) noexcept, (fd, a, n), EADDRINUSE, -1)
TAKES(int, getsockopt, (int fd, int level, int name, void* value, socklen_t* n) noexcept, (fd, level, name, value, n),
      ENOBUFS, -1)
TAKES(int, pthread_create, (pthread_t * thread, const pthread_attr_t* a, void* (*body)(void*), void* of) noexcept,
      (thread, a, body, of), EAGAIN, EAGAIN)  // as where a container has its most threads
EITHER(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n), ENOSPC)
TAKES(void*, mmap64, (void* at, size_t n, int protection, int flags, int fd, off64_t offset) noexcept,
      (at, n, protection, flags, fd, offset), ENOMEM, MAP_FAILED)

// A TCP connection goes on being made when its call is interrupted. Others are made at once.
extern "C" __attribute__((visibility("default"))) int connect(int fd, const sockaddr* a, socklen_t n) {
  static const auto next = real(&connect, "connect");
  if (denied(Means::kScarce, EADDRNOTAVAIL)) return -1;
  const int result = next(fd, a, n);
  const bool goes_on = a->sa_family != AF_UNIX && (result == 0 || errno == EINPROGRESS);
  return goes_on && denied(Means::kInterrupted, EINTR) ? -1 : result;
}

// pidfd_open has no function of its own in older libraries of C.
extern "C" __attribute__((visibility("default"))) long syscall(long number, ...) noexcept {
  static const auto next = real(&syscall, "syscall");
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& value : a) value = va_arg(list, long);
  va_end(list);
  if (number == SYS_pidfd_open && denied(Means::kScarce, EMFILE)) return -1;
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

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
TEST(SystemCalls, OnesThatAreInterruptedAreMadeAgainBetweenHosts) { interrupt_some(between_hosts, 40); }
TEST(SystemCalls, OnesThatAreDeniedAreErrorsForAll) { deny_some(scenario, 40); }
TEST(SystemCalls, OnesThatAreDeniedAreErrorsForAHostToo) { deny_some(between_hosts, 40); }

}  // namespace
}  // namespace moeccl::testing
