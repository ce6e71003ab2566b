// SPDX-License-Identifier: Apache-2.0
#include "src/driver/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <new>
#include <system_error>

#include "src/base/blocked_signals.h"
#include "src/driver/affinity.h"

namespace moeccl::driver {

Result<std::thread> start_thread(const char* name, std::function<void()> body) {
  std::thread thread;
  int failure = 0;
  try {
    const BlockedSignals blocked;
    thread = std::thread(std::move(body));
  } catch (const std::system_error& e) {
    failure = e.code().value();
  } catch (const std::bad_alloc&) {
    failure = ENOMEM;
  }
  if (failure != 0) return system_error(format("starting thread {}", name), failure);
  char short_name[16] = {};  // from here on nothing may throw, because an unjoined thread would end the process
  std::strncpy(short_name, name, sizeof(short_name) - 1);
  pthread_setname_np(thread.native_handle(), short_name);
  return thread;
}

std::thread started_thread(const char* name, std::function<void()> body) {
  Result<std::thread> thread = start_thread(name, std::move(body));
  if (!thread.ok()) throw std::system_error(EAGAIN, std::generic_category(), thread.status().message());
  return std::move(*thread);
}

void sleep_ns(int64_t ns) {
  const timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
  (void)::nanosleep(&time, nullptr);
}

int thread_number() { return static_cast<int>(gettid()); }

int configured_cores() { return static_cast<int>(sysconf(_SC_NPROCESSORS_CONF)); }

int current_core() { return sched_getcpu(); }

bool in_this_node(int core) {
  unsigned cpu = 0, node = 0;
  if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0) return false;  // glibc's own function is as new as 2.29
  char path[64];
  std::snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpu%d", node, core);
  return access(path, F_OK) == 0;
}

void move_to_core(const std::function<bool(int core)>& is_free, const std::function<bool(int core)>& is_near) {
  const std::optional<Affinity> allowed = Affinity::of_this_thread();
  int chosen = -1;
  for (int core = 0; allowed.has_value() && core < Affinity::kMostCpus; ++core) {
    if (!allowed->holds(core) || !is_free(core)) continue;
    const bool near = is_near(core);
    if (near || chosen < 0) chosen = core;
    if (near) break;
  }
  if (chosen < 0 || !Affinity::only(chosen).bind() || allowed->bind()) return;
  // In the meantime, all of these cores have been taken away: use whatever is allowed now.
  (void)Affinity::all().bind();
}

}  // namespace moeccl::driver
