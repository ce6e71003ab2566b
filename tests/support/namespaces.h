// SPDX-License-Identifier: Apache-2.0
// Whether a test may make namespaces: root in a container often may not.
#pragma once

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

namespace moeccl::testing {

// flags: CLONE_NEWNET and so on.
inline bool may_unshare(int flags) {
  const pid_t child = fork();
  if (child == 0) _exit(unshare(flags) == 0 ? 0 : 1);
  int status = 0;
  return waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace moeccl::testing
