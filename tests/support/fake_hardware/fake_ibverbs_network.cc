// SPDX-License-Identifier: Apache-2.0
// Reliable queue pairs between threads of one process that move bytes as a NIC would: regions and their rights are
// checked, queues overrun, a request that fails breaks its queue pair, and the requests after it are flushed.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "tests/support/fake_hardware/fake_ibv_network.h"

namespace fake {

Fabric net;

void land(const Context* nic) {
  for (LateWrite& w : net.late)
    if (nic == nullptr || w.nic == nic) std::memcpy(w.to, w.data.data(), w.data.size());
  std::erase_if(net.late, [nic](const LateWrite& w) { return nic == nullptr || w.nic == nic; });
}

namespace {

constexpr size_t kPacket = 4096;

// Stores words as words, as PCIe writes them. The last word of a request releases the ones before it.
void dma(std::byte* to, const std::byte* from, size_t n) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; };
  if (n <= 512 && n % 8 == 0 && aligned(to)) {
    for (size_t at = 0; at < n; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, from + at, 8);
      reinterpret_cast<std::atomic<uint64_t>*>(to + at)->store(word, std::memory_order_release);
    }
  } else {
    std::memcpy(to, from, n);
  }
}

FakeRegion* region_of(uint32_t key, uint64_t address, uint32_t bytes, unsigned access, const ProtectionDomain* pd) {
  const auto at = net.regions.find(key);
  if (at == net.regions.end()) return nullptr;
  FakeRegion* const r = at->second;
  const bool inside = address >= r->base && address - r->base <= r->length && bytes <= r->length - (address - r->base);
  return r->pd == pd && inside && (r->access & access) == access ? r : nullptr;
}

void complete(FakePair* pair, const SendRequest& wr, int status, uint32_t vendor) {
  ++pair->unretired;
  const bool told = status != kSuccess || (wr.send_flags & kSendSignaled) != 0;
  if (!told) return;
  auto* const queue = static_cast<FakeQueue*>(pair->send_cq);
  if (queue->entries.size() >= queue->most) {
    ++net.counts.overruns;
    return;
  }
  Completion c = {};
  c.wr_id = wr.wr_id;
  c.status = status;
  c.vendor_err = vendor;
  c.qp_num = pair->qp_num;
  queue->entries.push_back({c, pair, std::exchange(pair->unretired, 0)});
  ++net.counts.completions;
}

void break_pair(FakePair* pair, const SendRequest& wr, int status, uint32_t vendor) {
  pair->state = kStateError;
  complete(pair, wr, status, vendor);
}

// Checks a request on both NICs before a byte moves. Returns kSuccess or an error status.
int check(Request& r, FakePair** peer, uint32_t* vendor) {
  r.own_at = r.data.data();
  if (r.bytes > 0 && r.data.empty()) {
    const FakeRegion* const own = region_of(r.lkey, reinterpret_cast<uint64_t>(r.from), r.bytes, 0, r.pair->pd);
    if (own == nullptr) {
      *vendor = 0x51;
      return kLocalProtection;
    }
    r.own_at = own->at(reinterpret_cast<uint64_t>(r.from));
    r.from_device = own->device();
  }
  const auto at = net.pairs.find(r.pair->peer);
  // There is no answer: the queue pair is gone or broken, or packets go to another address.
  const auto* const device = at == net.pairs.end() ? nullptr : static_cast<OpenDevice*>(at->second->context);
  if (device == nullptr || (at->second->state != kStateReceive && at->second->state != kStateSend)) {
    *vendor = 129;
    return kRetryExceeded;
  }
  if (r.pair->global) {
    bool known = false;
    for (const Port& port : device->nic.ports)
      for (const std::string& hex : port.gids) {
        Gid gid = {};
        for (size_t i = 0; i < 16; ++i)
          gid.raw[i] = static_cast<uint8_t>(std::strtoul(hex.substr(2 * i, 2).c_str(), nullptr, 16));
        known = known || std::memcmp(gid.raw, r.pair->peer_gid.raw, 16) == 0;
      }
    if (!known) {
      *vendor = 129;
      return kRetryExceeded;
    }
  }
  *peer = at->second;
  if (r.bytes == 0) return kSuccess;
  const unsigned right = r.wr.opcode == kRdmaRead ? kRemoteRead : kRemoteWrite;
  FakeRegion* const to = region_of(r.wr.wr.rdma.rkey, r.wr.wr.rdma.remote_addr, r.bytes, right, at->second->pd);
  if (to == nullptr || !to->valid) {
    at->second->state = kStateError;
    *vendor = 136;
    return kRemoteAccess;
  }
  r.remote = to;
  r.remote_at = to->at(r.wr.wr.rdma.remote_addr);
  r.remote_nic = at->second->context;
  return kSuccess;
}

void copy_packet(const Request& r, size_t at) {
  const size_t n = std::min(kPacket, r.bytes - at);
  if (r.wr.opcode == kRdmaRead) {
    if (r.remote->device()) land(r.remote_nic);
    dma(r.own_at + at, r.remote_at + at, n);
  } else if (r.remote->device() && net.late_device) {
    net.late.push_back({r.remote_nic, r.remote, r.remote_at + at, {r.own_at + at, r.own_at + at + n}});
    ++net.counts.late;
  } else {
    dma(r.remote_at + at, r.own_at + at, n);
  }
}

