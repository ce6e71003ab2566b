// SPDX-License-Identifier: Apache-2.0
// Descriptors that tell others whether this process lives. The other side of a socket or a pipe sees its end when the
// last copy is closed, and a child made by fork() has copies of all: a rank whose data loader lives on would seem alive
// after its death. So a child lets go of these before fork() returns in it. Children that execute another program
// lose them by close-on-exec, however they were made.
#pragma once

#include "src/base/fd.h"

namespace moeccl::driver {

// While it lives no other thread's fork() makes a child with a descriptor that is not known to keep_from_children()
// yet. Hold it for the call that makes the descriptor, never while waiting.
class ForkPause {
 public:
  ForkPause();
  ~ForkPause();
  ForkPause(const ForkPause&) = delete;
  ForkPause& operator=(const ForkPause&) = delete;
};

// A socket or a pipe. In a child its number stays taken, by a socket that is connected to nothing: whoever owns the
// number may still close it there. Nothing has to be done when it is closed here.
void keep_from_children(int fd);

// What `make` returns, a new descriptor or -1 with errno.
template <class Make>
Fd not_for_children(Make make) {
  const ForkPause pause;
  Fd fd(make());
  if (fd) keep_from_children(fd.get());
  return fd;
}

}  // namespace moeccl::driver
