// SPDX-License-Identifier: Apache-2.0
// This rank's communicators and the times of its operations. One communicator carries tokens; the other carries the
// dense weights' gradients, which overlap with the backward pass and give way to tokens.
#pragma once

#include <chrono>

#include "../training/common.h"

namespace training {

struct Links {
  const char* topology;
  bool pace;  // slow the links to the topology's figures
};

// When each operation began and ended on this rank. All ranks run the same operations in the same order, so an
// operation is timed from the last rank's begin to the last rank's end: waiting for another rank's computation does not
// count.
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

  // Returns a communicator of the same ranks on the same links, whose operations do not wait for those of `tokens`.
  moecclComm_t beside(int priority) const;
  // Runs an operation and records its time.
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
