// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/connecting.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "src/base/log.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "src/driver/thread.h"
#include "transport/common/still_wanted.h"

namespace moeccl::transport::netplugin {
namespace {

constexpr int kNewsEveryMs = 20;  // how often to check whether connecting is still wanted
constexpr int64_t kPause_ns = 50'000;
constexpr size_t kMaxName = 256, kMaxAddress = 100;
constexpr char kMagic[8] = {'M', 'o', 'E', 'C', 'C', 'L', 'n', 'p'};

// Compares in constant time, so that an attacker who guesses learns nothing from how long it takes.
bool same_key(const bootstrap::Key& a, const bootstrap::Key& b) {
  std::byte differs{0};
  for (size_t i = 0; i < a.size(); ++i) differs |= a[i] ^ b[i];
  return differs == std::byte{0};
}

}  // namespace

std::vector<std::byte> Offer::write() const {
  Writer out;
  out.u16(kWireVersion);
  out.string(plugin);
  out.string(presence);
  out.u64(mbit_per_s);
  out.u8(pieces_only ? 1 : 0);
  out.raw(nonce);
  out.u8(static_cast<uint8_t>(rails.size()));
  for (const double w : rails) out.f64(w);
  return out.take();
}

bool Offer::read(std::span<const std::byte> bytes) {
  Reader in(bytes);
  if (in.u16() != kWireVersion) return false;
  plugin = in.string(kMaxName);
  presence = in.string(kMaxAddress);
  mbit_per_s = in.u64();
  pieces_only = in.u8() != 0;
  const auto fresh = in.raw(nonce.size());
  if (fresh.size() == nonce.size()) std::memcpy(nonce.data(), fresh.data(), nonce.size());
  const size_t n_rails = in.u8();
  if (n_rails == 0 || n_rails > kMaxRails) return false;
  rails.clear();
  for (size_t i = 0; i < n_rails; ++i) {
    const double w = in.f64();
    rails.push_back(w > 0 && w < 1e9 ? w : 1);
  }
  const auto row = in.raw(in.left());
  if (!in.ok() || (!row.empty() && row.size() != (1 + n_rails) * sizeof(Handle))) return false;
  handles.resize(row.size() / sizeof(Handle));
  if (!row.empty()) std::memcpy(handles.data(), row.data(), row.size());
  return true;
}

bootstrap::Key proof_of(const bootstrap::Key& key, const bootstrap::Key& nonce, uint32_t from, uint32_t to,
                        uint32_t comm) {
  std::string label = format("moeccl net plugin: rank {} to rank {} on comm {} ", from, to, comm);
  label.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  return bootstrap::derive_key(key, label);
}

Connecting::Connecting(std::shared_ptr<PluginUse> use, const NetworkOptions& options)
    : use_(std::move(use)), options_(options) {
  size_t local_rank = 0;
  for (uint32_t r = 0; r < options_.n_ranks(); ++r) {
    if (options_.remote(r)) {
      remote_.push_back(r);
    } else if (r < options_.rank) {
      ++local_rank;
    }
  }
  devices_ = rails_of_rank(use_->devices(), local_rank);
}

Connecting::~Connecting() {
  NetApi& api = use_->api();
  close_listeners();
  for (const auto& p : peers_) {
    for (size_t i = 0; i < p->comms.pairs.size(); ++i) {
      const PeerComms::Pair& c = p->comms.pairs[i];
      if (i < p->out_memory.size()) (void)api.deregister(c.out, p->out_memory[i]);
      if (i < p->in_memory.size()) (void)api.deregister(c.in, p->in_memory[i]);
      (void)api.close_send(c.out);
      (void)api.close_receive(c.in);
    }
  }
}

void Connecting::close_listeners() {
  for (const auto& p : peers_) {
    for (const Comm l : p->listeners) {
      if (const Status s = use_->api().close_listen(l); !s.ok()) log(LogLevel::kInfo, "{}", s.message());
    }
    p->listeners.clear();
  }
}

Status Connecting::listen() {
  own_.plugin = use_->api().name();
  MOECCL_ASSIGN_OR_RETURN(own_.nonce, bootstrap::random_key());
  for (size_t i = 0; i < devices_.size(); ++i) {
    const double rate = static_cast<double>(devices_[i].is.mbit_per_s);
    own_.rails.push_back(rate > 0 ? rate : 1);
    own_.mbit_per_s += static_cast<uint64_t>(devices_[i].is.mbit_per_s);
    const auto needed = static_cast<int64_t>(remote_.size() * (i == 0 ? 4 : 2));
    if (devices_[i].is.max_comms > 0 && needed > devices_[i].is.max_comms) {
      return error(moecclUnsupported, "net plugin {}: {} takes {} comms, {} are needed for {} ranks of other hosts",
                   use_->api().text(), devices_[i].is.name, devices_[i].is.max_comms, needed, remote_.size());
    }
  }
  const size_t row_bytes = remote_.size() * (1 + own_.rails.size()) * sizeof(Handle);
  const size_t n_ranks = options_.n_ranks();
  if (!rows_fit(n_ranks, row_bytes)) {
    return error(moecclUnsupported,
                 "net plugin {}: the handles of {} ranks with {} rails are more than their meeting point passes on",
                 use_->api().text(), n_ranks, own_.rails.size());
  }
  rows_.to.resize(n_ranks);
  for (const uint32_t r : remote_) {
    peers_.push_back(std::make_unique<Peer>());
    Peer& p = *peers_.back();
    p.rank = r;
    for (size_t c = 0; c <= own_.rails.size(); ++c) {
      const PluginUse::Device& device = devices_[c == 0 ? 0 : c - 1];
      Handle handle = {};
      MOECCL_ASSIGN_OR_RETURN(const Comm listener, use_->api().listen(use_->context(), device.number, &handle));
      p.listeners.push_back(listener);
      const auto bytes = std::as_bytes(std::span(&handle, 1));
      rows_.to[r].insert(rows_.to[r].end(), bytes.begin(), bytes.end());
    }
  }
  return {};
}

Status Connecting::read_offers(std::span<const std::vector<std::byte>> offers) {
  for (const auto& p : peers_) {
    if (!p->offer.read(offers[p->rank]) || p->offer.handles.empty()) {
      return error(moecclRemoteError, "rank {} sent handles of a net plugin that this MoECCL cannot read", p->rank);
    }
    if (p->offer.plugin != own_.plugin) {
      return error(moecclUnsupported,
                   "rank {} has the net plugin {}, rank {} has {}: set MOECCL_NET=plugin:NAME, the same everywhere",
                   p->rank, p->offer.plugin, options_.rank, own_.plugin);
    }
    const size_t rails = std::min(own_.rails.size(), p->offer.rails.size());
    p->comms.rank = p->rank;
    p->comms.where = format("{} {}", own_.plugin, devices_[0].is.name);
    p->comms.presence = p->offer.presence;
    p->comms.pairs.resize(1 + rails);
    for (size_t i = 0; i < rails; ++i) p->comms.pairs[1 + i].weight = std::min(own_.rails[i], p->offer.rails[i]);
  }
  return {};
}

bool Connecting::Peer::connected() const {
  return std::all_of(comms.pairs.begin(), comms.pairs.end(),
                     [](const PeerComms::Pair& c) { return c.out != nullptr && c.in != nullptr; });
}

bool Connecting::Peer::proved() const {
  const auto all = [](const std::vector<bool>& v) { return std::find(v.begin(), v.end(), false) == v.end(); };
  return !sent.empty() && all(sent) && all(received);
}

std::string Connecting::missing() const {
  std::vector<int> ranks;
  for (const auto& p : peers_)
    if (!p->proved()) ranks.push_back(static_cast<int>(p->rank));
  return bootstrap::describe_ranks(ranks);
}

Result<std::vector<PeerComms>> Connecting::connect(std::span<const std::vector<std::byte>> offers) {
  MOECCL_TRY(read_offers(offers));
  // The thread holds a reference to this object, because it may be left behind in the plugin.
  MOECCL_ASSIGN_OR_RETURN(std::thread thread,
                          driver::start_thread("moeccl-meet", [self = shared_from_this()]() mutable {
                            Status s = contained([&] { return self->run(); });
                            {
                              const std::lock_guard lock(self->mutex_);
                              self->result_ = std::move(s);
                              self->done_ = true;
                              self->ended_.notify_all();
                            }
                            self = nullptr;
                          }));
  std::unique_lock lock(mutex_);
  Status wanted;
  while (!done_ && !options_.deadline.passed() && wanted.ok()) {
    ended_.wait_for(lock, std::chrono::milliseconds(kNewsEveryMs));
    wanted = still_wanted(options_.watch);
  }
  // Give a plugin that does not wait a last moment.
  stop_.store(true, std::memory_order_release);
  const bool in_time = ended_.wait_for(lock, std::chrono::milliseconds(10 * kNewsEveryMs), [&] { return done_; });
  lock.unlock();
  if (in_time) {
    thread.join();
  } else {
    thread.detach();
  }
  if (!in_time || (!result_.ok() && result_.code() == moecclTimeout)) {
    MOECCL_TRY(std::move(wanted));
    return error(moecclTimeout,
                 "rank {} has no connection to all other hosts through net plugin {} in time{}: can they reach each "
                 "other over its devices? MOECCL_NET=tcp does without it",
                 options_.rank, use_->api().text(),
                 in_time ? format("; missing: {}", result_.message())
                         : std::string("; it waits in connect or accept, which it must not"));
  }
  MOECCL_TRY(result_);
  std::vector<PeerComms> made;
  for (const auto& p : peers_) {
    made.push_back(std::move(p->comms));
    p->comms.pairs.clear();
  }
  return made;
}

Status Connecting::run() {
  for (;;) {
    bool all = true, moved = false;
    // Connect to all peers before accepting from any: plugins that wait in accept need their peers' connect.
    for (const auto& p : peers_) MOECCL_TRY(connect_to(*p, &moved));
    for (const auto& p : peers_) MOECCL_TRY(accept_from(*p, &moved));
    // Two ranks prove themselves as soon as they are connected: if a third one never comes, their comms are closed
    // without requests under way.
    for (const auto& p : peers_) {
      if (!p->connected()) {
        all = false;
        continue;
      }
      if (p->sent.empty()) MOECCL_TRY(begin_proofs(*p));
      MOECCL_TRY(move_proofs(*p));
      all = all && p->proved();
    }
    if (all) break;
    if (stopped()) return Status(moecclTimeout, missing());
    if (!moved) driver::sleep_ns(kPause_ns);
  }
  close_listeners();
  for (const auto& p : peers_) {
    for (size_t c = 0; c < p->comms.pairs.size(); ++c) {
      MOECCL_TRY(use_->api().deregister(p->comms.pairs[c].out, p->out_memory[c]));
      MOECCL_TRY(use_->api().deregister(p->comms.pairs[c].in, p->in_memory[c]));
    }
    p->out_memory.clear();
    p->in_memory.clear();
  }
  return {};
}

Status Connecting::connect_to(Peer& p, bool* moved) {
  for (size_t c = 0; c < p.comms.pairs.size() && !stopped(); ++c) {
    Comm& out = p.comms.pairs[c].out;
    if (out != nullptr) continue;
    const int device = devices_[c == 0 ? 0 : c - 1].number;
    Result<Comm> made = use_->api().connect(use_->context(), device, &p.offer.handles[c]);
    if (!made.ok()) return std::move(made).status().with_context(format("rank {}", p.rank));
    out = *made;
    *moved = *moved || out != nullptr;
  }
  return {};
}

Status Connecting::accept_from(Peer& p, bool* moved) {
  for (size_t c = 0; c < p.comms.pairs.size() && !stopped(); ++c) {
    Comm& in = p.comms.pairs[c].in;
    if (in != nullptr) continue;
    Result<Comm> made = use_->api().accept(p.listeners[c]);
    if (!made.ok()) return std::move(made).status().with_context(format("rank {}", p.rank));
    in = *made;
    *moved = *moved || in != nullptr;
  }
  return {};
}

Status Connecting::begin_proofs(Peer& p) {
  NetApi& api = use_->api();
  const size_t n = p.comms.pairs.size();
  p.ours.resize(n);
  p.theirs.resize(n);
  p.sends.resize(n);
  p.receives.resize(n);
  for (size_t c = 0; c < n; ++c) {
    const auto comm = static_cast<uint32_t>(c);
    Proof& proof = p.ours[c];
    std::memcpy(proof.magic, kMagic, sizeof(kMagic));
    proof.version = kWireVersion;
    proof.from = options_.rank;
    proof.to = p.rank;
    proof.comm = comm;
    proof.mac = proof_of(options_.key, p.offer.nonce, options_.rank, p.rank, comm);
    MOECCL_ASSIGN_OR_RETURN(const Memory out,
                            api.register_memory(p.comms.pairs[c].out, &proof, sizeof(proof), abi::kPtrHost));
    p.out_memory.push_back(out);
    MOECCL_ASSIGN_OR_RETURN(const Memory in,
                            api.register_memory(p.comms.pairs[c].in, &p.theirs[c], sizeof(Proof), abi::kPtrHost));
    p.in_memory.push_back(in);
  }
  p.sent.assign(n, false);
  p.received.assign(n, false);
  return {};
}

Status Connecting::move_proofs(Peer& p) {
  NetApi& api = use_->api();
  for (size_t c = 0; c < p.ours.size(); ++c) {
    size_t bytes = 0;
    if (!p.received[c]) {
      if (p.receives[c] == nullptr) {
        MOECCL_ASSIGN_OR_RETURN(p.receives[c],
                                api.receive(p.comms.pairs[c].in, &p.theirs[c], sizeof(Proof), p.in_memory[c]));
      }
      if (p.receives[c] != nullptr) {
        MOECCL_ASSIGN_OR_RETURN(const bool done, api.test(p.receives[c], &bytes));
        if (done) MOECCL_TRY(check(p, c));
        p.received[c] = done;
      }
    }
    if (p.sent[c]) continue;
    if (p.sends[c] == nullptr) {
      MOECCL_ASSIGN_OR_RETURN(p.sends[c], api.send(p.comms.pairs[c].out, &p.ours[c], sizeof(Proof), p.out_memory[c]));
    }
    if (p.sends[c] == nullptr) continue;
    MOECCL_ASSIGN_OR_RETURN(const bool done, api.test(p.sends[c], &bytes));
    p.sent[c] = done;
  }
  return {};
}

Status Connecting::check(const Peer& p, size_t comm) const {
  const Proof& proof = p.theirs[comm];
  const auto number = static_cast<uint32_t>(comm);
  const bootstrap::Key expected = proof_of(options_.key, own_.nonce, p.rank, options_.rank, number);
  if (std::memcmp(proof.magic, kMagic, sizeof(kMagic)) == 0 && proof.version == kWireVersion && proof.from == p.rank &&
      proof.to == options_.rank && proof.comm == number && same_key(proof.mac, expected)) {
    return {};
  }
  return error(moecclRemoteError,
               "the peer that connected through net plugin {} in the place of rank {} "
               "does not hold this communicator's key: is a stranger on its network?",
               use_->api().text(), p.rank);
}

}  // namespace moeccl::transport::netplugin
