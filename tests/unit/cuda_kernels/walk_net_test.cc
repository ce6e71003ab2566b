// SPDX-License-Identifier: Apache-2.0
// The persistent kernel and ranks on other hosts: every rank is elsewhere, and one thread plays all proxies and the
// network. cuda_api shows that the library's own proxy does the same.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <thread>

#include "tests/unit/cuda_kernels/walk_ranks.h"

namespace moeccl::cuda {
namespace {

constexpr uint32_t kDepth = 2, kCell = 4096;

std::atomic_ref<uint64_t> atomic(uint64_t& word) { return std::atomic_ref(word); }

struct RankMemory : WalkRank {
  std::vector<uint64_t> arrived;  // where the network puts
  std::vector<std::vector<uint64_t>> mirrors;
  WalkNetState state{};
  std::vector<WalkQueue> queues;
  std::vector<uint8_t> cells;
  WalkArrivals arrivals{};
  std::deque<WalkArrival> waiting;  // for space among the arrivals
};

WalkStep flag_step(WalkKind kind, uint32_t peer, uint8_t sig, uint16_t run) {
  WalkStep s{};
  s.kind = static_cast<uint8_t>(kind);
  s.sig = sig;
  s.peer = peer;
  s.per_chunk = 1;
  s.run = run;
  if (kind == WalkKind::kWait && sig == 1) s.lag = kDepth;
  return s;
}

// Ranks that can reach each other only over the network.
class Hosts {
 public:
  Hosts(uint32_t n, uint64_t half_bytes) : n_(n), half_(half_bytes), ranks_(n) {
    for (uint32_t me = 0; me < n; ++me) {
      RankMemory& r = ranks_[me];
      r.header.assign(walk_header_bytes(n) / 8, 0);
      r.staging.assign(2 * half_bytes / 8, 0);
      r.arrived = r.staging;
      r.queues.resize(kNetQueues);
      r.cells.assign(size_t{kNetQueues} * kNetCells * kCell, 0);
      for (uint32_t p = 0; p < n; ++p) r.mirrors.push_back(r.header);
      for (uint32_t p = 0; p < n; ++p) {
        auto* header = reinterpret_cast<WalkHeader*>(p == me ? r.header.data() : r.mirrors[p].data());
        auto* staging = reinterpret_cast<uint8_t*>(p == me ? r.staging.data() : r.arrived.data());
        r.peers.push_back({header, staging, nullptr});
      }
      program(me);
    }
    network_ = std::thread([this] {
      while (!stop_) {
        bool moved = false;
        for (uint32_t r = 0; r < n_; ++r) moved = send(r) || moved;
        for (RankMemory& r : ranks_) moved = deliver(r) || moved;
        if (!moved) std::this_thread::yield();
      }
    });
  }
  ~Hosts() {
    stop_ = true;
    network_.join();
  }
  RankMemory& rank(uint32_t r) { return ranks_[r]; }

  WalkArgs args(uint32_t me, size_t count, size_t chunk) {
    RankMemory& r = ranks_[me];
    WalkArgs a = args_of(r, me, n_, {count, 1, chunk}, n_, kDepth);
    a.net = {
        &r.state, r.queues.data(), r.cells.data(), &r.arrivals, reinterpret_cast<uint8_t*>(r.arrived.data()), kCell, 0};
    return a;
  }

  // Half of a rank's blocks take the data that the network delivers.
  void run(const std::vector<WalkArgs>& args, std::vector<uint32_t> blocks, uint64_t seed) {
    for (uint32_t& b : blocks) b *= 2;
    run_walks("moeccl_walk_1", args, blocks, seed);
  }

