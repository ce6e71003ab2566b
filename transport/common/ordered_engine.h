// SPDX-License-Identifier: Apache-2.0
// What the engines between hosts have in common: a thread that serves the links while no thread of the rank drives
// them, and puts that share lines with those of the process's other communicators (PutOrder).
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "src/base/status.h"
#include "src/driver/process.h"
#include "transport/common/put_order.h"
#include "transport/common/untold_board.h"
#include "transport/engine.h"

namespace moeccl::transport {

class OrderedEngine : public Engine {
 public:
  // Starts the thread. The rank's memory must stay where it is until the engine is destroyed.
  Status start();
  void begin() override;
  void board_changed(bool now) override;
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
  explicit OrderedEngine(const char* thread_name) : thread_name_(thread_name) {}
  // What the thread does again and again: it serves the links unless they are driven(), and waits.
  virtual void step() = 0;
  // Ends a wait of step().
  virtual void wake() = 0;
  // Under the lock: sends the peers what they do not know of the board. Calls untold_.take() first.
  virtual void tell_boards() = 0;
  // Under the lock: whether something is left to send.
  virtual bool unsent() = 0;

  // For step(): whether threads of the rank drive the links, or did since the last call.
  bool driven();
  // For step() after a wake(), by which a drive says that it left something behind. Returns false if there is another
  // drive already; otherwise the next driven() is false.
  bool takes_over();
  // For step(): tells `own` to the peers if it is time.
  void look_at_board(const Board& own);
  // For destructors, which begin with it. Returns false after a fork, where all belongs to the parent: the thread can
  // be neither joined nor destroyed, and nothing else may be ended.
  bool stop();

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
  std::atomic<int> driving_{0};
  UntoldBoard untold_;

 private:
  friend class OrderedLink;
  const char* const thread_name_;
  std::atomic<uint32_t> drives_{0};  // counts begin()
  uint32_t seen_drives_ = ~0u;       // by the thread
  std::atomic<bool> stop_{false};
  driver::ForkGuard process_;
  std::thread thread_;
  PutOrder* order_ = &process_put_order();
  std::atomic<int32_t> running_[kTrafficClasses] = {};  // this rank's running operations, by class
};

}  // namespace moeccl::transport
