// SPDX-License-Identifier: Apache-2.0
// Moves the bytes of one rank's links through a net plugin. The thread that drives the rank's operations does so
// between its polls; while no thread drives, the engine's own thread does. A plugin offers nothing to sleep on, so that
// thread polls again and again, less often while nothing comes. One lock protects the links and the plugin's comms.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/common/ordered_engine.h"
#include "transport/common/presence.h"
#include "transport/netplugin/bounce_pool.h"
#include "transport/netplugin/loader.h"
#include "transport/netplugin/plugin_link.h"

namespace moeccl::transport::netplugin {

class PluginEngine final : public OrderedEngine {
 public:
  static Result<std::unique_ptr<PluginEngine>> create(std::shared_ptr<PluginUse> use, size_t n_links, size_t n_rails);
  // Tells the peers what they do not know yet, waits at most a second until they have heard it, and closes all comms.
  // The links are of no use afterwards and must be destroyed later.
  ~PluginEngine() override;

  // Called before start(); the caller owns the link. The engine owns the comms, even if this fails. pieces_only: the
  // peer's staging is CUDA memory.
  Result<std::unique_ptr<PluginLink>> add(const LocalMemory& own, PeerComms peer, int memory_type, bool pieces_only);

  // Called before start(), so that peers can ask after this rank, and this rank after peers that acknowledge nothing.
  void ask_after(Presence own, Questions peers) {
    presence_ = std::move(own);
    questions_ = std::move(peers);
  }

  size_t memory_bytes() const override;
  void end() override;
  void progress(uint32_t awaited = kAnyone) override;

  NetApi& api() { return use_->api(); }
  BouncePool& pool() { return pool_; }
  bool pieces_only(uint32_t rank) const { return pieces_only_[rank]; }

 private:
  friend class PluginLink;
  explicit PluginEngine(std::shared_ptr<PluginUse> use);

  void step() override;
  void wake() override;
  void tell_boards() override;
  bool unsent() override;
  void lose_all(const Status& why) noexcept override {
    for (PluginLink* link : links_) link->lose(why);
  }
  bool turn();  // under the lock: every link; returns whether something moved
  // For step(), without the lock. Asks the peers for answers while operations run, and the hosts of those that give
  // none.
  void ask();
  void say_farewell();

  std::shared_ptr<PluginUse> use_;
  BouncePool pool_;
  std::vector<PluginLink*> links_, link_of_rank_;
  std::vector<bool> pieces_only_;
  uint32_t turns_ = 0;
  int64_t pause_ns_;  // of the thread, between its polls
  Presence presence_;
  Questions questions_;
  int64_t looked_ns_ = 0, signs_ns_ = 0, answered_ns_ = 0;  // when the thread last did so
  std::mutex sleep_mutex_;
  std::condition_variable sleep_;
  bool woken_ = false;  // under sleep_mutex_
};

}  // namespace moeccl::transport::netplugin
