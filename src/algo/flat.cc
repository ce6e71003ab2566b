// SPDX-License-Identifier: Apache-2.0
// Every rank puts what each peer needs directly into that peer's staging. This takes the fewest steps where staging can
// only be written, as between hosts. Sums are one reduction in rank order. With two rotations, a peer's data of chunk c
// + 1 proves that the peer is done with chunk c. On a long line, several chunks must be under way: there are more
// rotations, and sending and receiving have separate lanes.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kData = 0;
constexpr uint32_t kResult = 1;
constexpr uint32_t kCredit = 2;
// From a rank to itself, for the lane that sends to other nodes and the one that sends inside: a chunk was sent, a
// chunk was taken.
constexpr uint32_t kSent[] = {0, 1};
constexpr uint32_t kTaken[] = {2, 3};

bool far(const Shape& shape) { return crosses_long_line(shape, tuning::kFlatBlocksFar); }

// Large AllToAlls between hosts send and receive in separate lanes, so that the line never waits for a reader. Those of
// one chunk do not: they have nothing to overlap, and a rank that shares its core would lose it more often.
bool in_lanes(const Shape& shape) {
  return far(shape) || (shape.op == moecclOpAllToAll && !shape.reach.staging &&
                        cut(shape, {shape.n_ranks, tuning::kOverlap}, tuning::kFlatBlocksFar).n_chunks > 1);
}

// Slot p of a rank is for the data of rank p. A long line needs all of the staging, so there the rank itself has no
// slot.
Layout block_slots(const Shape& shape, const LevelTree&) {
  if (far(shape)) return {shape.n_ranks - 1, tuning::kFar};
  return {shape.n_ranks, in_lanes(shape) ? 2 * tuning::kOverlap : tuning::kOverlap};
}
Ref slot_from(const Shape& shape, uint32_t at, uint32_t from) {
  return slot(at, far(shape) ? (from + shape.n_ranks - at) % shape.n_ranks - 1 : from);
}
Layout one_slot(const Shape& shape, const LevelTree&) {
  return {1, rotations(shape, tuning::kFlatBlocksFar, tuning::kOneWay)};
}

uint64_t chunk_bytes(const Shape& shape, const LevelTree& tree) {
  if (shape.reach.staging) return tuning::kFlatBlocks;
  if (!far(shape)) return tuning::kFlatBlocksFar;
  const Streams streams = streams_across(shape, tree);
  const auto n = static_cast<double>(plan::facts(shape.op).root != plan::Root::kNone ? streams.outside : streams.pairs);
  return far_chunk(shape, n, tuning::kFlatBlocksFar);
}

// Returns what has arrived from all ranks, in rank order.
std::vector<Ref> arrivals(const Shape& shape, uint32_t rank, Ref own) {
  std::vector<Ref> srcs;
  for (uint32_t p = 0; p < shape.n_ranks; ++p)
    srcs.push_back(p == rank ? own : part(slot_from(shape, rank, p), own.part, own.parts));
  return srcs;
}

// Stores a rank's own block and those that arrive, in the order in which peers send them.
void take_blocks(ProgramBuilder& b, const Shape& shape, uint32_t rank, Ref own) {
  b.copy(out(rank, rank), own);
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kData);
    b.copy(out(rank, p), slot_from(shape, rank, p));
  }
}

// What a rank sends to another, and what it keeps.
Ref block_for(const Shape& shape, uint32_t rank, uint32_t p) {
  return shape.op == moecclOpAllGather ? in(rank) : in(rank, p);
}

void take(ProgramBuilder& b, const Shape& shape, uint32_t rank) {
  const Ref own = block_for(shape, rank, rank);
  if (shape.op != moecclOpReduceScatter) return take_blocks(b, shape, rank, own);
  b.wait_all(kData);
  b.reduce(out(rank), arrivals(shape, rank, own), true);
}

// A rank sends at most half the rotations ahead of what it has taken. A rank that has a peer's chunk c therefore knows
// that the peer has taken chunk c - depth / 2 of all ranks, so no credits are needed. In place, a chunk is stored once
// all of it has been sent.
void blocks_in_lanes(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank) {
  const std::vector<uint32_t>& node = tree.levels.front().group_of_rank;
  const bool overwrites = shape.op == moecclOpAllToAll;  // in place
  bool any[] = {false, false};
  for (const bool near : {false, true}) {  // lanes are in order of urgency
    b.lane(near ? LaneKind::kIntra : LaneKind::kInter);
    for (uint32_t i = 1; i < shape.n_ranks; ++i) any[near] = any[near] || (node[b.after(i)] == node[rank]) == near;
    if (!any[near]) continue;
    b.wait(rank, kTaken[near], b.depth() / 2);
    for (uint32_t i = 1; i < shape.n_ranks; ++i) {
      const uint32_t p = b.after(i);
      if ((node[p] == node[rank]) != near) continue;
      b.put(slot_from(shape, p, rank), block_for(shape, rank, p));
      b.signal(p, kData);
    }
    if (overwrites) b.signal(rank, kSent[near]);
  }
  b.lane(LaneKind::kCopy);
  for (const bool near : {false, true}) {
    if (any[near] && overwrites) b.wait(rank, kSent[near]);
  }
  take(b, shape, rank);
  for (const bool near : {false, true}) {
    if (any[near]) b.signal(rank, kTaken[near]);
  }
}

// AllGather, ReduceScatter, AllToAll and AllToAllv.
void blocks(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank) {
  if (in_lanes(shape)) return blocks_in_lanes(b, shape, tree, rank);
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.put(slot_from(shape, p, rank), block_for(shape, rank, p));
    b.signal(p, kData);
  }
  take(b, shape, rank);
}

