// SPDX-License-Identifier: Apache-2.0
// Processes that a program forks to be its ranks, of the perf programs and of `moeccl calibrate`.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace perf {

struct Children {
  std::vector<pid_t> running;
  std::string failure;  // why a process could not be forked; then those before it have been ended
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

// Waits for all children and returns whether each has ended with status 0. After one has failed, the library's
// survivors end within 2 s; those that have not after 20 s are ended.
inline bool wait_for(Children& children) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kGrace = std::chrono::seconds(20);
  bool failed = !children.failure.empty(), killed = false;
  Clock::time_point first_failure;
  while (!children.running.empty()) {
    int status = 0;
    const pid_t child = waitpid(-1, &status, failed ? WNOHANG : 0);
    if (child > 0) {
      std::erase(children.running, child);
      if (status != 0 && !failed) {
        failed = true;
        first_failure = Clock::now();
      }
    } else if (child < 0 && errno != EINTR) {
      break;
    } else if (failed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (!killed && Clock::now() - first_failure > kGrace) {
        for (const pid_t pid : children.running) kill(pid, SIGKILL);
        killed = true;
      }
    }
  }
  return !failed;
}

}  // namespace perf
