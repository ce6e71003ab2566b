// SPDX-License-Identifier: Apache-2.0
// One executor's operations as events of a profiler plugin. The flight recorder calls this where it notes them.
//
// An operation is four events, one in the other: the group and the call (since v5) from when it begins, the operation
// from when its plan is known, and the kernel's event, told at the end with the times at which it began and ended: the
// device's own where a kernel measured itself. A group before v5 is the operation's parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "src/profiler/session.h"

namespace moeccl::profiler {

struct Call {
  bool is_message = false;
  uint64_t sequence = 0;
  const char* func = "";  // NCCL's name, or the operation's title where NCCL has none
  const char* type = "";
  uint64_t count = 0;  // elements
  int with = 0;        // root, or the message's peer
  const void* input = nullptr;
  void* output = nullptr;
};

// Called by one thread at a time.
class Events {
 public:
  explicit Events(std::shared_ptr<Session> session) : session_(std::move(session)) {}

  // `number` names the operation in the other calls, which do nothing for numbers that have not begun or have ended. It
  // is higher than those that have begun before.
  void begin(size_t number, const Call& call);
  void chose(size_t number, const char* algorithm);
  // `took_ns`: what the device measured; 0: nothing.
  void end(size_t number, int64_t took_ns);

 private:
  struct Open {
    size_t number;
    Call call;
    int wanted;  // when it began
    int64_t began_ns;
    void *group_call = nullptr, *api = nullptr, *group = nullptr, *operation = nullptr;
    bool chosen = false;
  };
  std::deque<Open>::iterator find(size_t number);
  void tell_kernel(const Open& open, int64_t took_ns);

  std::shared_ptr<Session> session_;
  // By their numbers. A group of messages has thousands, which mostly end in the order in which they began.
  std::deque<Open> open_;
};

}  // namespace moeccl::profiler
