// SPDX-License-Identifier: Apache-2.0
// The objects of the fake libibverbs: creates and destroys domains, regions, queues and queue pairs, and takes the
// tests' settings of the network.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "tests/support/fake_hardware/fake_ibv_network.h"

using namespace fake;

namespace {

const IbvControl control = {
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
    [](bool on) {
      const std::lock_guard lock(net.mutex);
      net.silent = on;
    },
    [](bool down) {
      const std::lock_guard lock(net.mutex);
      net.down = down;
    },
    [](const char* name, int event, int port) {
      const std::lock_guard lock(net.mutex);
      for (OpenDevice* device : net.devices) {
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
    [](bool dmabuf, bool peermem) {
      const std::lock_guard lock(net.mutex);
      net.dmabuf = dmabuf;
      net.peermem = peermem;
    },
    [](bool late) {
      const std::lock_guard lock(net.mutex);
      net.late_device = late;
      if (!late) land(nullptr);
    },
    [] {
      const std::lock_guard lock(net.mutex);
      land(nullptr);
    },
};

// Returns the file of the emulated CUDA driver that holds an address, or -1 for host memory.
int device_file(const void* p, size_t bytes) {
  const char* const driver = std::getenv("MOECCL_CUDA_DRIVER");
  void* const library = driver == nullptr ? nullptr : dlopen(driver, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return -1;
  auto* const file = reinterpret_cast<int (*)(uint64_t, size_t)>(dlsym(library, "moeccl_emulated_file"));
  const int fd = file == nullptr ? -1 : file(reinterpret_cast<uint64_t>(p), bytes);
  dlclose(library);
  return fd;
}

FakeRegion* make_region(ProtectionDomain* pd, uint64_t base, size_t bytes, int access) {
  auto* r = new FakeRegion();
  r->context = pd->context;
  r->pd = pd;
  r->addr = reinterpret_cast<void*>(base);
  r->base = base;
  r->length = bytes;
  r->access = static_cast<unsigned>(access);
  return r;
}

// Call it under the lock.
MemoryRegion* add_region(FakeRegion* r) {
  r->lkey = r->rkey = net.next_key += 0x100;
  net.regions[r->lkey] = r;
  ++net.counts.regions;
  net.counts.pinned_bytes += r->length;
  net.counts.device_regions += r->device() ? 1 : 0;
  return r;
}

// Maps the file, from its position on, as the NIC's own access to device memory.
MemoryRegion* add_device_region(FakeRegion* r, int fd, uint64_t offset) {
  const off_t at = lseek(fd, 0, SEEK_CUR) + static_cast<off_t>(offset);
  void* const mapped = mmap(nullptr, r->length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);
  if (mapped == MAP_FAILED) {
    delete r;
    errno = EINVAL;
    return nullptr;
  }
  r->mapped = static_cast<std::byte*>(mapped);
  return add_region(r);
}

}  // namespace

namespace fake {

bool are_ports_down() {
  const std::lock_guard lock(net.mutex);
  return net.down;
}

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

FAKE_API const IbvControl* fake_ibv_control() { return &control; }
FAKE_API IbvCounts fake_ibv_counts() {
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
  FakeRegion* const r = make_region(pd, reinterpret_cast<uint64_t>(base), bytes, access);
  const int fd = device_file(base, bytes);
  if (fd < 0) return add_region(r);
  MemoryRegion* made = nullptr;
  if (net.peermem) {
    made = add_device_region(r, fd, 0);
  } else {
    delete r;
    errno = EFAULT;
  }
  close(fd);
  return made;
}
FAKE_API MemoryRegion* ibv_reg_dmabuf_mr(ProtectionDomain* pd, uint64_t offset, size_t bytes, uint64_t address, int fd,
                                         int access) {
  const std::lock_guard lock(net.mutex);
  if (!net.dmabuf || fd < 0 || net.refuse != 0) {
    errno = !net.dmabuf ? EOPNOTSUPP : fd < 0 ? EBADF : net.refuse;
    return nullptr;
  }
  return add_device_region(make_region(pd, address, bytes, access), fd, offset);
}
FAKE_API MemoryRegion* ibv_reg_mr_iova2(ProtectionDomain* pd, void* base, size_t bytes, uint64_t, unsigned access) {
  return ibv_reg_mr(pd, base, bytes, static_cast<int>(access));
}
FAKE_API int ibv_dereg_mr(MemoryRegion* region) {
  const std::lock_guard lock(net.mutex);
  auto* const r = static_cast<FakeRegion*>(region);
  std::erase_if(net.late, [r](const LateWrite& w) { return w.region == r; });
  net.regions.erase(r->lkey);
  --net.counts.regions;
  net.counts.pinned_bytes -= r->length;
  if (r->device()) {
    --net.counts.device_regions;
    munmap(r->mapped, r->length);
  }
  delete r;
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
  if (to != kStateError && to != pair->state + 1) return EINVAL;  // the order is RESET, INIT, RTR, RTS
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
  // A queue pair takes its completions with it when it ends.
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
