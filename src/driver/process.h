// SPDX-License-Identifier: Apache-2.0
// The identity of this host and this process, and whether another process is still alive.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

// Two ranks with equal identities can share memory through descriptors and reach each other over UNIX sockets.
// Containers on one machine have different namespaces, so they count as different hosts unless they share them.
struct HostIdentity {
  std::string hostname;
  std::string boot_id;  // random for each boot; empty if /proc does not provide it
  uint64_t uts_namespace = 0;
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;  // the namespace of abstract UNIX sockets
  std::string given;           // MOECCL_HOST_ID

  uint64_t hash() const;
  // Equal for ranks that share this host's interfaces and addresses, as containers of one host may; 0: not known.
  uint64_t network() const;
  const std::string& name() const { return given.empty() ? hostname : given; }  // for display
  bool operator==(const HostIdentity&) const = default;
};
// Reads the identity anew at each call (a few small files).
HostIdentity host_identity();

// Never equal for two processes: pids are reused, but not with the same start time and random number.
struct ProcessIdentity {
  pid_t pid = 0;
  uint64_t start_time = 0;  // clock ticks since boot, from /proc/self/stat; 0 when unknown
  uint64_t random = 0;

  bool operator==(const ProcessIdentity&) const = default;
};
// Stays the same within a process. A forked child gets its own identity at its first call.
ProcessIdentity this_process();

// Returns a descriptor that becomes readable when the process ends. Returns RemoteError if it has already ended, and
// Unsupported on kernels before 5.3. Works within one pid namespace.
Result<Fd> open_pidfd(pid_t pid);

// Returns a descriptor for other processes of this host. It shows them the end of this process, and also that it
// executes another program, which its pidfd hides. It stays the same for the life of the process; a forked child
// creates its own.
Result<int> life_line();

// Watches another process of this host. May be used by any number of threads.
class ProcessWatch {
 public:
  // `line` is the other process's life_line(), as received from it; it may be empty where the system has pidfds.
  static Result<std::shared_ptr<const ProcessWatch>> open(pid_t pid, Fd line);
  // Returns success, or RemoteError such as "process 4711 has ended" or, within a second, that it dumps core.
  Status check() const;
  static bool dumps_core(std::string_view proc_status);  // what /proc/PID/status says

 private:
  ProcessWatch(pid_t pid, Fd pidfd, Fd line) : pid_(pid), pidfd_(std::move(pidfd)), line_(std::move(line)) {}
  pid_t pid_;
  Fd pidfd_, line_;
  mutable std::atomic<int64_t> look_ns_{0};  // when to look next whether it dumps core
};

// Remembers the process that created it. Each query costs one system call (glibc does not cache getpid).
class ForkGuard {
 public:
  ForkGuard();
  bool forked() const;  // true in a child made by fork()
  pid_t owner() const { return owner_; }

 private:
  pid_t owner_;
};

}  // namespace moeccl::driver
