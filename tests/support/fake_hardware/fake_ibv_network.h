// SPDX-License-Identifier: Apache-2.0
// Internals of the fake libibverbs's data path, shared by its network (fake_ibverbs_network.cc) and the calls that
// create and destroy objects (fake_ibverbs_objects.cc).
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/fake_hardware/fake_ibv_control.h"
#include "tests/support/fake_hardware/fake_ibv_objects.h"

namespace fake {

using namespace moeccl::driver::ibv_abi;
using Clock = std::chrono::steady_clock;

struct Domain : ProtectionDomain {};
struct FakeRegion : MemoryRegion {
  unsigned access = 0;
  bool valid = true;            // for peers
  uint64_t base = 0;            // as requests name it
  std::byte* mapped = nullptr;  // the NIC's mapping of device memory; null: host memory, at `base`
  bool device() const { return mapped != nullptr; }
  std::byte* at(uint64_t address) const {
    return mapped != nullptr ? mapped + (address - base) : reinterpret_cast<std::byte*>(address);
  }
};
// A write into device memory that is still on the bus.
struct LateWrite {
  Context* nic;
  FakeRegion* region;
  std::byte* to;
  std::vector<std::byte> data;
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
  uint32_t unretired = 0;   // requests since the last one that produced a completion
  uint64_t in_network = 0;  // requests that wait for the delivery thread
};
struct Request {
  FakePair* pair = nullptr;
  SendRequest wr = {};
  std::vector<std::byte> data;  // inline
  const std::byte* from = nullptr;
  bool from_device = false;
  uint32_t lkey = 0;
  uint32_t bytes = 0;
  Clock::time_point due;
  std::vector<size_t> packets;  // offsets that have not arrived yet
  // Resolved by check(): the addresses of the bytes on both sides.
  std::byte* own_at = nullptr;
  std::byte* remote_at = nullptr;
  FakeRegion* remote = nullptr;
  Context* remote_nic = nullptr;
};

struct Fabric {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<OpenDevice*> devices;
  std::map<uint32_t, FakePair*> pairs;
  std::map<uint32_t, FakeRegion*> regions;  // by key
  std::vector<FakeQueue*> queues;
  std::deque<Request> network;
  std::thread thread;
  std::mt19937 random{7};
  uint32_t next_pair = 0x11, next_key = 0x100;
  int delay_us = 0;
  bool unordered = false, silent = false, down = false;
  bool stop = false;
  bool fails = false;
  uint32_t fail_pair = 0, fail_vendor = 0;
  int fail_status = 0, refuse = 0;
  uint32_t inline_most = 256;
  bool dmabuf = true, peermem = true, late_device = false;
  std::deque<LateWrite> late;
  IbvCounts counts = {};

  ~Fabric() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }
};
extern Fabric net;

// The calls of a device's context that move data.
int poll_cq(CompletionQueue* given, int n, Completion* out);
int post_send(QueuePair* given, SendRequest* wr, SendRequest** bad);
// Lands the writes that are on the bus in device memory, as a NIC's read does; null: the writes of all NICs.
void land(const Context* nic);

}  // namespace fake
