// SPDX-License-Identifier: Apache-2.0
// Which host and which process this is, and whether another process still lives.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

// Two ranks with equal identities can share memory by descriptors and reach each other over UNIX sockets. Containers on
// one machine differ in their namespaces and count as different hosts unless they share them.
struct HostIdentity {
  std::string hostname;
  std::string boot_id;  // random for each boot; empty when /proc does not tell
  uint64_t uts_namespace = 0;
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;  // abstract UNIX sockets live in it
  std::string given;           // MOECCL_HOST_ID

  uint64_t hash() const;
  const std::string& name() const { return given.empty() ? hostname : given; }  // for people
  bool operator==(const HostIdentity&) const = default;
};
// Read anew at each call (some small files).
HostIdentity host_identity();

// Never two alike: pids are reused, but not with the same start time and random number.
struct ProcessIdentity {
  pid_t pid = 0;
  uint64_t start_time = 0;  // clock ticks since boot, from /proc/self/stat; 0 when unknown
  uint64_t random = 0;

  bool operator==(const ProcessIdentity&) const = default;
};
// Stays the same in a process; a forked child gets its own at its first call.
ProcessIdentity this_process();

// A descriptor that becomes readable when the process ends. RemoteError when it has ended already; Unsupported on
// kernels before 5.3. Works within one pid namespace.
Result<Fd> open_pidfd(pid_t pid);

// A descriptor for other processes of this host, in which they see the end of this process and also that it executes
// another program, which its pidfd hides. This process's own for all its life; a forked child makes another one.
Result<int> life_line();

// Another process of this host. Any number of threads.
class ProcessWatch {
 public:
  // line: of the process's life_line(), as it sent it; may be empty.
  static Result<std::shared_ptr<const ProcessWatch>> open(pid_t pid, Fd line);
  // Success, or RemoteError: "process 4711 has ended".
  Status check() const;

 private:
  ProcessWatch(pid_t pid, Fd pidfd, Fd line) : pid_(pid), pidfd_(std::move(pidfd)), line_(std::move(line)) {}
  pid_t pid_;
  Fd pidfd_, line_;
};

// Remembers the process that made it; costs one system call to ask (getpid is not cached by glibc).
class ForkGuard {
 public:
  ForkGuard();
  bool forked() const;  // true in a child of fork()
  pid_t owner() const { return owner_; }

 private:
  pid_t owner_;
};

}  // namespace moeccl::driver
