// SPDX-License-Identifier: Apache-2.0
// This rank's communicators: one for tokens, one for the dense weights' gradients, which travel beside the backward
// pass and give way to tokens; and the times of its operations.
#pragma once

#include <chrono>

#include "../training/common.h"

namespace training {

struct Links {
  const char* topology;
  bool pace;  // slowed to the topology's figures
};

// From when to when an operation ran on this rank. All ranks make the same operations in the same order, so the time of
// one is from the last rank's beginning to the last rank's end: who waits for another rank's computing does not count.
struct Times {
  enum Kind { kRouting, kDispatch, kCombine, kBackward, kOther, kKinds };
  struct Span {
    Kind kind;
    double begin, end;
  };
  std::vector<Span> spans;
};
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Ranks {
 public:
  Ranks(moecclComm_t comm, const Links& links);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // A communicator of the same ranks on the same links, whose operations wait for none of this one's.
  moecclComm_t beside(int priority) const;
  // Runs an operation and notes its time.
  template <class Call>
  void timed(Times::Kind kind, const char* name, Call&& call) const {
    const double begin = now();
    check(call(), name, tokens);
    times.spans.push_back({kind, begin, now()});
  }

  int rank = 0, n = 0;
  moecclComm_t tokens, dense = nullptr;
  moecclStream_t stream = nullptr;
  mutable Times times;

 private:
  Links links_;
};

}  // namespace training