 private:
  // AllGather: puts into slot `me` of every rank, with rotating slots, and copies from all slots to Output.
  void program(uint32_t me) {
    RankMemory& r = ranks_[me];
    const auto flags = [&](WalkKind kind, uint8_t sig) {
      auto left = static_cast<uint16_t>(n_ - 1);
      for (uint32_t p = 0; p < n_; ++p)
        if (p != me) r.steps.push_back(flag_step(kind, p, sig, left--));
    };
    const auto copy = [&](const WalkRef& dst, const WalkRef& src) {
      WalkStep s{};
      s.kind = static_cast<uint8_t>(WalkKind::kCopy);
      s.run = 1;
      s.dst = dst;
      s.first_src = static_cast<uint32_t>(r.refs.size());
      s.n_srcs = 1;
      r.refs.push_back(src);
      r.steps.push_back(s);
    };
    const auto ref = [](uint32_t rank, WalkBuffer buffer, uint32_t index) -> WalkRef {
      return {rank, static_cast<uint16_t>(index), 0, 1, static_cast<uint8_t>(buffer), 0};
    };
    flags(WalkKind::kWait, 1);
    for (uint32_t p = 0; p < n_; ++p)
      if (p != me) copy(ref(p, WalkBuffer::kStaging, me), ref(me, WalkBuffer::kInput, 0));
    flags(WalkKind::kSignal, 0);
    copy(ref(me, WalkBuffer::kOutput, me), ref(me, WalkBuffer::kInput, 0));
    flags(WalkKind::kWait, 0);
    for (uint32_t p = 0; p < n_; ++p)
      if (p != me) copy(ref(me, WalkBuffer::kOutput, p), ref(me, WalkBuffer::kStaging, p));
    flags(WalkKind::kSignal, 1);
    r.lanes = {{0, static_cast<uint32_t>(r.steps.size())}};
    for (uint32_t p = 0; p < n_; ++p)
      if (p != me) r.totals.push_back({p * kWalkSigs, 1, 1, 0}), r.totals.push_back({p * kWalkSigs + 1, 1, 1, 0});
  }

  void carry(uint32_t from, uint32_t queue, const WalkCommand& c) {
    const uint8_t* cell = &ranks_[from].cells[(size_t{queue} * kNetCells + c.cell) * kCell];
    switch (static_cast<NetCommand>(c.kind)) {
      case NetCommand::kPut: {
        ASSERT_LE(c.offset + c.bytes, 2 * half_);
        RankMemory& to = ranks_[c.peer];
        std::memcpy(reinterpret_cast<uint8_t*>(to.arrived.data()) + c.offset, cell, c.bytes);
        to.waiting.push_back({c.offset, c.bytes, 0});
        return;
      }
      case NetCommand::kSignal:
        ranks_[c.peer].waiting.push_back(
            {static_cast<uint64_t>(c.tag) << 32 | c.number, 0, n_ + from * kWalkSigs + c.sig});
        return;
      case NetCommand::kEnter:
      case NetCommand::kDone:
        break;
    }
    for (uint32_t p = 0; p < n_; ++p) {
      if (p == from) continue;
      if (c.kind == static_cast<uint32_t>(NetCommand::kDone)) {
        ranks_[p].waiting.push_back({c.offset, 0, from});
        continue;
      }
      WalkEntry entry;
      std::memcpy(&entry, cell, sizeof(entry));
      WalkEntry& to = ranks_[p].peers[from].header->entries[entry.seq % kWalkEntries];
      atomic(to.history).store(entry.history, std::memory_order_relaxed);
      atomic(to.signature).store(entry.signature, std::memory_order_relaxed);
      atomic(to.count).store(entry.count, std::memory_order_relaxed);
      atomic(to.plan).store(entry.plan, std::memory_order_relaxed);
      atomic(to.seq).store(entry.seq, std::memory_order_release);
    }
  }
  bool send(uint32_t from) {
    bool moved = false;
    RankMemory& r = ranks_[from];
    uint64_t heads[kNetQueues];
    for (uint32_t q = 0; q < kNetQueues; ++q) heads[q] = atomic(r.queues[q].head).load(std::memory_order_acquire);
    for (uint32_t i = kNetQueues; i > 0; --i) {  // the entries first
      WalkQueue& q = r.queues[i - 1];
      for (; q.tail < heads[i - 1]; moved = true) {
        const WalkCommand c = q.commands[q.tail % kNetCommands];
        carry(from, i - 1, c);
        const auto kind = static_cast<NetCommand>(c.kind);
        if (kind == NetCommand::kPut || kind == NetCommand::kEnter)
          atomic(q.freed).store(q.freed + 1, std::memory_order_release);
        atomic(q.tail).store(q.tail + 1, std::memory_order_release);
      }
    }
    return moved;
  }
  static bool deliver(RankMemory& r) {
    bool moved = false;
    const uint64_t tail = atomic(r.arrivals.tail).load(std::memory_order_acquire);
    while (!r.waiting.empty() && r.arrivals.head - tail < kNetArrivals) {
      r.arrivals.ring[r.arrivals.head % kNetArrivals] = r.waiting.front();
      r.waiting.pop_front();
      atomic(r.arrivals.head).store(r.arrivals.head + 1, std::memory_order_release);
      moved = true;
    }
    return moved;
  }

