// Reliable queue pairs between threads of one process, as a NIC would move their bytes: regions and their rights are
// checked, queues overrun, a request that fails breaks its queue pair and those after it are flushed.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_hardware/fake_ibv_control.h"
#include "tests/support/fake_hardware/fake_ibv_objects.h"

using namespace moeccl::driver::ibv_abi;

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kPacket = 4096;

struct Domain : ProtectionDomain {};
struct FakeRegion : MemoryRegion {
  unsigned access = 0;
  bool valid = true;  // for peers
};
struct FakePair;
struct FakeQueue : CompletionQueue {
  struct Entry {
    Completion completion;
    FakePair* pair;
    uint32_t retires;
  };
  std::deque<Entry> entries;
  size_t most = 0;
};
struct FakePair : QueuePair {
  QueueCap cap = {};
  uint32_t peer = 0;
  Gid peer_gid = {};
  bool global = false;
  uint32_t under_way = 0;   // slots of the send queue
  uint32_t unretired = 0;   // requests since the last that completed with a completion
  uint64_t in_network = 0;  // requests that wait for the thread
};
struct Request {
  FakePair* pair = nullptr;
  SendRequest wr = {};
  std::vector<std::byte> data;  // inline
  const std::byte* from = nullptr;
  uint32_t lkey = 0;
  uint32_t bytes = 0;
  Clock::time_point due;
  std::vector<size_t> packets;  // offsets that have not arrived yet
};

struct Fabric {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<fake::OpenDevice*> devices;
  std::map<uint32_t, FakePair*> pairs;
  std::map<uint32_t, FakeRegion*> regions;  // by key
  std::vector<FakeQueue*> queues;
  std::deque<Request> network;
  std::thread thread;
  std::mt19937 random{7};
  uint32_t next_pair = 0x11, next_key = 0x100;
  int delay_us = 0;
  bool unordered = false;
  bool stop = false;
  bool fails = false;
  uint32_t fail_pair = 0, fail_vendor = 0;
  int fail_status = 0, refuse = 0;
  uint32_t inline_most = 256;
  fake::IbvCounts counts = {};

  ~Fabric() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }
};
Fabric net;

// Words are stored as words, as PCIe writes them; the last one of a request releases what came before it.
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
  const auto base = reinterpret_cast<uint64_t>(r->addr);
  const bool inside = address >= base && address - base <= r->length && bytes <= r->length - (address - base);
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

