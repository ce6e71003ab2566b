// SPDX-License-Identifier: Apache-2.0
#include "src/driver/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "src/base/clock.h"
#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/random.h"
#include "src/driver/children.h"

namespace moeccl::driver {
namespace {

// Returns the first bytes of a small file of /proc without trailing newlines, or "" if it cannot be read.
std::string read_small_file(const char* path) {
  const Fd fd(::open(path, O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  char text[4096];
  ssize_t n = 0;
  while ((n = ::read(fd.get(), text, sizeof(text))) < 0 && errno == EINTR) continue;
  if (n <= 0) return {};
  std::string result(text, static_cast<size_t>(n));
  while (!result.empty() && result.back() == '\n') result.pop_back();
  return result;
}

uint64_t namespace_inode(const char* path) {
  struct stat info = {};
  return ::stat(path, &info) == 0 ? info.st_ino : 0;
}

// Reads field 22 of /proc/self/stat. The second field, the program's name, may contain spaces and brackets, so the
// fields are counted from the last ')'.
uint64_t own_start_time() {
  const std::string stat = read_small_file("/proc/self/stat");
  size_t at = stat.rfind(')');
  if (at == std::string::npos) return 0;
  for (int field = 2; field < 22; ++field) {
    at = stat.find(' ', at + 1);
    if (at == std::string::npos) return 0;
  }
  return std::strtoull(stat.c_str() + at + 1, nullptr, 10);
}

}  // namespace

uint64_t HostIdentity::hash() const {
  uint64_t h = hash_string(hostname);
  h = hash_string(boot_id, h);
  h = hash_combine(h, uts_namespace);
  h = hash_combine(h, pid_namespace);
  h = hash_combine(h, net_namespace);
  if (!given.empty()) h = hash_string(given, h);
  return h != 0 ? h : 1;  // 0 means unknown where hashes are sent
}

// The namespace's number alone says nothing: the first one has the same number on many machines.
uint64_t HostIdentity::network() const {
  if (boot_id.empty() || net_namespace == 0) return 0;
  const uint64_t h = hash_combine(hash_string(boot_id), net_namespace);
  return h != 0 ? h : 1;
}

HostIdentity host_identity() {
  HostIdentity id;
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) == 0) id.hostname = name;
  id.boot_id = read_small_file("/proc/sys/kernel/random/boot_id");
  id.uts_namespace = namespace_inode("/proc/self/ns/uts");
  id.pid_namespace = namespace_inode("/proc/self/ns/pid");
  id.net_namespace = namespace_inode("/proc/self/ns/net");
  id.given = env().host_id;
  return id;
}

ProcessIdentity this_process() {
  // Takes no lock, because a lock held by another thread at fork() would stay locked in the child. Each fork leaves one
  // small node behind, which stays reachable so that leak checkers stay quiet.
  struct Node {
    ProcessIdentity identity;
    const Node* before;
  };
  static std::atomic<const Node*> current{nullptr};
  const pid_t pid = ::getpid();
  const Node* seen = current.load(std::memory_order_acquire);  // pairs with the release in compare_exchange below
  if (seen != nullptr && seen->identity.pid == pid) return seen->identity;
  auto* mine = new Node{{pid, own_start_time(), 0}, seen};
  if (!random_bytes(&mine->identity.random, sizeof(mine->identity.random)).ok()) {
    mine->identity.random = hash_combine(static_cast<uint64_t>(now_ns()), reinterpret_cast<uintptr_t>(mine));
  }
  if (current.compare_exchange_strong(seen, mine, std::memory_order_acq_rel)) return mine->identity;
  delete mine;  // another thread was faster
  return seen->identity;
}

Result<Fd> open_pidfd(pid_t pid) {
  Fd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // close-on-exec by definition
  if (fd) return fd;
  if (errno == ESRCH) return error(moecclRemoteError, "process {} has ended", pid);
  if (errno == ENOSYS) return error(moecclUnsupported, "pidfd_open needs Linux 5.3");
  return system_error(format("pidfd_open of process {}", pid), errno);
}

Result<int> life_line() {
  // Like this_process(), this takes no lock and keeps a node for each process that calls it.
  struct Node {
    pid_t pid;
    Fd theirs, own;  // other processes wait for the end of the pipe; nothing is ever written to it
    const Node* before;
  };
  static std::atomic<const Node*> current{nullptr};
  const pid_t pid = ::getpid();
  const Node* seen = current.load(std::memory_order_acquire);  // pairs with the release in compare_exchange below
  if (seen != nullptr && seen->pid == pid) return seen->theirs.get();
  int ends[2] = {-1, -1};
  Fd own = not_for_children([&ends] { return ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0 ? ends[1] : -1; });
  if (!own) return system_error("pipe", errno);
  auto* mine = new Node{pid, Fd(ends[0]), std::move(own), seen};
  if (current.compare_exchange_strong(seen, mine, std::memory_order_acq_rel)) return mine->theirs.get();
  delete mine;  // another thread was faster
  return seen->theirs.get();
}

Result<std::shared_ptr<const ProcessWatch>> ProcessWatch::open(pid_t pid, Fd line) {
  Result<Fd> pidfd = open_pidfd(pid);
  // Old kernels and some sandboxes have none. The line alone shows the end, too.
  if (!pidfd.ok() && (pidfd.status().code() == moecclRemoteError || !line)) return std::move(pidfd).status();
  return std::shared_ptr<const ProcessWatch>(
      new ProcessWatch(pid, pidfd.ok() ? std::move(*pidfd) : Fd(), std::move(line)));
}

bool ProcessWatch::dumps_core(std::string_view s) { return s.find("\nCoreDumping:\t1") != std::string_view::npos; }

Status ProcessWatch::check() const {
  bool dumps = false;  // what poll() shows only when the dump is written; asked before it, as a number may be used anew
  if (const int64_t now = now_ns(); now > look_ns_.load(std::memory_order_relaxed)) {
    dumps = dumps_core(read_small_file(format("/proc/{}/status", pid_).c_str()));
    look_ns_.store(dumps ? 0 : now + 1'000'000'000, std::memory_order_relaxed);
  }
  pollfd entries[2] = {{pidfd_.get(), POLLIN, 0}, {line_.get(), POLLIN, 0}};  // poll() ignores a negative descriptor
  int n = 0;
  while ((n = ::poll(entries, 2, 0)) < 0 && errno == EINTR) continue;
  if (n <= 0) return dumps ? error(moecclRemoteError, "process {} has crashed and dumps core", pid_) : Status();
  if (entries[0].revents != 0) return error(moecclRemoteError, "process {} has ended", pid_);
  // A process that ends closes its descriptors before its pidfd becomes readable.
  return error(moecclRemoteError, "process {} has ended, or executes another program", pid_);
}

ForkGuard::ForkGuard() : owner_(::getpid()) {}
bool ForkGuard::forked() const { return ::getpid() != owner_; }

}  // namespace moeccl::driver
