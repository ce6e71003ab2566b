// SPDX-License-Identifier: Apache-2.0
// Connections that have not proved yet that they belong here, at a port that anybody can reach. They cost little and
// delay nobody: a fixed number may wait at once, each has a deadline, and the oldest that has not said anything yet
// makes room for the next. Time is an argument; the owner keeps the connections themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "src/base/status.h"

namespace moeccl::bootstrap {

class Lobby {
 public:
  using Id = uint64_t;  // the owner's, never 0 and never used again

  void enter(Id id, int64_t now);
  // It said a right hello, which an overheard one may be, too.
  void said_hello(Id id);
  // It has proved that it belongs here, or is gone.
  void leave(Id id);
  size_t size() const { return waiting_.size(); }
  bool full() const;

  // The one to drop so that another can come in; 0: all are too young.
  Id expendable(int64_t now) const;
  // One whose time is over; 0: none.
  Id overdue(int64_t now) const;
  // When the next one's is; INT64_MAX: nobody waits.
  int64_t next_overdue_ns() const;

  // Whether a new descriptor's number says that few are left (the kernel gives away the lowest one that is free):
  // then strangers must not take them from the rest of the process.
  static bool few_left(int fd);
  // accept() has failed. Success: try again after kPauseNs; it may be strangers who hold what is missing, or it passes.
  // Else the reason to give up, with the remedy.
  Status failed_to_accept(const Status& why, int64_t now);
  void has_accepted() { failing_since_ns_ = 0; }

  static constexpr int64_t kPauseNs = 20'000'000;

 private:
  struct Waiting {
    Id id;
    int64_t since_ns;
    bool said_hello;
  };
  std::deque<Waiting> waiting_;  // oldest first
  int64_t failing_since_ns_ = 0;
};

}  // namespace moeccl::bootstrap
