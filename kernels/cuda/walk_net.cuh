// SPDX-License-Identifier: Apache-2.0
// The persistent kernel and ranks on other hosts (walk_net_args.h): what lanes give to the rank's proxy, and the lane
// that takes what the network has delivered.
//
// Flags and what they order:
//   queue.head      released by walk_net_give(), acquired by exec::KernelProxy::turn(): the command, its cell, and
//                   everything that the lane did before it.
//   tail, freed     of a queue: released by exec::KernelProxy::send(), acquired by walk_net_give() and walk_net_cell():
//                   the proxy has read what was there.
//   arrivals.head   released by exec::KernelProxy::deliver(), acquired by walk_net_look(): the arrivals, and the bytes
//                   that the network has written.
//   arrivals.tail   released by walk_net_raise(), acquired by exec::KernelProxy::deliver(): the arrivals were read.
//   word, done      released by walk_net_raise(), acquired by walk_take() and walk_enter(): the copies before.
//   round, finished between the blocks of the last lane.
#pragma once

#include "kernels/cuda/walk_base.cuh"

namespace moeccl::cuda {

MOECCL_DEVICE bool walk_has_net(const WalkArgs& a) { return a.net.state != nullptr; }
MOECCL_DEVICE bool walk_is_elsewhere(const WalkArgs& a, uint32_t rank) {
  return walk_has_net(a) && rank != a.rank && a.peers[rank].staging == a.net.staging;
}
MOECCL_DEVICE bool walk_is_elsewhere(const WalkArgs& a, const WalkRef& ref) {
  return ref.buffer == static_cast<uint8_t>(WalkBuffer::kStaging) && walk_is_elsewhere(a, ref.rank);
}
// Returns the blocks of all lanes except the one that takes arrivals.
MOECCL_DEVICE uint32_t walk_lane_blocks(const WalkArgs& a, const WalkState& w) { return a.n_lanes * w.n_blocks; }

// Called by one thread. Returns false if there was no room before the deadline, or the operation has failed.
MOECCL_DEVICE bool walk_net_give(const WalkArgs& a, const WalkState& w, const WalkPlace& at, uint32_t queue,
                                 uint64_t given, const WalkCommand& command) {
  WalkQueue& q = a.net.queues[queue];
  // Acquire: pairs with the release in exec::KernelProxy::send().
  if (!walk_wait(a, w, at, &q.tail, [&](uint64_t tail) { return given - tail < kNetCommands; })) return false;
  q.commands[given % kNetCommands] = command;
  // Release: pairs with the acquire in exec::KernelProxy::turn().
  store_release_system(&q.head, given + 1);
  return true;
}

MOECCL_DEVICE uint8_t* walk_net_cell_at(const WalkArgs& a, uint32_t queue, uint64_t used) {
  return a.net.cells + (static_cast<size_t>(queue) * kNetCells + used % kNetCells) * a.net.cell_bytes;
}

// Returns the lane's next cell once it is free, or null when the operation fails. All of the lane's threads call it.
MOECCL_DEVICE uint8_t* walk_net_cell(const WalkArgs& a, WalkShared& s, const WalkState& w, const WalkPlace& at) {
  block_sync();
  if (thread_index() == 0) {
    const uint64_t* freed = &a.net.queues[w.lane].freed;
    // Acquire: pairs with the release in exec::KernelProxy::send().
    s.failed = !walk_wait(a, w, at, freed, [&](uint64_t n) { return w.used - n < kNetCells; });
  }
  block_sync();
  return s.failed != 0 ? nullptr : walk_net_cell_at(a, w.lane, w.used);
}

// Sends what the lane's blocks have written to the cell to `offset` of the peer's staging.
MOECCL_DEVICE bool walk_net_put(const WalkArgs& a, WalkShared& s, WalkState& w, const WalkPlace& at, uint64_t offset,
                                uint64_t bytes) {
  if (!walk_meet(a, s, w, &a.header->barrier[w.lane], w.n_blocks, w.met++)) return false;
  if (w.block == 0 && thread_index() == 0) {
    WalkCommand c{};
    c.kind = static_cast<uint32_t>(NetCommand::kPut);
    c.peer = static_cast<uint32_t>(at.peer);
    c.offset = offset;
    c.bytes = static_cast<uint32_t>(bytes);
    c.cell = static_cast<uint32_t>(w.used % kNetCells);
    (void)walk_net_give(a, w, at, w.lane, w.given++, c);  // the next wait sees a failure
  }
  ++w.used;
  return true;
}

// Called by the first thread of the lane's first block.
MOECCL_DEVICE void walk_net_signal(const WalkArgs& a, WalkState& w, const WalkPlace& at, uint32_t sig,
                                   uint32_t number) {
  WalkCommand c{};
  c.kind = static_cast<uint32_t>(NetCommand::kSignal);
  c.peer = static_cast<uint32_t>(at.peer);
  c.sig = sig;
  c.number = number;
  c.tag = static_cast<uint32_t>(w.history >> 32);
  (void)walk_net_give(a, w, at, w.lane, w.given++, c);
}

// Sends the entry to ranks on other hosts; `splits` is [n_ranks] or null. Called by one thread of the first block.
MOECCL_DEVICE void walk_net_enter(const WalkArgs& a, const WalkState& w, const WalkEntry& entry,
                                  const WalkSplit* splits) {
  constexpr uint32_t kOwn = kNetQueues - 1;
  const uint64_t given = a.net.state->given[kOwn]++, used = a.net.state->used[kOwn]++;
  const WalkPlace at{0, 0, a.n_ranks, 0, 0};
  const uint64_t* freed = &a.net.queues[kOwn].freed;
  // Acquire: pairs with the release in exec::KernelProxy::send().
  if (!walk_wait(a, w, at, freed, [&](uint64_t n) { return used - n < kNetCells; })) return;
  auto* cell = reinterpret_cast<WalkEntry*>(walk_net_cell_at(a, kOwn, used));
  *cell = entry;
  auto* to = reinterpret_cast<WalkSplit*>(cell + 1);
  for (uint32_t p = 0; splits != nullptr && p < a.n_ranks; ++p) to[p] = splits[p];
  WalkCommand c{};
  c.kind = static_cast<uint32_t>(NetCommand::kEnter);
  c.bytes = splits != nullptr ? 1 : 0;
  c.cell = static_cast<uint32_t>(used % kNetCells);
  (void)walk_net_give(a, w, at, kOwn, given, c);
}

// Called by one thread of the last block.
MOECCL_DEVICE void walk_net_done(const WalkArgs& a, const WalkState& w) {
  constexpr uint32_t kOwn = kNetQueues - 1;
  WalkCommand c{};
  c.kind = static_cast<uint32_t>(NetCommand::kDone);
  c.offset = w.seq;
  const WalkPlace at{0, 0, a.n_ranks, 0, 0};
  (void)walk_net_give(a, w, at, kOwn, a.net.state->given[kOwn]++, c);
}

// Run by the first block of the last lane: finds the next round's arrivals, or none when all other lanes have left.
MOECCL_DEVICE void walk_net_look(const WalkArgs& a, const WalkState& w, WalkNetState& n) {
  while (true) {
    if (load_relaxed_system(&a.net.arrivals->head) != n.taken) {
      // Acquire: pairs with the release in exec::KernelProxy::deliver().
      const uint64_t head = load_acquire_system(&a.net.arrivals->head);
      n.until = head - n.taken < kNetRound ? head : n.taken + kNetRound;
      break;
    }
    if (load_relaxed_device(&a.header->left) >= walk_lane_blocks(a, w)) {
      (void)load_acquire_device(&a.header->left);  // pairs with the releases in walk_leave()
      n.over = 1;
      break;
    }
    pause();
  }
  add_release_device(&n.round, 1);  // pairs with the acquire in walk_net_receive() of the other blocks
}

// Stores the flags that came with the round, once all blocks have copied what came before them.
MOECCL_DEVICE void walk_net_raise(const WalkArgs& a, const WalkShared& s, const WalkState& w, WalkNetState& n,
                                  uint32_t round) {
  const uint32_t all = (round + 1) * w.n_blocks;
  walk_until(&n.finished, [&](uint32_t blocks) { return blocks >= all; });
  for (uint64_t i = n.taken; i < s.until; ++i) {
    const WalkArrival& arrival = s.arrivals[i - n.taken];
    // Release: pairs with the acquires in walk_take() and walk_enter().
    if (arrival.bytes == 0) store_release_system(walk_done(a.header) + arrival.word, arrival.value);
  }
  n.taken = s.until;
  // Release: pairs with the acquire in exec::KernelProxy::deliver().
  store_release_system(&a.net.arrivals->tail, n.taken);
}

// Runs the last lane. It waits without a deadline for lanes that have one, and leaves when they have left.
MOECCL_DEVICE void walk_net_receive(const WalkArgs& a, WalkShared& s, const WalkState& w) {
  WalkNetState& n = *a.net.state;
  uint8_t* staging = a.peers[a.rank].staging;
  const size_t thread = static_cast<size_t>(w.block) * block_threads() + thread_index();
  const size_t n_threads = static_cast<size_t>(w.n_blocks) * block_threads();
  uint64_t taken = n.taken;  // the first block changes it once all blocks have ended their first round
  for (uint32_t round = 0;; ++round) {
    if (thread_index() == 0) {
      if (w.block == 0) walk_net_look(a, w, n);
      walk_until(&n.round, [&](uint32_t now) { return now > round; });
      s.until = n.until;
      s.last = n.over;
    }
    block_sync();
    if (s.last != 0) return;
    const auto count = static_cast<uint32_t>(s.until - taken);
    for (uint32_t i = thread_index(); i < count; i += block_threads())
      s.arrivals[i] = a.net.arrivals->ring[(taken + i) % kNetArrivals];
    block_sync();
    for (uint32_t i = 0; i < count; ++i) {
      const WalkArrival& arrival = s.arrivals[i];
      if (arrival.bytes > 0)
        copy_span(staging + arrival.value, a.net.staging + arrival.value, arrival.bytes, thread, n_threads);
    }
    block_sync();
    if (thread_index() == 0) {
      add_release_device(&n.finished, 1);  // pairs with the acquire in walk_net_raise()
      if (w.block == 0) walk_net_raise(a, s, w, n, round);
    }
    taken += count;
    block_sync();
  }
}

}  // namespace moeccl::cuda
