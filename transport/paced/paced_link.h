// SPDX-License-Identifier: Apache-2.0
// Slows a link whose signals this rank writes itself to the alpha-beta figures of a topology level, so that one machine
// can stand in for a cluster. Any time measured over it is EMULATED. A signal becomes visible when all bytes before it
// would have crossed both groups' uplinks. Uplinks are shared by the ranks of a group, and by communicators split from
// one another; within a class they serve in order of arrival. The two directions are independent.
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

class PacedLink final : public Link, private Pace {
 public:
  PacedLink(std::unique_ptr<Link> inner, const PacedUplinks& uplinks);

  const char* name() const override { return "paced"; }
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) override;
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  Status check_peer() override { return inner_->check_peer(); }

 private:
  void wrote(size_t bytes) override { unsignalled_bytes_ += bytes; }
  bool admit(uint32_t traffic_class) override;
  Crossing crossing() const override { return crossing_; }

  std::unique_ptr<Link> inner_;
  int64_t duration_ns() const {
    return static_cast<int64_t>(static_cast<double>(unsignalled_bytes_) / uplinks_.cost.bytes_per_ns);
  }

  PacedUplinks uplinks_;
  uint64_t unsignalled_bytes_ = 0;
  Crossing crossing_;
};

}  // namespace moeccl::transport::paced
