// SPDX-License-Identifier: Apache-2.0
// What every link of an OrderedEngine does alike: its puts take their turn in the PutOrder, and a peer that is lost is
// lost once, with a reason.
#pragma once

#include <string>

#include "transport/common/ordered_engine.h"
#include "transport/link.h"

namespace moeccl::transport {

class OrderedLink : public Link, private PutTurns {
 public:
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) final {
    return counted(put_some(offset, src, bytes));
  }
  Status check_peer() final;

 protected:
  // peer: as in "lost PEER: reason".
  OrderedLink(OrderedEngine& engine, std::string peer);
  // As Link::put().
  virtual Result<PutState> put_some(uint64_t offset, const void* src, size_t bytes) = 0;
  // What a put came to: one that is done gives its turn back.
  Result<PutState> counted(Result<PutState> state);

  // Under the engine's lock. Only the first reason counts.
  void lose(const Status& why) noexcept;
  bool down_ = false;

 private:
  bool may_put(uint32_t traffic_class, size_t bytes) final;
  // The peer is lost: what was under way to it is the caller's again.
  virtual void let_go() noexcept = 0;

  OrderedEngine& order_;
  std::string peer_name_, down_text_;
  bool admitted_ = false;  // the put that is called now may go to its end; of the thread that puts
};

}  // namespace moeccl::transport