// Call it under the lock. Returns true when the request has ended.
bool deliver(Request& r, bool all) {
  FakePair* peer = nullptr;
  uint32_t vendor = 0;
  if (r.pair->state == kStateError) {
    complete(r.pair, r.wr, kFlushed, 249);
    return true;
  }
  if (net.silent) return true;
  if (const int status = check(r, &peer, &vendor); status != kSuccess) {
    break_pair(r.pair, r.wr, status, vendor);
    return true;
  }
  if (all) {
    for (const size_t at : r.packets) copy_packet(r, at);
    net.counts.bytes += r.bytes;
    if (r.bytes > 0 && r.wr.opcode != kRdmaRead) {
      net.counts.device_bytes_in += r.remote->device() ? r.bytes : 0;
      net.counts.device_bytes_out += r.from_device ? r.bytes : 0;
    }
    complete(r.pair, r.wr, kSuccess, 0);
    return true;
  }
  return false;
}

// Places packets of requests in any order, whether they are due or not. Completions come in order.
void deliver_unordered(std::unique_lock<std::mutex>&) {
  for (size_t tries = 0; tries < 64 && !net.network.empty(); ++tries) {
    Request& r = net.network[net.random() % net.network.size()];
    FakePair* peer = nullptr;
    uint32_t vendor = 0;
    if (r.packets.empty() || r.pair->state == kStateError || check(r, &peer, &vendor) != kSuccess) continue;
    const size_t i = net.random() % r.packets.size();
    copy_packet(r, r.packets[i]);
    r.packets.erase(r.packets.begin() + static_cast<std::ptrdiff_t>(i));
  }
  const auto now = Clock::now();
  while (!net.network.empty() && net.network.front().due <= now) {
    deliver(net.network.front(), true);
    --net.network.front().pair->in_network;
    net.network.pop_front();
  }
}

// Delivers due requests. Each queue pair keeps its order, but queue pairs overtake each other.
void deliver_due() {
  const auto now = Clock::now();
  std::set<const FakePair*> held;
  for (auto at = net.network.begin(); at != net.network.end();) {
    if (at->due > now || held.contains(at->pair)) {
      held.insert(at->pair);
      ++at;
      continue;
    }
    deliver(*at, true);
    --at->pair->in_network;
    at = net.network.erase(at);
  }
}

void run() {
  std::unique_lock lock(net.mutex);
  while (!net.stop) {
    if (net.network.empty()) {
      net.changed.wait_for(lock, std::chrono::milliseconds(50));
      continue;
    }
    if (net.unordered) {
      deliver_unordered(lock);
    } else {
      deliver_due();
    }
    net.changed.wait_for(lock, std::chrono::microseconds(20));
  }
}

}  // namespace

int post_send(QueuePair* given, SendRequest* wr, SendRequest** bad) {
  auto* const pair = static_cast<FakePair*>(given);
  const std::lock_guard lock(net.mutex);
  for (; wr != nullptr; wr = wr->next) {
    *bad = wr;
    if (pair->state != kStateSend && pair->state != kStateError) return EINVAL;
    if (pair->under_way >= pair->cap.max_send_wr) {
      ++net.counts.overruns;
      return ENOMEM;
    }
    Request r;
    r.pair = pair;
    r.wr = *wr;
    for (int i = 0; i < wr->num_sge; ++i) r.bytes += wr->sg_list[i].length;
    if (wr->num_sge > 0) {
      r.from = reinterpret_cast<const std::byte*>(wr->sg_list[0].addr);
      r.lkey = wr->sg_list[0].lkey;
    }
    if ((wr->send_flags & kSendInline) != 0) {
      if (r.bytes > pair->cap.max_inline_data) return ENOMEM;
      r.data.assign(r.from, r.from + r.bytes);
    }
    for (size_t at = 0; at < r.bytes; at += kPacket) r.packets.push_back(at);
    ++pair->under_way;
    net.counts.most_under_way = std::max(net.counts.most_under_way, pair->under_way);
    ++net.counts.requests;
    if (net.fails && (net.fail_pair == 0 || net.fail_pair == pair->qp_num)) {
      net.fails = false;
      break_pair(pair, r.wr, net.fail_status, net.fail_vendor);
      continue;
    }
    if (net.delay_us == 0 && pair->in_network == 0) {
      deliver(r, true);
      continue;
    }
    r.due = Clock::now() + std::chrono::microseconds(net.random() % static_cast<unsigned>(net.delay_us + 1));
    ++pair->in_network;
    net.network.push_back(std::move(r));
    if (!net.thread.joinable()) net.thread = std::thread(run);
  }
  net.changed.notify_all();
  return 0;
}

int poll_cq(CompletionQueue* given, int n, Completion* out) {
  auto* const queue = static_cast<FakeQueue*>(given);
  const std::lock_guard lock(net.mutex);
  int taken = 0;
  while (taken < n && !queue->entries.empty()) {
    const FakeQueue::Entry& e = queue->entries.front();
    out[taken++] = e.completion;
    if (e.pair != nullptr) e.pair->under_way -= e.retires;
    queue->entries.pop_front();
  }
  return taken;
}

}  // namespace fake
