// SPDX-License-Identifier: Apache-2.0
// Connections that have not yet proved that they belong here, at a port that anyone can reach. They cost little and
// delay no rank: only a fixed number may wait at once, each has a deadline, and the oldest that has not said anything
// yet makes room for the next. The current time is passed as an argument. The owner keeps the connections themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "src/base/status.h"

namespace moeccl::bootstrap {

class Lobby {
 public:
  using Id = uint64_t;  // chosen by the owner; never 0 and never reused

  void enter(Id id, int64_t now);
  // The connection has sent a correct hello. An overheard hello is correct, too.
  void said_hello(Id id);
  // The connection has proved that it belongs here, or is gone.
  void leave(Id id);
  size_t size() const { return waiting_.size(); }
  bool full() const;

  // Returns the connection to drop so that another can come in, or 0 if all are too young.
  Id expendable(int64_t now) const;
  // Returns a connection whose time is over, or 0 if there is none.
  Id overdue(int64_t now) const;
  // Returns when the time of the next connection is over, or INT64_MAX if none is waiting.
  int64_t next_overdue_ns() const;

  // Returns true if a new descriptor's number shows that few are left (the kernel returns the lowest free number).
  // Strangers must then not take them from the rest of the process.
  static bool few_left(int fd);
  // Call this when accept() has failed. Returns success if it should be tried again after kPauseNs: strangers may hold
  // the missing resources, or the shortage may pass. Otherwise returns the reason to give up, with the remedy.
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