// What the peer's NIC and the own one say of it before a byte moves; kSuccess or a status.
int check(Request& r, FakePair** peer, uint32_t* vendor) {
  if (r.bytes > 0 && r.data.empty() &&
      region_of(r.lkey, reinterpret_cast<uint64_t>(r.from), r.bytes, 0, r.pair->pd) == nullptr) {
    *vendor = 0x51;
    return kLocalProtection;
  }
  const auto at = net.pairs.find(r.pair->peer);
  // Nobody answers: the queue pair is gone or broken, or packets go to another address.
  const auto* const device = at == net.pairs.end() ? nullptr : static_cast<fake::OpenDevice*>(at->second->context);
  if (device == nullptr || (at->second->state != kStateReceive && at->second->state != kStateSend)) {
    *vendor = 129;
    return kRetryExceeded;
  }
  if (r.pair->global) {
    bool known = false;
    for (const fake::Port& port : device->nic.ports)
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
  const FakeRegion* const to = region_of(r.wr.wr.rdma.rkey, r.wr.wr.rdma.remote_addr, r.bytes, right, at->second->pd);
  if (to == nullptr || !to->valid) {
    at->second->state = kStateError;
    *vendor = 136;
    return kRemoteAccess;
  }
  return kSuccess;
}

void copy_packet(const Request& r, size_t at) {
  const size_t n = std::min(kPacket, r.bytes - at);
  const std::byte* const own = r.data.empty() ? r.from : r.data.data();
  auto* const remote = reinterpret_cast<std::byte*>(r.wr.wr.rdma.remote_addr);
  if (r.wr.opcode == kRdmaRead) {
    dma(const_cast<std::byte*>(own) + at, remote + at, n);
  } else {
    dma(remote + at, own + at, n);
  }
}

// Under the lock. True when the request has ended.
bool deliver(Request& r, bool all) {
  FakePair* peer = nullptr;
  uint32_t vendor = 0;
  if (r.pair->state == kStateError) {
    complete(r.pair, r.wr, kFlushed, 249);
    return true;
  }
  if (const int status = check(r, &peer, &vendor); status != kSuccess) {
    break_pair(r.pair, r.wr, status, vendor);
    return true;
  }
  if (all) {
    for (const size_t at : r.packets) copy_packet(r, at);
    net.counts.bytes += r.bytes;
    complete(r.pair, r.wr, kSuccess, 0);
    return true;
  }
  return false;
}

// Places packets of requests that are due or not, in any order; completions in order.
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

// Each queue pair keeps its order; they overtake each other.
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

const fake::IbvControl control = {
    [](int most) {
      const std::lock_guard lock(net.mutex);
      net.delay_us = most;
    },
    [](bool on) {
      const std::lock_guard lock(net.mutex);
      net.unordered = on;
    },
    [](uint32_t qp, int status, uint32_t vendor) {
      const std::lock_guard lock(net.mutex);
      net.fails = true;
      net.fail_pair = qp;
      net.fail_status = status;
      net.fail_vendor = vendor;
    },
    [](const char* name, int event, int port) {
      const std::lock_guard lock(net.mutex);
      for (fake::OpenDevice* device : net.devices) {
        if (device->nic.name != name) continue;
        AsyncEvent e = {};
        e.event_type = event;
        e.element.port_num = port;
        if (write(device->event_end, &e, sizeof(e)) != sizeof(e)) std::abort();
      }
    },
    [] {
      const std::lock_guard lock(net.mutex);
      for (auto& [key, region] : net.regions) region->valid = false;
    },
    [](int error) {
      const std::lock_guard lock(net.mutex);
      net.refuse = error;
    },
    [](uint32_t bytes) {
      const std::lock_guard lock(net.mutex);
      net.inline_most = bytes;
    },
};

}  // namespace

namespace fake {

void opened(OpenDevice* device) {
  device->ops.poll_cq = poll_cq;
  device->ops.post_send = post_send;
  const std::lock_guard lock(net.mutex);
  net.devices.push_back(device);
  ++net.counts.contexts;
}

void closed(OpenDevice* device) {
  const std::lock_guard lock(net.mutex);
  std::erase(net.devices, device);
  --net.counts.contexts;
}

}  // namespace fake

FAKE_API const fake::IbvControl* fake_ibv_control() { return &control; }
FAKE_API fake::IbvCounts fake_ibv_counts() {
  const std::lock_guard lock(net.mutex);
  return net.counts;
}

FAKE_API ProtectionDomain* ibv_alloc_pd(Context* context) {
  auto* pd = new Domain();
  pd->context = context;
  const std::lock_guard lock(net.mutex);
  ++net.counts.domains;
  return pd;
}
FAKE_API int ibv_dealloc_pd(ProtectionDomain* pd) {
  const std::lock_guard lock(net.mutex);
  for (const auto& [number, pair] : net.pairs)
    if (pair->pd == pd) return EBUSY;
  for (const auto& [key, region] : net.regions)
    if (region->pd == pd) return EBUSY;
  --net.counts.domains;
  delete static_cast<Domain*>(pd);
  return 0;
}

FAKE_API MemoryRegion* ibv_reg_mr(ProtectionDomain* pd, void* base, size_t bytes, int access) {
  const std::lock_guard lock(net.mutex);
  if (net.refuse != 0) {
    errno = net.refuse;
    return nullptr;
  }
  auto* r = new FakeRegion();
  r->context = pd->context;
  r->pd = pd;
  r->addr = base;
  r->length = bytes;
  r->access = static_cast<unsigned>(access);
  r->lkey = r->rkey = net.next_key += 0x100;
  net.regions[r->lkey] = r;
  ++net.counts.regions;
  net.counts.pinned_bytes += bytes;
  return r;
}
FAKE_API MemoryRegion* ibv_reg_mr_iova2(ProtectionDomain* pd, void* base, size_t bytes, uint64_t, unsigned access) {
  return ibv_reg_mr(pd, base, bytes, static_cast<int>(access));
}
FAKE_API int ibv_dereg_mr(MemoryRegion* region) {
  const std::lock_guard lock(net.mutex);
  net.regions.erase(region->lkey);
  --net.counts.regions;
  net.counts.pinned_bytes -= region->length;
  delete static_cast<FakeRegion*>(region);
  return 0;
}

