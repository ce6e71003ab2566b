// SPDX-License-Identifier: Apache-2.0
// Moves the bytes of one rank's TCP links. The thread that drives the rank's operations does so between its polls;
// while no thread drives, the engine's own thread does, which otherwise sleeps. One lock protects links and sockets.
//
// The engine needs a thread, because a rank that computes must still take what peers put, or they would wait for it,
// and must send the rest of what it put. The thread does not do all the work, because a signal would then cost two more
// context switches (docs/decisions.md).
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "src/driver/poller.h"
#include "transport/common/ordered_engine.h"
#include "transport/tcp/tcp_link.h"

namespace moeccl::transport::tcp {

class TcpEngine final : public OrderedEngine {
 public:
  static Result<std::unique_ptr<TcpEngine>> create();
  // Tells the peers what they do not know yet, as far as the sockets take it within a second, and closes. The links are
  // of no use afterwards and must be destroyed later.
  ~TcpEngine() override;

  // Called before start(); the caller owns the link.
  Result<std::unique_ptr<TcpLink>> add(const LocalMemory& own, TcpPeer peer);

  size_t memory_bytes() const override;
  void end() override;
  void progress(uint32_t awaited = kAnyone) override;
  void board_changed(bool now) override;

 private:
  friend class TcpLink;
  TcpEngine(driver::Poller poller, driver::WakeUp wake)
      : OrderedEngine("moeccl-tcp"), poller_(std::move(poller)), wake_(std::move(wake)) {}

  void step() override;
  void wake() override { wake_.signal(); }
  void tell_boards() override;
  bool unsent() override;
  void lose_all(const Status& why) noexcept override;
  void progress_locked(uint32_t awaited);
  void turn();            // under the lock: events, then every link that can go on
  void drop_satisfied();  // under the lock: removes links from ready_ that have nothing left to do
  // Under the lock. Returns true if that was all there is to do; never at every ask_every-th call.
  bool read_unasked(std::span<TcpLink* const> links, uint32_t ask_every);
  void queue(TcpLink& link);
  void sends(TcpLink& link);  // under the lock: it may have something to send from now on
  bool unacknowledged() const;

  driver::Poller poller_;
  driver::WakeUp wake_;
  std::vector<TcpLink*> links_, link_of_rank_;
  size_t n_streams_ = 0;  // of all links
  uint32_t turns_ = 0;
  std::vector<TcpLink*> ready_, turn_of_;  // links that can go on without a new event; each once (TcpLink::queued_)
  std::vector<TcpLink*> sending_;          // links that unsent() looks at; each once (TcpLink::sending_)
  std::atomic<bool> asleep_{false};        // the thread waits only for sockets
};

}  // namespace moeccl::transport::tcp
