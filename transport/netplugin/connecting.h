// SPDX-License-Identifier: Apache-2.0
// How ranks meet through a net plugin: each listens for each peer, the handles travel over the authenticated bootstrap,
// and the first message of every comm proves which rank sends on it.
//
// A plugin's connect and accept must not wait, but some do, so a separate thread makes these calls. When the deadline
// passes or the group has ended, the thread is left behind, and closes what it holds whenever the plugin lets it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "src/base/wire.h"
#include "transport/common/rows.h"
#include "transport/netplugin/loader.h"
#include "transport/netplugin/plugin_link.h"

namespace moeccl::transport::netplugin {

// What one rank tells all ranks, and in a row for each of them.
struct Offer {
  std::string plugin;       // the same on all ranks
  std::string presence;     // Presence::address()
  uint64_t mbit_per_s = 0;  // of all rails; 0: not reported
  bool pieces_only = false;
  bootstrap::Key nonce = {};
  std::vector<double> rails;    // weights
  std::vector<Handle> handles;  // [1 + rails] of the reader's row; empty on the same host

  std::vector<std::byte> write() const;  // without the handles
  // Reads what write() wrote, and the row that follows it. Returns false if this MoECCL cannot read it.
  bool read(std::span<const std::byte> bytes);
};

bootstrap::Key proof_of(const bootstrap::Key& key, const bootstrap::Key& nonce, uint32_t from, uint32_t to,
                        uint32_t comm);

class Connecting : public std::enable_shared_from_this<Connecting> {
 public:
  Connecting(std::shared_ptr<PluginUse> use, const NetworkOptions& options);
  ~Connecting();  // closes what was not taken over

  // Listens for each remote rank, once for each comm.
  Status listen();
  Offer& own() { return own_; }
  std::vector<std::byte> offer() const { return rows_.behind(own_.write(), options_.rank); }
  std::vector<std::vector<std::byte>> rows() const { return rows_.sent_apart(); }
  // Errors name the ranks that are missing.
  Result<std::vector<PeerComms>> connect(std::span<const std::vector<std::byte>> offers);

 private:
  struct Peer {
    uint32_t rank = 0;
    Offer offer;
    std::vector<Comm> listeners;
    PeerComms comms;
    // The proofs that are under way.
    std::vector<Proof> ours, theirs;
    std::vector<Memory> out_memory, in_memory;
    std::vector<Request> sends, receives;
    std::vector<bool> sent, received;

    bool connected() const;
    bool proved() const;
  };
  Status read_offers(std::span<const std::vector<std::byte>> offers);
  Status run();  // runs in the thread
  Status connect_to(Peer& p, bool* moved);
  Status accept_from(Peer& p, bool* moved);
  Status begin_proofs(Peer& p);
  Status move_proofs(Peer& p);
  Status check(const Peer& p, size_t comm) const;
  void close_listeners();
  std::string missing() const;
  bool stopped() const { return stop_.load(std::memory_order_acquire); }

  std::shared_ptr<PluginUse> use_;
  NetworkOptions options_;
  std::vector<PluginUse::Device> devices_;  // of the rails
  std::vector<uint32_t> remote_;
  Offer own_;
  Rows rows_;  // of handles
  std::vector<std::unique_ptr<Peer>> peers_;
  std::atomic<bool> stop_{false};

  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  Status result_;
};

}  // namespace moeccl::transport::netplugin
