// SPDX-License-Identifier: Apache-2.0
#include "src/world/know_connected.h"

#include <algorithm>

#include "src/driver/thread.h"
#include "transport/words.h"

namespace moeccl::comm {
namespace {

using transport::RankState;

// The time for another rank's word. It has come when the leader's end is seen, unless a rank gets no time to write it.
constexpr int64_t kSeeMs = 300;
constexpr int64_t kLook_ns = 500'000;
// The code of a rank that runs and knows.
constexpr Code kKnows = moecclInProgress;

bool knows(const transport::Board& board) {
  const auto began = [](const transport::Entry& e) { return e.seq.load(std::memory_order_acquire) > 0; };
  if (std::any_of(std::begin(board.entries), std::end(board.entries), began)) return true;
  const auto state = static_cast<RankState>(board.health.state.load(std::memory_order_acquire));
  const auto code = static_cast<Code>(board.health.code.load(std::memory_order_acquire));
  return state == RankState::kLeft || state == RankState::kAborted || (state == RankState::kRunning && code == kKnows);
}

bool some_peer_knows(const exec::Fabric& fabric) {
  for (uint32_t r = 0; r < fabric.n_ranks; ++r)
    if (r != fabric.rank && knows(fabric.link(r).board())) return true;
  return false;
}

}  // namespace

Status know_all_connected(bootstrap::Session& session, exec::Fabric& fabric, Deadline deadline) {
  const Status said = session.barrier(deadline);
  if (!said.ok()) {
    if (said.code() != moecclRemoteError && said.code() != moecclTimeout) return said;
    const Deadline seen = Deadline::earlier(deadline, Deadline::after_ms(kSeeMs));
    while (!some_peer_knows(fabric)) {
      if (seen.passed()) return said;
      driver::sleep_ns(kLook_ns);
    }
  }
  fabric.publish_state(RankState::kRunning, kKnows, "");
  return {};
}

}  // namespace moeccl::comm
