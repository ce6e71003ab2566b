// SPDX-License-Identifier: Apache-2.0
// The persistent kernel (walk.cuh) for rows and for blocks of unequal sizes. The launch does not know the number of
// chunks: the routing's tables or all ranks' entries determine it.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/walk.cuh"
#include "kernels/cuda/walk_rows_args.h"

// One kernel serves all types: the code that differs between them is called, with arguments in shared memory, so that
// the rest is compiled once. Twelve kernels took 200 s of nvcc.
#if defined(__CUDACC__)
#define MOECCL_DEVICE_CALL __device__ __noinline__
#else
#define MOECCL_DEVICE_CALL inline
#endif

namespace moeccl::cuda {

struct WalkRowsShared : WalkShared {
  ReduceRowsKernelArgs sums;
  const void* bases[kMaxSources];  // of the sums
  RowsKernelArgs rows;
};

MOECCL_DEVICE_CALL void walk_call_copy_rows(const RowsKernelArgs& a, size_t thread, size_t n_threads) {
  copy_rows(a, Team{thread, n_threads});
}
template <class E>
MOECCL_DEVICE_CALL void walk_call_scale_rows(const RowsKernelArgs& a, size_t thread, size_t n_threads) {
  scale_rows<E>(a, Team{thread, n_threads});
}
template <class E>
MOECCL_DEVICE_CALL void walk_call_reduce_packs(const ReduceRowsKernelArgs& a, size_t thread, size_t n_threads) {
  reduce_packs<E>(a, Team{thread, n_threads});
}
template <class E>
MOECCL_DEVICE_CALL void walk_call_reduce_elements(const ReduceRowsKernelArgs& a, size_t thread, size_t n_threads) {
  reduce_elements<E>(a, Team{thread, n_threads});
}

// A call too: inlined, it costs the kernel 8 to 16 bytes of stack on sm_80 and sm_100.
MOECCL_DEVICE_CALL bool walk_call_has_packs(const ReduceRowsKernelArgs& a, size_t row_bytes) {
  return has_packs(a, row_bytes);
}

MOECCL_DEVICE void walk_scale_rows(uint32_t type, const RowsKernelArgs& a, const Team& team) {
  switch (type) {
#define MOECCL_CASE(number, Type)                               \
  case number:                                                  \
    walk_call_scale_rows<Type>(a, team.thread, team.n_threads); \
    break;
    MOECCL_FOR_EACH_TYPE(MOECCL_CASE)
#undef MOECCL_CASE
  }
}
MOECCL_DEVICE void walk_reduce_rows(uint32_t type, const ReduceRowsKernelArgs& a, size_t row_bytes, const Team& team) {
  const bool packs = walk_call_has_packs(a, row_bytes);
  switch (type) {
#define MOECCL_CASE(number, Type)                                      \
  case number:                                                         \
    if (packs)                                                         \
      walk_call_reduce_packs<Type>(a, team.thread, team.n_threads);    \
    else                                                               \
      walk_call_reduce_elements<Type>(a, team.thread, team.n_threads); \
    break;
    MOECCL_FOR_EACH_TYPE(MOECCL_CASE)
#undef MOECCL_CASE
  }
}

MOECCL_DEVICE Team walk_team(const WalkState& w) {
  return {static_cast<size_t>(w.block) * block_threads() + thread_index(),
          static_cast<size_t>(w.n_blocks) * block_threads()};
}

// Returns row 0 of a buffer or slot, or of its scales (plane 1). In staging, these follow the rows of all slots.
MOECCL_DEVICE uint8_t* walk_row_base(const WalkRowsArgs& a, const WalkState& w, const WalkRef& ref, uint32_t chunk,
                                     uint32_t plane) {
  const WalkArgs& k = a.walk;
  if (ref.buffer == static_cast<uint8_t>(WalkBuffer::kStaging)) {
    const uint64_t slot = static_cast<uint64_t>(chunk % k.depth) * k.n_slots + ref.index;
    const uint64_t row_bytes = k.element_bytes - a.scale_bytes;
    const uint64_t at =
        plane == 0 ? slot * row_bytes : static_cast<uint64_t>(k.depth) * k.n_slots * row_bytes + slot * a.scale_bytes;
    return k.peers[ref.rank].staging + (w.seq & 1) * k.half_bytes + at * k.slot_elements;
  }
  const bool input = ref.buffer == static_cast<uint8_t>(WalkBuffer::kInput);
  const void* base = plane == 0 ? (input ? k.input : k.output) : (input ? a.input_scales : a.output_scales);
  return static_cast<uint8_t*>(const_cast<void*>(base));
}

MOECCL_DEVICE uint32_t walk_planes(const WalkRowsArgs& a) { return a.scale_bytes > 0 ? 2 : 1; }
MOECCL_DEVICE size_t walk_row_bytes(const WalkRowsArgs& a, uint32_t plane) {
  return plane == 0 ? a.walk.element_bytes - a.scale_bytes : a.scale_bytes;
}

// Rows of a step's dst from `first` on, and where they are made: in place, or in a cell for another host.
struct WalkRowPiece {
  uint8_t* dst;
  uint64_t dst_first, first, count;
};

// Calls make(piece) for all `count` rows of a plane, in one piece per cell if they go to another host. dst_first of the
// list is the final place of the first row. Returns false if the operation has failed.
template <class Make>
MOECCL_DEVICE bool walk_row_pieces(const WalkRowsArgs& a, WalkRowsShared& s, WalkState& w, const WalkStep& step,
                                   uint32_t chunk, uint32_t plane, uint64_t dst_first, uint64_t count, Make&& make) {
  const bool elsewhere = walk_is_elsewhere(a.walk, step.dst);
  uint8_t* const base = walk_row_base(a, w, step.dst, chunk, plane);
  const uint64_t row_bytes = walk_row_bytes(a, plane);
  const uint64_t most = elsewhere ? a.walk.net.cell_bytes / row_bytes : count;
  const WalkPlace at{static_cast<uint64_t>(&step - w.steps), chunk, step.dst.rank, 0, 0};
  for (uint64_t first = 0; first < count; first += most) {
    WalkRowPiece piece{base, dst_first, first, count - first < most ? count - first : most};
    if (elsewhere) {
      piece.dst = walk_net_cell(a.walk, s, w, at);
      if (piece.dst == nullptr) return false;
      piece.dst_first = 0;
    }
    make(piece);
    if (!elsewhere) continue;
    const uint64_t offset = static_cast<uint64_t>(base - a.walk.net.staging) + (dst_first + first) * row_bytes;
    if (!walk_net_put(a.walk, s, w, at, offset, piece.count * row_bytes)) return false;
  }
  return true;
}

MOECCL_DEVICE bool walk_rows_copy(const WalkRowsArgs& a, WalkRowsShared& s, WalkState& w, const WalkStep& step,
                                  uint32_t chunk, const WalkRowBlock& block) {
  const Team team = walk_team(w);
  for (uint32_t plane = 0; plane < walk_planes(a); ++plane) {
    const bool through =
        walk_row_pieces(a, s, w, step, chunk, plane, block.dst_first, block.count, [&](const WalkRowPiece& piece) {
          block_sync();  // the last arguments have been read
          if (thread_index() == 0) {
            RowsKernelArgs& k = s.rows;
            k.dst = piece.dst;
            k.src = walk_row_base(a, w, w.refs[step.first_src], chunk, plane);
            k.dst_index = block.dst_index;  // null if rows go to a slot
            k.src_index = block.src_index == nullptr ? nullptr : block.src_index + piece.first;
            k.dst_first = piece.dst_first;
            k.src_first = block.src_first + piece.first;
            k.count = piece.count;
            k.row_bytes = walk_row_bytes(a, plane);
            k.weights = a.weighted == 0 || block.weights == nullptr ? nullptr : block.weights + piece.first;
          }
          block_sync();
          if (s.rows.weights == nullptr)
            walk_call_copy_rows(s.rows, team.thread, team.n_threads);
          else
            walk_scale_rows(a.type, s.rows, team);
        });
    if (!through) return false;
  }
  return true;
}

// Rows with scales have sums only for padding, which has no terms; these are made in bytes.
MOECCL_DEVICE bool walk_rows_sum(const WalkRowsArgs& a, WalkRowsShared& s, WalkState& w, const WalkStep& step,
                                 uint32_t chunk, const WalkSumBlock& block) {
  for (uint32_t plane = 0; plane < walk_planes(a); ++plane) {
    const bool through =
        walk_row_pieces(a, s, w, step, chunk, plane, block.dst_first, block.count, [&](const WalkRowPiece& piece) {
          block_sync();  // the last sums' arguments have been read
          for (uint32_t i = thread_index(); i < step.n_srcs; i += block_threads())
            s.bases[i] = walk_row_base(a, w, w.refs[step.first_src + i], chunk, plane);
          if (thread_index() == 0) {
            s.sums.dst = piece.dst;
            s.sums.offsets = block.offsets + piece.first;
            s.sums.terms = block.terms;
            s.sums.weights = a.weighted != 0 ? block.weights : nullptr;
            s.sums.dst_index = block.dst_index == nullptr ? nullptr : block.dst_index + piece.first;
            s.sums.dst_first = piece.dst_first;
            s.sums.count = piece.count;
            s.sums.row_elements = plane == 0 ? a.row_elements : a.scale_bytes;
            s.sums.n_bases = step.n_srcs;
            s.sums.bases = s.bases;
            s.sums.grouped = a.grouped;
          }
          block_sync();
          walk_reduce_rows(a.type, s.sums, walk_row_bytes(a, plane), walk_team(w));
        });
    if (!through) return false;
  }
  return true;
}

MOECCL_DEVICE void walk_rows(const WalkRowsArgs& a) {
  MOECCL_SHARED WalkRowsShared s;
  WalkState w;
  if (!walk_begin(a.walk, s, w)) return;
  // The host has the tables in place before the launch, and changes them only when no operation is in flight.
  const WalkTables& t = *a.tables;
  const uint32_t n_chunks = t.ready != 0 ? t.n_chunks : 0;
  if (w.lane == a.walk.n_lanes) {
    walk_net_receive(a.walk, s, w);
  } else if (walk_enter(a.walk, s, w)) {
    if (n_chunks == 0) {
      const WalkPlace nowhere{t.fault, t.fault_value, a.walk.n_ranks, t.fault_rank, 0};
      if (thread_index() == 0) walk_fail(a.walk, w, WalkFailure::kNoTables, nowhere);
    }
    (void)walk_lane(a.walk, s, w, n_chunks, [&](const WalkStep& step, uint32_t chunk) {
      const size_t list = static_cast<size_t>(step.ordinal) * n_chunks + chunk;
      if (step.kind == static_cast<uint8_t>(WalkKind::kRows)) return walk_rows_copy(a, s, w, step, chunk, t.rows[list]);
      return walk_rows_sum(a, s, w, step, chunk, a.dispatch != 0 ? t.zeros[list] : t.sums[list]);
    });
  }
  walk_leave(a.walk, s, w, n_chunks);
}

// AllToAllv.

struct WalkSplitsShared : WalkShared {
  uint64_t largest[kMaxSources];
};

// Returns the memory of `owner` that says what it exchanges with each rank in operation `seq`.
MOECCL_DEVICE WalkSplit* walk_splits(const WalkArgs& a, uint32_t owner, uint64_t seq) {
  return a.peers[owner].splits + (seq % kWalkEntries) * a.n_ranks;
}

// Goes with the entry that walk_enter() publishes. A peer that still reads what was here four operations ago would not
// have let this rank finish the previous operation.
MOECCL_DEVICE void walk_splits_announce(const WalkSplitsArgs& a, const WalkState& w) {
  if (block_index() != 0) return;
  const WalkArgs& k = a.walk;
  WalkSplit* own = walk_splits(k, k.rank, w.seq);
  for (uint32_t p = thread_index(); p < k.n_ranks; p += block_threads()) {
    store_relaxed_system(&own[p].sends, a.send_counts[p]);
    store_relaxed_system(&own[p].send_at, a.send_displs[p]);
    store_relaxed_system(&own[p].expects, a.recv_counts[p]);
  }
  if (thread_index() == 0) store_relaxed_system(&k.header->entries[w.seq % kWalkEntries].largest, a.largest);
  block_sync();
}

// Waits for one peer's entry and compares what the two say of each other. *largest is the peer's value.
MOECCL_DEVICE bool walk_splits_compare(const WalkSplitsArgs& a, const WalkState& w, uint32_t peer, uint64_t* largest) {
  const WalkArgs& k = a.walk;
  const WalkEntry& entry = k.peers[peer].header->entries[w.seq % kWalkEntries];
  WalkPlace at{0, 0, peer, w.seq, 0};
  // Acquire: pairs with the release in walk_enter() of the peer.
  if (!walk_wait(k, w, at, &entry.seq, [&](uint64_t seq) { return seq >= w.seq; })) return false;
  if (walk_differs(k, w, peer, true)) {
    walk_fail(k, w, WalkFailure::kMismatch, at);
    return false;
  }
  *largest = load_relaxed_system(&entry.largest);
  const WalkSplit& theirs = walk_splits(k, peer, w.seq)[k.rank];
  const uint64_t sends = load_relaxed_system(&theirs.sends), expects = load_relaxed_system(&theirs.expects);
  const bool sent_alike = expects == a.send_counts[peer];
  if (sent_alike && sends == a.recv_counts[peer]) return true;
  at.step = sent_alike ? 1 : 0;
  at.expected = sent_alike ? a.recv_counts[peer] : a.send_counts[peer];
  at.seen = sent_alike ? sends : expects;
  walk_fail(k, w, WalkFailure::kSplits, at);
  return false;
}

// Called after walk_enter(): derives the number of chunks from the largest block of any rank. Block 0 asks for all.
MOECCL_DEVICE bool walk_splits_agree(const WalkSplitsArgs& a, WalkSplitsShared& s, const WalkState& w,
                                     uint32_t* n_chunks) {
  const WalkArgs& k = a.walk;
  if (block_index() == 0) {
    if (thread_index() == 0) s.failed = 0;
    block_sync();
    for (uint32_t p = thread_index(); p < k.n_ranks; p += block_threads()) {
      s.largest[p] = a.largest;
      if (p != k.rank && !walk_splits_compare(a, w, p, &s.largest[p])) store_relaxed_block(&s.failed, 1);
    }
    block_sync();
    if (s.failed != 0) return false;
    if (thread_index() == 0) {
      uint64_t most = 0;
      for (uint32_t p = 0; p < k.n_ranks; ++p) most = s.largest[p] > most ? s.largest[p] : most;
      const uint64_t chunks = (most + k.chunk - 1) / k.chunk;
      k.header->n_chunks = chunks < 1 ? 1 : static_cast<uint32_t>(chunks);
    }
  }
  if (!walk_meet(k, s, w, &k.header->barrier[kWalkMostLanes], walk_lane_blocks(k, w), 1)) return false;
  *n_chunks = k.header->n_chunks;
  return true;
}

// The same as plan::resolve(), with blocks of unequal sizes.
MOECCL_DEVICE WalkSpan walk_splits_resolve(const WalkSplitsArgs& a, const WalkState& w, const WalkRef& ref,
                                           uint64_t block_length, uint32_t chunk) {
  const WalkArgs& k = a.walk;
  const WalkPart part = walk_part(k, ref, block_length, chunk);
  uint8_t* base = nullptr;
  uint64_t offset = part.first;
  if (ref.buffer == static_cast<uint8_t>(WalkBuffer::kStaging)) {
    base = k.peers[ref.rank].staging + (w.seq & 1) * k.half_bytes;
    offset += (static_cast<uint64_t>(chunk % k.depth) * k.n_slots + ref.index) * k.slot_elements;
  } else if (ref.rank == k.rank) {
    const bool input = ref.buffer == static_cast<uint8_t>(WalkBuffer::kInput);
    offset += (input ? a.send_displs : a.recv_displs)[ref.index] + part.begin;
    base = input ? static_cast<uint8_t*>(const_cast<void*>(k.input)) : static_cast<uint8_t*>(k.output);
  } else {
    // Plans read only one block of a peer's memory: that of its Input for this rank. It begins where the peer's entry
    // says, which walk_splits_compare() has read.
    const WalkEntry& e = k.peers[ref.rank].header->entries[w.seq % kWalkEntries];
    offset += load_relaxed_system(&walk_splits(k, ref.rank, w.seq)[k.rank].send_at) + part.begin;
    base = reinterpret_cast<uint8_t*>(load_relaxed_system(&e.input));
  }
  return {base == nullptr ? nullptr : base + offset * k.element_bytes, part.length};
}

MOECCL_DEVICE bool walk_splits_copy(const WalkSplitsArgs& a, WalkSplitsShared& s, WalkState& w, const WalkStep& step,
                                    uint32_t chunk) {
  const WalkArgs& k = a.walk;
  const WalkRef& src_ref = w.refs[step.first_src];
  const auto own_block = [&](const WalkRef& ref) {
    return ref.rank == k.rank && ref.buffer != static_cast<uint8_t>(WalkBuffer::kStaging);
  };
  // plan::governing_length()
  const WalkRef& governs = own_block(step.dst) ? step.dst : src_ref;
  if (!own_block(governs)) return true;
  const bool input = governs.buffer == static_cast<uint8_t>(WalkBuffer::kInput);
  const uint64_t length = (input ? a.send_counts : a.recv_counts)[governs.index];
  const WalkSpan dst = walk_splits_resolve(a, w, step.dst, length, chunk);
  const WalkSpan src = walk_splits_resolve(a, w, src_ref, length, chunk);
  const uint64_t n = src.elements < dst.elements ? src.elements : dst.elements;
  const Team team = walk_team(w);
  const bool elsewhere = walk_is_elsewhere(k, step.dst);
  const uint64_t bytes = n * k.element_bytes, most = elsewhere ? k.net.cell_bytes : bytes;
  const WalkPlace at{static_cast<uint64_t>(&step - w.steps), chunk, step.dst.rank, 0, 0};
  for (uint64_t first = 0; first < bytes; first += most) {
    const uint64_t piece = bytes - first < most ? bytes - first : most;
    uint8_t* to = elsewhere ? walk_net_cell(k, s, w, at) : dst.data;
    if (to == nullptr) return false;
    if (to != src.data) copy_span(to, src.data + first, piece, team.thread, team.n_threads);
    if (!elsewhere) continue;
    const uint64_t offset = static_cast<uint64_t>(dst.data - k.net.staging) + first;
    if (!walk_net_put(k, s, w, at, offset, piece)) return false;
  }
  return true;
}

MOECCL_DEVICE void walk_all_to_all_v(const WalkSplitsArgs& a) {
  MOECCL_SHARED WalkSplitsShared s;
  WalkState w;
  if (!walk_begin(a.walk, s, w)) return;
  walk_splits_announce(a, w);
  uint32_t n_chunks = 0;
  if (w.lane == a.walk.n_lanes) {
    walk_net_receive(a.walk, s, w);
    n_chunks = a.walk.header->n_chunks;  // the other lanes, which have left, had agreed on it
  } else if (walk_enter(a.walk, s, w, walk_splits(a.walk, a.walk.rank, w.seq)) &&
             walk_splits_agree(a, s, w, &n_chunks)) {
    (void)walk_lane(a.walk, s, w, n_chunks,
                    [&](const WalkStep& step, uint32_t chunk) { return walk_splits_copy(a, s, w, step, chunk); });
  }
  walk_leave(a.walk, s, w, n_chunks);
}

}  // namespace moeccl::cuda