FAKE_API CompletionQueue* ibv_create_cq(Context* context, int entries, void*, void*, int) {
  auto* q = new FakeQueue();
  q->context = context;
  q->cqe = entries;
  q->most = static_cast<size_t>(entries);
  const std::lock_guard lock(net.mutex);
  net.queues.push_back(q);
  ++net.counts.queues;
  return q;
}
FAKE_API int ibv_destroy_cq(CompletionQueue* queue) {
  const std::lock_guard lock(net.mutex);
  for (const auto& [number, pair] : net.pairs)
    if (pair->send_cq == queue) return EBUSY;
  std::erase(net.queues, static_cast<FakeQueue*>(queue));
  --net.counts.queues;
  delete static_cast<FakeQueue*>(queue);
  return 0;
}

FAKE_API QueuePair* ibv_create_qp(ProtectionDomain* pd, QueuePairInit* init) {
  const std::lock_guard lock(net.mutex);
  if (init->cap.max_inline_data > net.inline_most) {
    errno = EINVAL;
    return nullptr;
  }
  auto* pair = new FakePair();
  pair->context = pd->context;
  pair->pd = pd;
  pair->send_cq = init->send_cq;
  pair->recv_cq = init->recv_cq;
  pair->cap = init->cap;
  pair->qp_type = init->qp_type;
  pair->qp_num = net.next_pair++;
  net.pairs[pair->qp_num] = pair;
  ++net.counts.pairs;
  return pair;
}
FAKE_API int ibv_modify_qp(QueuePair* given, QueuePairAttr* attr, int mask) {
  auto* const pair = static_cast<FakePair*>(given);
  const std::lock_guard lock(net.mutex);
  if ((mask & kMaskState) == 0) return EINVAL;
  const int to = attr->qp_state;
  if (to != kStateError && to != pair->state + 1) return EINVAL;  // RESET, INIT, RTR, RTS
  if (to == kStateReceive) {
    const int needed = kMaskAddress | kMaskMtu | kMaskDestination | kMaskRqPsn | kMaskDestReads | kMaskRnrTimer;
    if ((mask & needed) != needed) return EINVAL;
    pair->peer = attr->dest_qp_num;
    pair->global = attr->ah_attr.is_global != 0;
    pair->peer_gid = attr->ah_attr.grh.dgid;
  }
  const int sending = kMaskTimeout | kMaskRetry | kMaskRnrRetry | kMaskSqPsn | kMaskReads;
  if (to == kStateSend && (mask & sending) != sending) return EINVAL;
  pair->state = to;
  return 0;
}
FAKE_API int ibv_destroy_qp(QueuePair* given) {
  auto* const pair = static_cast<FakePair*>(given);
  const std::lock_guard lock(net.mutex);
  std::erase_if(net.network, [pair](const Request& r) { return r.pair == pair; });
  // A queue pair takes its completions with it.
  auto* const queue = static_cast<FakeQueue*>(pair->send_cq);
  std::erase_if(queue->entries, [pair](const FakeQueue::Entry& e) { return e.pair == pair; });
  net.pairs.erase(pair->qp_num);
  --net.counts.pairs;
  delete pair;
  return 0;
}

FAKE_API int ibv_get_async_event(Context* context, AsyncEvent* event) {
  return read(context->async_fd, event, sizeof(*event)) == static_cast<ssize_t>(sizeof(*event)) ? 0 : -1;
}
FAKE_API void ibv_ack_async_event(AsyncEvent*) {}
FAKE_API const char* ibv_wc_status_str(int status) {
  switch (status) {
    case kRetryExceeded:
      return "transport retry counter exceeded";
    case kRemoteAccess:
      return "remote access error";
    case kLocalProtection:
      return "local protection error";
    default:
      return "some status";
  }
}
