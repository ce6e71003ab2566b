#include "transport/paced/paced_link.h"

#include <algorithm>

#include "src/base/clock.h"

namespace moeccl::transport::paced {
namespace {

// Reserves `duration` from `earliest` on; returns when it ends.
int64_t reserve(std::atomic<int64_t>& free_ns, int64_t earliest, int64_t duration) {
  int64_t free = free_ns.load(std::memory_order_relaxed);
  int64_t end = 0;
  do {
    end = std::max(free, earliest) + duration;
  } while (!free_ns.compare_exchange_weak(free, end, std::memory_order_relaxed));
  return end;
}

}  // namespace

Result<PutState> PacedLink::put(uint64_t offset, const void* src, size_t bytes) {
  MOECCL_ASSIGN_OR_RETURN(const PutState state, inner_->put(offset, src, bytes));
  if (state == PutState::kDone) unsignalled_bytes_ += bytes;
  return state;
}

Status PacedLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  const int64_t now = now_ns();
  int64_t arrived = now;
  if (unsignalled_bytes_ > 0 && uplinks_.cost.bytes_per_ns > 0) {
    const auto duration = static_cast<int64_t>(static_cast<double>(unsignalled_bytes_) / uplinks_.cost.bytes_per_ns);
    const int64_t out = reserve(uplinks_.own->egress_free_ns, now, duration);
    // The first byte enters the peer's uplink when it has left ours.
    const int64_t in = reserve(uplinks_.peer->ingress_free_ns, out - duration, duration);
    arrived = std::max(out, in);
  }
  unsignalled_bytes_ = 0;
  inner_->signal_line(sig)->visible_ns[number % kVisibleRing].store(
      arrived + static_cast<int64_t>(uplinks_.cost.alpha_ns), std::memory_order_relaxed);
  return inner_->signal(sig, number, tag);
}

}  // namespace moeccl::transport::paced
