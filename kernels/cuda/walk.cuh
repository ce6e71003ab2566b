// SPDX-License-Identifier: Apache-2.0
// One launch runs a rank's whole program: its blocks are the teams of the program's lanes, and ranks meet by flags in
// each other's device memory. All ranks' kernels must be resident together, which the host ensures before it launches
// any (world/kernel_side). Every wait has an end: the deadline, the host's request to stop, or a peer that called
// something else; then all blocks leave and the report says why.
//
// Flags and what they order:
//   word[src][sig]  stored by walk_signal() on the sender, acquired by walk_take() here: everything that the
//                   sender's lane did before.
//   done[src]       stored by walk_leave() on the sender, acquired by walk_enter() here two operations later: it
//                   no longer uses our staging and buffers.
//   entries[].seq   stored by walk_enter(), acquired where a peer compares operations.
//   barrier, left   between the blocks of this launch.
//   verdict         from block 0 of this launch to its other blocks: whether it may run. It orders nothing.
// Ranks on other hosts are reached through the rank's proxy: walk_net.cuh.
#pragma once

#include "kernels/cuda/walk_net.cuh"

namespace moeccl::cuda {

// Publishes the entry for peers, and waits for the right to use their staging: they have finished the operation before
// the last. `splits` is what AllToAllv exchanges, this rank's own [n_ranks].
MOECCL_DEVICE bool walk_enter(const WalkArgs& a, WalkShared& s, WalkState& w, const WalkSplit* splits = nullptr) {
  // One thread looks for all: another block may fail meanwhile, and threads that saw different words would part before
  // the next barrier.
  if (thread_index() == 0) s.failed = load_acquire_device(&a.header->failed);
  block_sync();
  if (s.failed != 0) return false;
  if (block_index() == 0) {
    block_sync();  // all have read it
    if (thread_index() == 0) {
      WalkEntry& e = a.header->entries[w.seq % kWalkEntries];
      store_relaxed_system(&e.history, w.history);
      store_relaxed_system(&e.signature, a.signature);
      store_relaxed_system(&e.count, a.count);
      store_relaxed_system(&e.plan, a.plan);
      store_relaxed_system(&e.input, reinterpret_cast<uint64_t>(a.input));
      store_relaxed_system(&e.output, reinterpret_cast<uint64_t>(a.output));
      // Release: pairs with the acquire in walk_differs() and walk_fail() of peers.
      store_release_system(&e.seq, w.seq);
      if (walk_has_net(a)) walk_net_enter(a, w, e, splits);
    }
    for (uint32_t p = thread_index(); p < a.n_ranks; p += block_threads()) {
      if (p == a.rank) {
        // Another launch ended between this one's look at its number and its turn (walk_may_run).
        if (load_relaxed_system(&a.header->seq) + 1 != w.seq) {
          walk_fail(a, w, WalkFailure::kBeside, {0, 0, a.n_ranks, 0, 0});
          store_relaxed_block(&s.failed, 1);
        }
        continue;
      }
      const uint64_t* done = walk_done(a.header) + p;
      const WalkPlace at{0, 0, p, w.seq - 2, 0};
      // Acquire: pairs with the release in walk_leave() of the peer.
      if (!walk_wait(a, w, at, done, [&](uint64_t ended) { return ended + 2 >= w.seq; }))
        store_relaxed_block(&s.failed, 1);
    }
    block_sync();
    if (s.failed != 0) return false;
  }
  return walk_meet(a, s, w, &a.header->barrier[kWalkMostLanes], walk_lane_blocks(a, w), 0);
}

MOECCL_DEVICE uint32_t walk_number(const WalkArgs& a, const WalkStep& step, uint32_t chunk) {
  const uint32_t slot = step.peer * kWalkSigs + step.sig;
  const bool once = step.when != static_cast<uint8_t>(WalkWhen::kEvery);
  return walk_sent(a.header, a.n_ranks)[slot] + (once ? 0 : chunk * step.per_chunk) + step.ordinal + 1;
}

MOECCL_DEVICE void walk_signal(const WalkArgs& a, const WalkState& w, const WalkStep& step, uint32_t chunk) {
  const uint32_t number = walk_number(a, step, chunk);
  uint64_t* word = walk_word(a.peers[step.peer].header, a.n_ranks) + a.rank * kWalkSigs + step.sig;
  // Release: pairs with the acquire in walk_take() on the peer. What the other blocks of the team did came here through
  // walk_meet().
  store_release_system(word, (w.history >> 32) << 32 | number);
}

// Sends a run of signals, by all threads of the lane's first block. Signals to other hosts go one after another,
// because only one thread may issue commands to a queue.
MOECCL_DEVICE void walk_signals(const WalkArgs& a, WalkState& w, uint32_t pc, uint32_t run, uint32_t chunk) {
  for (uint32_t i = thread_index(); i < run; i += block_threads()) {
    const WalkStep& step = w.steps[pc + i];
    if (!walk_is_elsewhere(a, step.peer)) walk_signal(a, w, step, chunk);
  }
  if (!walk_has_net(a) || thread_index() != 0) return;
  for (uint32_t i = 0; i < run; ++i) {
    const WalkStep& step = w.steps[pc + i];
    const WalkPlace at{pc + i, chunk, step.peer, 0, 0};
    if (walk_is_elsewhere(a, step.peer)) walk_net_signal(a, w, at, step.sig, walk_number(a, step, chunk));
  }
}

MOECCL_DEVICE bool walk_take(const WalkArgs& a, const WalkState& w, uint32_t pc, uint32_t chunk) {
  const WalkStep& step = w.steps[pc];
  if (chunk < step.lag) return true;
  const uint32_t slot = step.peer * kWalkSigs + step.sig;
  const bool once = step.when != static_cast<uint8_t>(WalkWhen::kEvery);
  const uint32_t number =
      walk_awaited(a.header, a.n_ranks)[slot] + (once ? 0 : (chunk - step.lag) * step.per_chunk) + step.ordinal + 1;
  const uint64_t* word = walk_word(a.header, a.n_ranks) + slot;
  uint64_t seen = 0;
  WalkPlace at{pc, chunk, step.peer, number, 0};
  // Acquire: pairs with the release in walk_signal().
  const bool came = walk_wait(
      a, w, at, word, [&](uint64_t v) { return static_cast<int32_t>(static_cast<uint32_t>(v) - number) >= 0; }, &seen);
  if (!came || seen >> 32 == w.history >> 32 || step.peer == a.rank) return came;
  // The tag differs: it belongs to the peer's next operation, or the peer runs something else.
  if (!walk_differs(a, w, step.peer, true)) return true;
  at.seen = seen;
  walk_fail(a, w, WalkFailure::kMismatch, at);
  return false;
}

struct WalkSpan {
  uint8_t* data;
  uint64_t elements;
};
// The elements that a reference names of a chunk of a block: parts are whole cache lines. See plan::resolve().
struct WalkPart {
  uint64_t begin;  // of the chunk in the block
  uint64_t first;  // of the part in the chunk
  uint64_t length;
};
MOECCL_DEVICE WalkPart walk_part(const WalkArgs& a, const WalkRef& ref, uint64_t block_length, uint32_t chunk) {
  const uint64_t skipped = a.chunk * chunk;
  const uint64_t begin = skipped < block_length ? skipped : block_length;
  const uint64_t length = block_length - begin < a.chunk ? block_length - begin : a.chunk;
  if (ref.parts <= 1) return {begin, 0, length};
  const uint64_t line = a.element_bytes >= 64 ? 1 : 64 / a.element_bytes;
  const uint64_t even = (length + ref.parts - 1) / ref.parts;
  const uint64_t size = (even + line - 1) / line * line;
  const uint64_t first = size * ref.part < length ? size * ref.part : length;
  return {begin, first, length - first < size ? length - first : size};
}
// The same as plan::slot_base().
MOECCL_DEVICE uint64_t walk_slot(const WalkArgs& a, const WalkRef& ref, uint32_t chunk) {
  const uint64_t whole = a.n_slots * a.slot_elements;
  const uint64_t rotation = chunk % a.depth * (whole + a.n_part_slots * a.part_slot_elements);
  return rotation +
         (ref.index < a.n_slots ? ref.index * a.slot_elements : whole + (ref.index - a.n_slots) * a.part_slot_elements);
}
// The same as plan::resolve(), on the device.
MOECCL_DEVICE WalkSpan walk_resolve(const WalkArgs& a, const WalkState& w, const WalkRef& ref, uint32_t chunk) {
  const WalkPart part = walk_part(a, ref, a.count, chunk);
  uint8_t* base = nullptr;
  uint64_t offset = part.first;
  if (ref.buffer == static_cast<uint8_t>(WalkBuffer::kStaging)) {
    base = a.peers[ref.rank].staging + (w.seq & 1) * a.half_bytes;
    offset = walk_slot(a, ref, chunk) + (ref.index < a.n_slots ? part.first : 0);
  } else {
    const bool input = ref.buffer == static_cast<uint8_t>(WalkBuffer::kInput);
    offset += a.count * ref.index + part.begin;
    if (ref.rank == a.rank) {
      base = input ? static_cast<uint8_t*>(const_cast<void*>(a.input)) : static_cast<uint8_t*>(a.output);
    } else {
      // Visible since the peer's first signal in this operation, for which the plan's builder makes this rank wait.
      const WalkEntry& e = a.peers[ref.rank].header->entries[w.seq % kWalkEntries];
      base = reinterpret_cast<uint8_t*>(load_relaxed_system(input ? &e.input : &e.output));
    }
  }
  return {base == nullptr ? nullptr : base + offset * a.element_bytes, part.length};
}

// `dst` holds the step's elements from `first` on.
template <class E>
MOECCL_DEVICE void walk_piece(const WalkArgs& a, WalkShared& s, const WalkState& w, const WalkStep& step,
                              uint32_t chunk, const WalkSpan& dst, uint64_t first) {
  const Team team{static_cast<size_t>(w.block) * block_threads() + thread_index(),
                  static_cast<size_t>(w.n_blocks) * block_threads()};
  const auto scales = [&](const WalkRef& ref) {
    return a.scaled != 0 && ref.rank == a.rank && ref.buffer == static_cast<uint8_t>(WalkBuffer::kInput);
  };
  const bool sums = step.kind == static_cast<uint8_t>(WalkKind::kReduce);
  if (!sums && !scales(w.refs[step.first_src])) {
    const WalkSpan src = walk_resolve(a, w, w.refs[step.first_src], chunk);
    if (src.elements <= first) return;
    const uint64_t n = src.elements - first < dst.elements ? src.elements - first : dst.elements;
    const uint8_t* from = src.data + first * a.element_bytes;
    if (from != dst.data) copy_span(dst.data, from, n * a.element_bytes, team.thread, team.n_threads);
    return;
  }
  block_sync();  // the last reduction has been read
  for (uint32_t i = thread_index(); i < step.n_srcs; i += block_threads()) {
    const WalkRef& ref = w.refs[step.first_src + i];
    s.reduce.srcs[i] = walk_resolve(a, w, ref, chunk).data + first * a.element_bytes;
    s.reduce.scales[i] = !scales(ref) ? a.unit : a.scale_at != nullptr ? scale_from<E>(a.scale_at) : a.scale;
  }
  if (thread_index() == 0) {
    s.reduce.dst = dst.data;
    s.reduce.count = dst.elements;
    s.reduce.n_srcs = step.n_srcs;
    s.reduce.divisor = (step.flags & kWalkFinal) == 0 ? 0 : step.divisor > 0 ? step.divisor : a.divisor;
    s.reduce.op = sums ? a.op : static_cast<uint32_t>(Op::kSum);
    s.reduce.scaled = a.scaled;
  }
  block_sync();
  reduce<E>(s.reduce, team);
}

// Runs in one piece; data for another host goes in one piece per cell. Returns false if the operation has failed.
template <class E>
MOECCL_DEVICE bool walk_data(const WalkArgs& a, WalkShared& s, WalkState& w, const WalkStep& step, uint32_t chunk) {
  const WalkSpan dst = walk_resolve(a, w, step.dst, chunk);
  const bool elsewhere = walk_is_elsewhere(a, step.dst);
  const WalkPlace at{static_cast<uint64_t>(&step - w.steps), chunk, step.dst.rank, 0, 0};
  const uint64_t most = elsewhere ? a.net.cell_bytes / a.element_bytes : dst.elements;
  for (uint64_t first = 0; first < dst.elements; first += most) {
    WalkSpan piece{dst.data, dst.elements - first < most ? dst.elements - first : most};
    if (elsewhere && (piece.data = walk_net_cell(a, s, w, at)) == nullptr) return false;
    walk_piece<E>(a, s, w, step, chunk, piece, first);
    if (!elsewhere) continue;
    const uint64_t offset = static_cast<uint64_t>(dst.data - a.net.staging) + first * a.element_bytes;
    if (!walk_net_put(a, s, w, at, offset, piece.elements * a.element_bytes)) return false;
  }
  return true;
}

// data(step, chunk) runs a step that neither signals nor waits; it returns false when the operation has failed.
template <class Data>
MOECCL_DEVICE bool walk_lane(const WalkArgs& a, WalkShared& s, WalkState& w, uint32_t n_chunks, Data&& data) {
  const WalkLane lane = a.lanes[w.lane];
  uint32_t* barrier = &a.header->barrier[w.lane];
  for (uint32_t chunk = 0; chunk < n_chunks; ++chunk) {
    for (uint32_t pc = lane.first, next; pc < lane.first + lane.count; pc = next) {
      const WalkStep& step = w.steps[pc];
      next = pc + step.run;
      if (step.when == static_cast<uint8_t>(WalkWhen::kFirst) && chunk != 0) continue;
      if (step.when == static_cast<uint8_t>(WalkWhen::kLast) && chunk + 1 != n_chunks) continue;
      if (step.kind == static_cast<uint8_t>(WalkKind::kSignal) || (step.flags & kWalkBarrier) != 0) {
        if (!walk_meet(a, s, w, barrier, w.n_blocks, w.met++)) return false;
      }
      if (step.kind == static_cast<uint8_t>(WalkKind::kSignal)) {
        if (w.block == 0) walk_signals(a, w, pc, step.run, chunk);
      } else if (step.kind == static_cast<uint8_t>(WalkKind::kWait)) {
        block_sync();
        if (thread_index() == 0) s.failed = 0;
        block_sync();
        for (uint32_t i = thread_index(); i < step.run; i += block_threads())
          if (!walk_take(a, w, pc + i, chunk)) store_relaxed_block(&s.failed, 1);
        block_sync();
        if (s.failed != 0) return false;
      } else if (!data(step, chunk)) {
        return false;
      }
    }
  }
  return true;
}

MOECCL_DEVICE WalkTurn& walk_turn(const WalkArgs& a) { return a.header->turns[a.completed == nullptr ? 1 : 0]; }

// The rank's launches share numbers, flags and staging. Streams and events order them, except a graph's replay and an
// operation that a thread of the library launches: only the program can order these (docs/cuda.md). Returns whether no
// other launch runs. Block 0 finds out for all. Called by one thread of each block.
MOECCL_DEVICE bool walk_may_run(const WalkArgs& a, const WalkState& w) {
  WalkTurn& turn = walk_turn(a);
  if (block_index() != 0) {
    uint32_t verdict = load_relaxed_device(&turn.verdict);
    for (; verdict == 0; verdict = load_relaxed_device(&turn.verdict)) pause();
    return verdict == kWalkRuns;
  }
  const uint64_t now = device_ns();
  if (a.completed != nullptr) store_relaxed_system(&a.report->begun, a.number);
  const bool runs = atomic_add(&a.header->running, 1) == 0;
  if (runs)
    a.header->began_ns = now;
  else
    walk_fail(a, w, WalkFailure::kBeside, {0, 0, a.n_ranks, 0, 0});
  if (grid_blocks() > 1) store_relaxed_device(&turn.verdict, runs ? kWalkRuns : kWalkRefused);
  return runs;
}

// Ends a launch that must not run. It has used nothing but its turn: all else belongs to the other launch.
MOECCL_DEVICE void walk_refused(const WalkArgs& a) {
  if (thread_index() != 0) return;
  WalkTurn& turn = walk_turn(a);
  if (grid_blocks() > 1 && add_release_device(&turn.left, 1) + 1 < grid_blocks()) return;
  turn.left = turn.verdict = 0;
  atomic_add(&a.header->running, ~uint32_t{0});
  // Release: pairs with the acquire in exec::KernelTask::ended().
  if (a.completed != nullptr) store_release_system(a.completed, a.number);
}

// The last block to arrive prepares everything for the next operation, then notifies peers and the host.
MOECCL_DEVICE void walk_leave(const WalkArgs& a, WalkShared& s, const WalkState& w, uint32_t n_chunks) {
  block_sync();
  if (walk_has_net(a) && w.lane < a.n_lanes && w.block == 0 && thread_index() == 0) {
    a.net.state->given[w.lane] = w.given;
    a.net.state->used[w.lane] = w.used;
  }
  if (thread_index() == 0) s.last = grid_blocks() == 1 || add_release_device(&a.header->left, 1) + 1 == grid_blocks();
  block_sync();
  if (s.last == 0) return;
  WalkHeader& h = *a.header;
  const bool failed = load_acquire_device(&h.failed) != 0;
  for (uint32_t i = thread_index(); i < a.n_totals; i += block_threads()) {
    const WalkTotal& t = a.totals[i];
    const uint32_t times = t.once != 0 ? 1 : n_chunks;
    if (t.sent != 0) atomic_add(&walk_sent(&h, a.n_ranks)[t.slot], t.sent * times);
    if (t.awaited != 0) atomic_add(&walk_awaited(&h, a.n_ranks)[t.slot], t.awaited * times);
  }
  if (thread_index() <= kWalkMostLanes) h.barrier[thread_index()] = 0;
  if (thread_index() == 0) {
    if (a.took_ns != nullptr) {
      (void)load_acquire_device(&h.left);  // pairs with the release of the first block, which wrote began_ns
      store_relaxed_system(a.took_ns, device_ns() - h.began_ns);
    }
    h.left = 0;
    walk_turn(a).verdict = 0;
    h.seq = w.seq;
    h.history = w.history;
    if (walk_has_net(a)) a.net.state->round = a.net.state->finished = a.net.state->over = 0;
    atomic_add(&h.running, ~uint32_t{0});
  }
  block_sync();
  for (uint32_t p = thread_index(); !failed && p < a.n_ranks; p += block_threads()) {
    // Release: pairs with the acquire in walk_enter() of the peer.
    if (p != a.rank && !walk_is_elsewhere(a, p)) store_release_system(walk_done(a.peers[p].header) + a.rank, w.seq);
  }
  const bool net = walk_has_net(a);
  if (net) {
    if (!failed && thread_index() == 0) walk_net_done(a, w);
    block_sync();
  }
  // Release: pairs with the acquire in exec::KernelTask::poll() and of peers' hosts. A thread of another warp, so that
  // it does not wait for the stores to peers.
  if (thread_index() == (net ? 0 : block_threads() - 1) && a.completed != nullptr)
    store_release_system(a.completed, a.number);
}

// Finds the operation's number and this block's place, and loads the program into shared memory when it fits. Returns
// false if the launch must not run; then it has ended.
MOECCL_DEVICE bool walk_begin(const WalkArgs& a, WalkShared& s, WalkState& w) {
  w.seq = a.header->seq + 1;
  w.history = walk_mix(walk_mix(walk_mix(a.header->history, a.signature), a.count), a.plan);
  const uint32_t n_lanes = walk_has_net(a) ? a.n_lanes + 1 : a.n_lanes;  // the last one takes what the network delivers
  w.lane = block_index() % n_lanes;
  w.block = block_index() / n_lanes;
  w.n_blocks = grid_blocks() / n_lanes;
  w.met = 0;
  w.used = w.given = 0;
  if (walk_has_net(a) && w.lane < a.n_lanes) {
    w.used = a.net.state->used[w.lane];
    w.given = a.net.state->given[w.lane];
  }
  const bool fits = a.n_steps <= kWalkSharedSteps && a.n_refs <= kWalkSharedRefs;
  w.steps = fits ? s.steps : a.steps;
  w.refs = fits ? s.refs : a.refs;
  if (fits) {
    for (uint32_t i = thread_index(); i < a.n_steps; i += block_threads()) s.steps[i] = a.steps[i];
    for (uint32_t i = thread_index(); i < a.n_refs; i += block_threads()) s.refs[i] = a.refs[i];
  }
  // By a warp that has no part of the program to load. Before the loads it cost walk_rows 80 bytes of spills.
  if (thread_index() + 1 == block_threads()) s.refused = walk_may_run(a, w) ? 0 : 1;
  block_sync();
  if (s.refused != 0) walk_refused(a);
  return s.refused == 0;
}

template <class E>
MOECCL_DEVICE void walk(const WalkArgs& a) {
  MOECCL_SHARED WalkShared s;
  WalkState w;
  if (!walk_begin(a, s, w)) return;
  if (w.lane == a.n_lanes) {
    walk_net_receive(a, s, w);
  } else if (walk_enter(a, s, w)) {
    (void)walk_lane(a, s, w, a.n_chunks,
                    [&](const WalkStep& step, uint32_t chunk) { return walk_data<E>(a, s, w, step, chunk); });
  }
  walk_leave(a, s, w, a.n_chunks);
}

}  // namespace moeccl::cuda
