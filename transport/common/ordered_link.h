// SPDX-License-Identifier: Apache-2.0
// The common behavior of all links of an OrderedEngine: their puts take turns in the PutOrder, and a peer is lost only
// once, for one reason.
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
  // peer: the name in "lost PEER: reason".
  OrderedLink(OrderedEngine& engine, std::string peer);
  // As Link::put().
  virtual Result<PutState> put_some(uint64_t offset, const void* src, size_t bytes) = 0;
  // Accounts for the result of a put: a put that is done or has failed gives its turn back.
  Result<PutState> counted(Result<PutState> state);

  // The caller holds the engine's lock. Only the first reason counts.
  void lose(const Status& why) noexcept;
  bool down_ = false;

 private:
  bool may_put(uint32_t traffic_class, size_t bytes) final;
  // Called when the peer is lost: returns the sources of unfinished puts to the caller.
  virtual void let_go() noexcept = 0;

  OrderedEngine& order_;
  std::string peer_name_, down_text_;
  bool admitted_ = false;  // the current put may run to its end; only for the thread that puts
};

// Returns why a link loses a peer that sent what it must not send.
Status protocol_error(uint32_t rank, const char* what);

}  // namespace moeccl::transport
