// SPDX-License-Identifier: Apache-2.0
#include "transport/common/ordered_link.h"

#include <mutex>
#include <new>

namespace moeccl::transport {

OrderedLink::OrderedLink(OrderedEngine& engine, std::string peer) : order_(engine), peer_name_(std::move(peer)) {
  parts_.put_turns = this;
}

bool OrderedLink::may_put(uint32_t traffic_class, size_t bytes) {
  if (!admitted_) admitted_ = order_.lets_go(traffic_class, bytes);
  return admitted_;
}

Result<PutState> OrderedLink::counted(Result<PutState> state) {
  if (!state.ok() || *state == PutState::kDone) admitted_ = false;
  if (!state.ok() || *state != PutState::kFull) order_.moved();
  return state;
}

Status OrderedLink::check_peer() {
  const std::lock_guard lock(order_.mutex_);
  if (!down_) return {};
  const auto state = static_cast<RankState>(board().health.state.load(std::memory_order_acquire));
  if (state == RankState::kLeft) return {};  // an orderly leave
  return error(moecclRemoteError, "lost {}: {}", peer_name_, down_text_);
}

void OrderedLink::lose(const Status& why) noexcept {
  if (down_) return;
  down_ = true;
  try {
    down_text_ = why.message();
  } catch (const std::bad_alloc&) {
    down_text_ = "out of memory";  // short enough to need no allocation
  }
  let_go();
}

Status protocol_error(uint32_t rank, const char* what) {
  return error(moecclRemoteError, "rank {} sent {}: do all ranks run the same MoECCL?", rank, what);
}

}  // namespace moeccl::transport