  uint32_t n_;
  uint64_t half_;
  std::vector<RankMemory> ranks_;
  std::atomic<bool> stop_{false};
  std::thread network_;
};

// Tests pieces of cells, cells and commands that wrap round, several blocks per lane, and ranks that run ahead.
TEST(WalkNet, WhatIsPutToOtherHostsArrivesAsAtNeighbours) {
  Random random(17);
  for (int world = 0; world < 6; ++world) {
    const auto n = static_cast<uint32_t>(2 + random.below(3));
    Hosts hosts(n, 256 << 10);
    for (int op = 0; op < 6; ++op) {
      const size_t count = random.below(4) == 0 ? random.below(3) : random.below(60'000);
      const size_t chunk = 1 + random.below(30'000);
      const size_t at_least = (count + 39) / 40;  // limits the number of chunks to what the emulation runs quickly
      std::vector<WalkArgs> args;
      std::vector<uint32_t> blocks;
      std::vector<uint8_t> want;
      for (uint32_t r = 0; r < n; ++r) {
        RankMemory& m = hosts.rank(r);
        m.in.resize(count + 1);
        for (uint8_t& b : m.in) b = static_cast<uint8_t>(random.bits());
        m.out.assign(n * count + 1, 0xab);
        want.insert(want.end(), m.in.begin(), m.in.begin() + static_cast<ptrdiff_t>(count));
        args.push_back(hosts.args(r, count, std::max(chunk, at_least)));
        blocks.push_back(static_cast<uint32_t>(1 + random.below(2)));
      }
      want.push_back(0xab);
      hosts.run(args, blocks, random.bits());
      for (uint32_t r = 0; r < n; ++r) {
        ASSERT_EQ(hosts.rank(r).report.kind, 0u);
        ASSERT_EQ(hosts.rank(r).completed, static_cast<uint64_t>(op + 1));
        ASSERT_EQ(hosts.rank(r).out, want) << "rank " << r << " of " << n << ", count " << count << ", chunk " << chunk;
      }
    }
  }
}

TEST(WalkNet, ARankElsewhereThatNeverComesIsADeadlineThatNamesIt) {
  Hosts hosts(2, 64 << 10);
  hosts.rank(0).in.assign(10, 1), hosts.rank(0).out.assign(20, 0);
  std::vector<WalkArgs> args{hosts.args(0, 10, 10)};
  args[0].timeout_ns = 200'000'000;
  hosts.run(args, {2}, 3);
  EXPECT_EQ(hosts.rank(0).report.kind, static_cast<uint64_t>(WalkFailure::kDeadline));
  EXPECT_EQ(hosts.rank(0).report.peer, 1u);
  EXPECT_EQ(hosts.rank(0).completed, 1u) << "the kernel has left";
}

TEST(WalkNet, RanksElsewhereThatRunDifferentOperationsFindOut) {
  Hosts hosts(2, 64 << 10);
  std::vector<WalkArgs> args;
  for (uint32_t r = 0; r < 2; ++r) {
    hosts.rank(r).in.assign(20, 1), hosts.rank(r).out.assign(40, 0);
    args.push_back(hosts.args(r, 10 + r, 16));
  }
  hosts.run(args, {1, 1}, 5);
  for (uint32_t r = 0; r < 2; ++r) {
    EXPECT_EQ(hosts.rank(r).report.kind, static_cast<uint64_t>(WalkFailure::kMismatch));
    EXPECT_EQ(hosts.rank(r).report.peer, 1 - r);
    EXPECT_EQ(hosts.rank(r).report.entry.count, 11u - r);
  }
}

}  // namespace
}  // namespace moeccl::cuda
