// SPDX-License-Identifier: Apache-2.0
// An engine whose puts share lines with those of the process's other communicators: its part of the PutOrder.
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
  // Instead of the process's: for tests, before the first operation.
  void use_put_order(PutOrder& order) { order_ = &order; }

  // Whether a put of so many bytes may begin.
  bool lets_go(uint32_t traffic_class, size_t bytes);
  // Bytes of a link of this engine. What arrives belongs to an operation as what is sent does: a rank that only takes
  // rows keeps the line, too.
  void moved();
  bool any_runs() const;

 protected:
  // Under the lock: nothing is thrown out of it; links whose state is unknown then are lost.
  template <class Body>
  void shielded(Body&& body) noexcept {
    try {
      body();
    } catch (const std::exception& e) {
      lose_all(caught(e));
    }
  }
  virtual void lose_all(const Status& why) noexcept = 0;
  std::mutex mutex_;  // of the engine and its links

 private:
  friend class OrderedLink;
  PutOrder* order_ = &process_put_order();
  std::atomic<int32_t> running_[kTrafficClasses] = {};  // operations of this rank, by class
};

}  // namespace moeccl::transport
