// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/lobby.h"

#include <sys/resource.h>

#include <algorithm>
#include <limits>

namespace moeccl::bootstrap {
namespace {

// A peer that holds the key needs two round trips and almost no computation; 2 s cover a slow network and a busy host.
constexpr int64_t kHandshakeNs = 2'000'000'000;
// The number of descriptors that strangers may hold at once. 1000 silent ones pass through in 8 batches of kSilentNs.
constexpr size_t kMost = 128;
// The age at which a silent connection makes room for another. A rank sends its hello right after connecting.
constexpr int64_t kSilentNs = 20'000'000;
// The same for a connection that has sent a correct hello, which needs one more round trip.
constexpr int64_t kHalfwayNs = 250'000'000;
// A shortage of descriptors that lasts this long lasts forever, because nothing here gives them back.
constexpr int64_t kFailingNs = 1'000'000'000;
constexpr uint64_t kSpare = 32;  // descriptors; an eighth of the limit if that is less

}  // namespace

void Lobby::enter(Id id, int64_t now) { waiting_.push_back({id, now, false}); }

void Lobby::said_hello(Id id) {
  for (Waiting& w : waiting_) w.said_hello |= w.id == id;
}

void Lobby::leave(Id id) {
  std::erase_if(waiting_, [id](const Waiting& w) { return w.id == id; });
}

bool Lobby::full() const { return waiting_.size() >= kMost; }

Lobby::Id Lobby::expendable(int64_t now) const {
  Id halfway = 0;
  for (const Waiting& w : waiting_) {
    const int64_t age = now - w.since_ns;
    if (!w.said_hello && age >= kSilentNs) return w.id;
    if (halfway == 0 && age >= kHalfwayNs) halfway = w.id;
  }
  return halfway;
}

Lobby::Id Lobby::overdue(int64_t now) const { return now >= next_overdue_ns() ? waiting_.front().id : 0; }

int64_t Lobby::next_overdue_ns() const {
  return waiting_.empty() ? std::numeric_limits<int64_t>::max() : waiting_.front().since_ns + kHandshakeNs;
}

bool Lobby::few_left(int fd) {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  return static_cast<uint64_t>(fd) + std::min<uint64_t>(kSpare, limit.rlim_cur / 8) >= limit.rlim_cur;
}

Status Lobby::failed_to_accept(const Status& why, int64_t now) {
  if (failing_since_ns_ == 0) failing_since_ns_ = now;
  if (now - failing_since_ns_ < kFailingNs) return {};
  return Status(why).with_context("taking the connections of other ranks");
}

}  // namespace moeccl::bootstrap