// Has room for the parts that arrive, and for the results of all.
Layout parts_and_result(const Shape& shape, const LevelTree&) {
  if (far(shape)) return {1, tuning::kFar, shape.n_ranks - 1, shape.n_ranks};
  return {shape.n_ranks + 1, 1};  // the results of chunk c also prove that its inputs were read
}
uint64_t all_reduce_chunk(const Shape& shape, const LevelTree& tree) {
  if (!far(shape)) return tuning::kFlatAllReduce;
  const auto pairs = static_cast<double>(streams_across(shape, tree).pairs);
  return far_chunk(shape, 2 * pairs / shape.n_ranks, tuning::kFlatAllReduce);  // a part and its result for each pair
}

// A rank begins chunk c when it has the results of chunk c - depth. From its part of chunk c, an owner knows that it
// has room for that chunk's results.
void all_reduce_in_lanes(ProgramBuilder& b, const Shape& shape, uint32_t rank) {
  const uint32_t n = shape.n_ranks;
  const auto part_slot = [&](uint32_t at, uint32_t from) { return part(slot(at, 1 + (from + n - at) % n - 1), at, n); };
  const auto result_slot = [&](uint32_t at, uint32_t from) { return part(slot(at, 0), from, n); };
  b.lane(LaneKind::kInter);
  b.wait_all(kData);
  std::vector<Ref> srcs;
  for (uint32_t p = 0; p < n; ++p) srcs.push_back(p == rank ? part(in(rank), rank, n) : part_slot(rank, p));
  const Ref result = part(out(rank), rank, n);
  b.reduce(result, srcs, true, true);
  for (uint32_t i = 1; i < n; ++i) {
    b.put(result_slot(b.after(i), rank), result);
    b.signal(b.after(i), kResult);
  }
  b.lane(LaneKind::kMain);
  b.wait(rank, kTaken[0], b.depth());
  for (uint32_t i = 1; i < n; ++i) {
    b.put(part_slot(b.after(i), rank), part(in(rank), b.after(i), n));
    b.signal(b.after(i), kData);
  }
  b.lane(LaneKind::kCopy);
  for (uint32_t i = 1; i < n; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kResult);
    b.copy(part(out(rank), p, n), result_slot(rank, p));
  }
  b.signal(rank, kTaken[0]);
}

// Parts go to their owners, each owner reduces once, and results go to all.
void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (far(shape)) return all_reduce_in_lanes(b, shape, rank);
  const uint32_t n = shape.n_ranks, result_slot = n;
  for (uint32_t i = 1; i < n; ++i) {
    const uint32_t p = b.after(i);
    b.put(part(slot(p, rank), p, n), part(in(rank), p, n));
    b.signal(p, kData);
  }
  b.wait_all(kData);
  const Ref result = part(slot(rank, result_slot), rank, n);
  b.reduce(result, arrivals(shape, rank, part(in(rank), rank, n)), true);
  for (uint32_t i = 1; i < n; ++i) {
    b.put(part(slot(b.after(i), result_slot), rank, n), result);
    b.signal(b.after(i), kResult);
  }
  b.copy(part(out(rank), rank, n), result);
  for (uint32_t i = 1; i < n; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kResult);
    b.copy(part(out(rank), p, n), part(slot(rank, result_slot), p, n));
  }
}

void to_root(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (rank != shape.root) {
    b.wait(shape.root, kCredit, b.depth());
    b.put(slot_from(shape, shape.root, rank), in(rank));
    b.signal(shape.root, kData);
    return;
  }
  if (shape.op == moecclOpReduce) {
    b.wait_all(kData);
    b.reduce(out(rank), arrivals(shape, rank, in(rank)), true);
    b.signal_all(kCredit);
    return;
  }
  b.copy(out(rank, rank), in(rank));
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.wait(p, kData);
    b.copy(out(rank, p), slot_from(shape, rank, p));
    b.signal(p, kCredit);
  }
}

void from_root(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const bool scatter = shape.op == moecclOpScatter;
  if (rank != shape.root) {
    b.wait(shape.root, kData);
    b.copy(out(rank), slot(rank, 0));
    b.signal(shape.root, kCredit);
    return;
  }
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.wait(p, kCredit, b.depth());
    b.put(slot(p, 0), in(rank, scatter ? p : 0));
    b.signal(p, kData);
  }
  b.copy(out(rank), in(rank, scatter ? rank : 0));
}

constexpr const char* kSum = "put parts to their owners, who reduce them once";
constexpr const char* kMove = "put each peer's data into its staging";
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "flat", kSum, kNothing, parts_and_result, tuning::kFlatAllReduce, all_reduce, all_reduce_chunk},
    {moecclOpReduce, "flat", kSum, kNothing, block_slots, tuning::kFlatBlocks, to_root, chunk_bytes},
    {moecclOpBroadcast, "flat", kMove, kNothing, one_slot, tuning::kFlatBlocks, from_root, chunk_bytes},
    {moecclOpAllGather, "flat", kMove, kNothing, block_slots, tuning::kFlatBlocks, blocks, chunk_bytes},
    {moecclOpReduceScatter, "flat", kSum, kNothing, block_slots, tuning::kFlatBlocks, blocks, chunk_bytes},
    {moecclOpAllToAll, "flat", kMove, kNothing, block_slots, tuning::kFlatBlocks, blocks, chunk_bytes},
    {moecclOpAllToAllv, "flat", kMove, kNothing, block_slots, tuning::kFlatBlocks, blocks, chunk_bytes},
    {moecclOpGather, "flat", kMove, kNothing, block_slots, tuning::kFlatBlocks, to_root, chunk_bytes},
    {moecclOpScatter, "flat", kMove, kNothing, one_slot, tuning::kFlatBlocks, from_root, chunk_bytes},
};

}  // namespace

std::span<const Algorithm> flat_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
