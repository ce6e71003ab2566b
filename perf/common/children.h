// SPDX-License-Identifier: Apache-2.0
// Processes that a program forks to be its ranks, of the perf programs and of `moeccl calibrate`.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace perf {

struct Children {
  std::vector<pid_t> running;  // by number; 0: it has ended
  // Why a process could not be forked, after which those before it were ended, or by which signal one ended.
  std::string failure;
};

// Forks n processes, which end with this one. Returns the number of the process in each child, and -1 in the parent.
inline int fork_children(int n, Children& children) {
  const pid_t parent = getpid();
  for (int i = 0; i < n; i++) {
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);  // the parent died before the line above
      return i;
    }
    if (pid < 0) {
      children.failure = "process " + std::to_string(i) + " of " + std::to_string(n) +
                         " cannot be forked: " + std::strerror(errno) + "; use fewer, or raise the limit (ulimit -u)";
      for (const pid_t child : children.running) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
      }
      children.running.clear();
      break;
    }
    children.running.push_back(pid);
  }
  return -1;
}

inline std::string ended_by_signal(size_t number, pid_t pid, int signal) {
  const std::string reason = signal == SIGKILL ? "; the kernel ends processes when memory runs out: use smaller sizes "
                                                 "or fewer ranks"
                                               : std::string(" (") + strsignal(signal) + ")";
  return "process " + std::to_string(number) + " (" + std::to_string(pid) + ") ended by signal " +
         std::to_string(signal) + reason;
}

// Waits for all children and returns whether each has ended with status 0. After one has failed, the library's
// survivors end within 2 s; those that have not after 20 s are ended.
inline bool wait_for(Children& children) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kGrace = std::chrono::seconds(20);
  bool failed = !children.failure.empty(), killed = false;
  Clock::time_point first_failure;
  for (size_t left = children.running.size(); left > 0;) {
    int status = 0;
    const pid_t child = waitpid(-1, &status, failed ? WNOHANG : 0);
    if (child > 0) {
      const auto at = std::find(children.running.begin(), children.running.end(), child);
      if (at == children.running.end()) continue;
      *at = 0;
      left--;
      if (WIFSIGNALED(status) && !killed && children.failure.empty())
        children.failure = ended_by_signal(static_cast<size_t>(at - children.running.begin()), child, WTERMSIG(status));
      if (status != 0 && !failed) {
        failed = true;
        first_failure = Clock::now();
      }
    } else if (child < 0 && errno != EINTR) {
      break;
    } else if (failed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (!killed && Clock::now() - first_failure > kGrace) {
        for (const pid_t pid : children.running)
          if (pid != 0) kill(pid, SIGKILL);
        killed = true;
      }
    }
  }
  return !failed;
}

}  // namespace perf
