// SPDX-License-Identifier: Apache-2.0
// An engine whose puts share lines with those of the process's other communicators: its part in the PutOrder.
#pragma once

#include <exception>
#include <mutex>

#include "src/base/status.h"
#include "transport/common/put_order.h"
#include "transport/engine.h"

namespace moeccl::transport {

class OrderedEngine : public Engine {
 public:
  void operation(uint32_t traffic_class, bool begins_now) override;
  // Replaces the process-wide order. For tests, before the first operation.
  void use_put_order(PutOrder& order) { order_ = &order; }

  // Returns whether a put of this many bytes may begin.
  bool lets_go(uint32_t traffic_class, size_t bytes);
  // Notes that a link of this engine moved bytes. Received bytes count for an operation like sent ones, so that a rank
  // that only receives rows keeps the line, too.
  void moved();
  bool any_runs() const;

 protected:
  // Runs `body`; the caller holds the lock. No exception escapes: it leaves the links in an unknown state, so all are
  // lost.
  template <class Body>
  void shielded(Body&& body) noexcept {
    try {
      body();
    } catch (const std::exception& e) {
      lose_all(caught(e));
    }
  }
  virtual void lose_all(const Status& why) noexcept = 0;
  std::mutex mutex_;  // protects the engine and its links

 private:
  friend class OrderedLink;
  PutOrder* order_ = &process_put_order();
  std::atomic<int32_t> running_[kTrafficClasses] = {};  // this rank's running operations, by class
};

}  // namespace moeccl::transport
