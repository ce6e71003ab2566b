// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/comm_queue.h"

namespace moeccl::transport::netplugin {

Status CommQueue::post() {
  while (posted_ < n_ && posted_ < kDepth) {
    Posted& p = entries_[(first_ + posted_) % kCapacity];
    const Transfer& t = p.is;
    // A plugin whose flush returns no request has nothing to flush; the transfer is posted as done.
    Result<Request> request = t.flush               ? api_->flush(comm_, t.data, t.bytes, t.memory)
                              : way_ == Way::kSends ? api_->send(comm_, t.data, t.bytes, t.memory)
                                                    : api_->receive(comm_, t.data, t.bytes, t.memory);
    if (!request.ok()) return std::move(request).status();
    if (*request == nullptr && !t.flush) return {};
    p.request = *request;
    ++posted_;
  }
  return {};
}

Result<bool> CommQueue::take_done(Transfer* t, size_t* bytes) {
  *bytes = 0;
  if (posted_ == 0) return false;
  const Posted& p = entries_[first_];
  if (p.request != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(const bool done, api_->test(p.request, bytes));
    if (!done) return false;
  }
  *t = p.is;
  first_ = (first_ + 1) % kCapacity;
  --n_;
  --posted_;
  return true;
}

}  // namespace moeccl::transport::netplugin
