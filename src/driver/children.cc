// SPDX-License-Identifier: Apache-2.0
#include "src/driver/children.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <atomic>
#include <ctime>
#include <mutex>
#include <new>
#include <utility>

namespace moeccl::driver {
namespace {

// The inode of each registered descriptor, with its file system, indexed by the descriptor's number. If the number has
// another owner by the time of a fork(), its inode differs too. The pages are never freed.
constexpr size_t kPerPage = 4096;
constexpr size_t kPages = 256;  // 2^20 descriptors, the kernel's usual limit (fs.nr_open)
using Page = std::atomic<uint64_t>[kPerPage];
std::atomic<Page*> pages[kPages];

std::mutex making;
thread_local bool forks = false;  // true while this thread holds `making` for its fork()

uint64_t inode(int fd) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return 0;
  if ((info.st_mode & S_IFMT) == 0 || S_ISDIR(info.st_mode)) return 0;  // what has no inode of its own
  return info.st_ino ^ static_cast<uint64_t>(info.st_dev) << 48;
}

// The lock is held only for a few system calls at a time, or while a device is opened. Its holder may be this very
// thread, interrupted by a signal whose handler calls fork(), so the wait has an end.
void before_fork() {
  for (int i = 0; i < 200 && !forks; ++i) {
    forks = making.try_lock();
    const timespec time = {0, 50'000};
    if (!forks) ::nanosleep(&time, nullptr);
  }
}

void after_fork() {
  if (std::exchange(forks, false)) making.unlock();
}

// Makes only system calls: in a child of a process with threads, locks may be held forever.
void in_child() {
  int nothing = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool takes_place = false;
  for (size_t p = 0; p < kPages; ++p) {
    Page* const page = pages[p].load(std::memory_order_acquire);
    for (size_t i = 0; page != nullptr && i < kPerPage; ++i) {
      const uint64_t known = (*page)[i].load(std::memory_order_relaxed);
      const int fd = static_cast<int>(p * kPerPage + i);
      if (known == 0 || inode(fd) != known) continue;
      if (nothing < 0) {  // no number was free, so this one is closed and reused
        ::close(fd);
        nothing = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        takes_place = nothing == fd;
      } else {
        ::dup3(nothing, fd, O_CLOEXEC);
      }
      (*page)[i].store(0, std::memory_order_relaxed);
    }
  }
  if (nothing >= 0 && !takes_place) ::close(nothing);
  if (forks) {
    after_fork();
  } else {
    new (&making) std::mutex;  // the thread that held it does not exist in the child
  }
}

Page* page_of(size_t p) {
  Page* page = pages[p].load(std::memory_order_acquire);
  if (page != nullptr) return page;
  auto* made = reinterpret_cast<Page*>(new std::atomic<uint64_t>[kPerPage]());
  if (pages[p].compare_exchange_strong(page, made, std::memory_order_acq_rel)) return made;
  delete[] reinterpret_cast<std::atomic<uint64_t>*>(made);
  return page;
}

}  // namespace

ForkPause::ForkPause() {
  static const int registered = ::pthread_atfork(before_fork, after_fork, in_child);
  (void)registered;  // on ENOMEM, children simply keep the descriptors
  making.lock();
}
ForkPause::~ForkPause() { making.unlock(); }

void keep_from_children(int fd) {
  const auto n = static_cast<size_t>(fd);
  if (n >= kPages * kPerPage) return;
  (*page_of(n / kPerPage))[n % kPerPage].store(inode(fd), std::memory_order_release);
}

}  // namespace moeccl::driver
