// SPDX-License-Identifier: Apache-2.0
#include "transport/paced/paced_link.h"

#include <algorithm>

#include "src/base/clock.h"
#include "transport/paced/arbiter.h"

namespace moeccl::transport::paced {

PacedLink::PacedLink(std::unique_ptr<Link> inner, const PacedUplinks& uplinks)
    : inner_(std::move(inner)), uplinks_(uplinks) {
  peer_words_ = {&inner_->board(), {&inner_->block(0), &inner_->block(1)}};
  // The view has neither the heap nor a thread's addresses, because direct reads would bypass the pace.
  view_.staging = inner_->view().staging;
  view_.messages = inner_->view().messages;
  view_.signals = inner_->view().signals;
  parts_.pace = this;
}

Result<PutState> PacedLink::put(uint64_t offset, const void* src, size_t bytes) {
  MOECCL_ASSIGN_OR_RETURN(const PutState state, inner_->put(offset, src, bytes));
  if (state == PutState::kDone) unsignalled_bytes_ += bytes;
  return state;
}

bool PacedLink::admit(uint32_t traffic_class) {
  if (unsignalled_bytes_ == 0 || uplinks_.cost.bytes_per_ns <= 0) return true;
  if (uplinks_.own->shared.load(std::memory_order_relaxed) == 0) return true;
  const int64_t now = now_ns();
  const Transfer t{std::min(traffic_class, kTrafficClasses - 1), duration_ns()};
  // Ask both ends, so that both know of the waiting transfer.
  const bool out = may_go(uplinks_.own->egress, t, now), in = may_go(uplinks_.peer->ingress, t, now);
  if (!out || !in) return false;
  went(uplinks_.own->egress, t, now);
  went(uplinks_.peer->ingress, t, now);
  return true;
}

Status PacedLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  const int64_t now = now_ns();
  int64_t arrived = now;
  crossing_ = {};
  if (unsignalled_bytes_ > 0 && uplinks_.cost.bytes_per_ns > 0) {
    const int64_t duration = duration_ns();
    const int64_t out = reserve(uplinks_.own->egress, now, duration);
    // The peer's uplink has room for it from now on. If instead the time of its arrival were reserved, data that
    // arrives before that but is sent later would wait behind it while the uplink is idle.
    const int64_t in = reserve(uplinks_.peer->ingress, now, duration);
    arrived = std::max(out, in);
    crossing_ = {arrived - duration, arrived};
  }
  unsignalled_bytes_ = 0;
  view_.signals[sig].visible_ns[number % kVisibleRing].store(arrived + static_cast<int64_t>(uplinks_.cost.alpha_ns),
                                                             std::memory_order_relaxed);
  return inner_->signal(sig, number, tag);
}

}  // namespace moeccl::transport::paced
