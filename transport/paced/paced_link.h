// Slows a link whose signals this rank writes itself to the alpha-beta figures of a topology level, so that one machine
// can stand for a cluster. Whatever is timed over it is EMULATED. A signal becomes visible when all bytes before it
// would have crossed both groups' uplinks: uplinks are shared by the ranks of a group, and by
// communicators split from one another, and serve in order of arrival within a class; both directions are independent.
#pragma once

#include <memory>

#include "src/plan/levels.h"
#include "transport/transport.h"

namespace moeccl::transport::paced {

struct PacedUplinks {
  plan::LinkCost cost;
  PaceWords* own = nullptr;   // of this rank's group at the level that the link crosses
  PaceWords* peer = nullptr;  // of the peer's group
};

class PacedLink final : public Link {
 public:
  PacedLink(std::unique_ptr<Link> inner, const PacedUplinks& uplinks) : inner_(std::move(inner)), uplinks_(uplinks) {}

  const char* name() const override { return "paced"; }
  const Board& board() const override { return inner_->board(); }
  const Outbox* outbox(uint64_t) const override { return nullptr; }
  const BlockWord& block(uint64_t seq) const override { return inner_->block(seq); }
  std::byte* staging_view() const override { return inner_->staging_view(); }
  // Direct reads would bypass the pace.
  std::byte* heap_view() const override { return nullptr; }
  size_t heap_bytes() const override { return 0; }
  bool same_process() const override { return false; }
  bool can_read() const override { return false; }
  Status read(uint64_t address, void* dst, size_t bytes) override { return inner_->read(address, dst, bytes); }
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) override;
  void wrote(size_t bytes) override { unsignalled_bytes_ += bytes; }
  bool admit(uint32_t traffic_class) override;
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  Crossing crossing() const override { return crossing_; }
  SignalLine* signal_line(uint32_t sig) override { return inner_->signal_line(sig); }
  Status check_peer() override { return inner_->check_peer(); }

 private:
  std::unique_ptr<Link> inner_;
  int64_t duration_ns() const {
    return static_cast<int64_t>(static_cast<double>(unsignalled_bytes_) / uplinks_.cost.bytes_per_ns);
  }

  PacedUplinks uplinks_;
  uint64_t unsignalled_bytes_ = 0;
  Crossing crossing_;
};

}  // namespace moeccl::transport::paced
