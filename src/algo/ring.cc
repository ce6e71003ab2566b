// SPDX-License-Identifier: Apache-2.0
// Rings: each rank puts only into the staging of the next one, so every link carries the fewest bytes, in n - 1 steps.
// They need no views. A message that has gone round the ring proves that the next rank has begun the chunk, so with two
// rotations no credits are needed. Only the open chain of Broadcast returns some.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kData = 0;
constexpr uint32_t kCredit = 1;

// Slot s holds the block of the rank s + 1 places before.
void all_gather(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t next = b.after(1), prev = b.before(1), n_steps = shape.n_ranks - 1;
  b.put(slot(next, 0), in(rank));
  b.signal(next, kData);
  b.copy(out(rank, rank), in(rank));
  for (uint32_t s = 0; s < n_steps; ++s) {
    b.wait(prev, kData);
    if (s + 1 < n_steps) {
      b.put(slot(next, s + 1), slot(rank, s));
      b.signal(next, kData);
    }
    b.copy(out(rank, b.before(s + 1)), slot(rank, s));
  }
}

// The sum for a rank starts at the rank after it and ends with its own input. Slot s: the sum that has made s + 1 hops.
void reduce_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t next = b.after(1), prev = b.before(1), n_steps = shape.n_ranks - 1;
  b.put(slot(next, 0), in(rank, prev));
  b.signal(next, kData);
  for (uint32_t s = 0; s < n_steps; ++s) {
    b.wait(prev, kData);
    const bool last = s + 1 == n_steps;
    const Ref sum = last ? out(rank) : slot(rank, s);
    const Ref srcs[] = {slot(rank, s), in(rank, b.before(s + 2))};
    b.reduce(sum, srcs, last);
    if (last) break;
    b.put(slot(next, s + 1), sum);
    b.signal(next, kData);
  }
}

// The same over parts of the message (slot 0); then the results go round (slot 1). Works in place, because each part of
// the input is read before its result arrives. Results are passed on from the staging, because large outputs are
// written around the cache.
void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t n = shape.n_ranks, next = b.after(1), prev = b.before(1), n_steps = n - 1;
  b.put(part(slot(next, 0), prev, n), part(in(rank), prev, n));
  b.signal(next, kData);
  for (uint32_t s = 0; s < n_steps; ++s) {
    const uint32_t p = b.before(s + 2);
    const bool last = s + 1 == n_steps;  // p == rank
    b.wait(prev, kData);
    const Ref sum = part(slot(rank, last ? 1 : 0), p, n);
    const Ref srcs[] = {part(slot(rank, 0), p, n), part(in(rank), p, n)};
    b.reduce(sum, srcs, last);
    b.put(part(slot(next, last ? 1 : 0), p, n), sum);
    b.signal(next, kData);
  }
  b.copy(part(out(rank), rank, n), part(slot(rank, 1), rank, n));
  for (uint32_t s = 0; s < n_steps; ++s) {
    const uint32_t p = b.before(s + 1);
    const Ref result = part(slot(rank, 1), p, n);
    b.wait(prev, kData);
    if (s + 1 < n_steps) {
      b.put(part(slot(next, 1), p, n), result);
      b.signal(next, kData);
    }
    b.copy(part(out(rank), p, n), result);
  }
}

// A chain from the root; chunks follow each other through it.
void broadcast(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t next = b.after(1), prev = b.before(1);
  const Ref src = rank == shape.root ? in(rank) : slot(rank, 0);
  if (rank != shape.root) b.wait(prev, kData);
  if (next != shape.root) {
    b.wait(next, kCredit, b.depth());
    b.put(slot(next, 0), src);
    b.signal(next, kData);
  }
  b.copy(out(rank), src);
  if (rank != shape.root) b.signal(prev, kCredit);
}

Layout chain_slot(const Shape& shape, const LevelTree&) {
  return {1, rotations(shape, tuning::kChainBroadcast, tuning::kOneWay)};
}
uint64_t chain_chunk(const Shape& shape, const LevelTree&) {
  return crosses_long_line(shape, tuning::kChainBroadcast) ? far_chunk(shape, 1, tuning::kChainBroadcast)
                                                           : tuning::kChainBroadcast;
}

// Going round twice proves that the next rank has finished the chunk before, so one rotation suffices.
constexpr auto kBoth = slots<2, 1>;
constexpr auto kRound = rank_slots<-1, tuning::kOverlap>;
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "ring", "sum parts round the ring, then pass the results round", kAnyOrder, kBoth,
     tuning::kRingAllReduce, all_reduce},
    {moecclOpBroadcast, "ring", "a chain from the root, chunk after chunk", kNothing, chain_slot,
     tuning::kChainBroadcast, broadcast, chain_chunk},
    {moecclOpAllGather, "ring", "pass blocks round the ring", kNothing, kRound, tuning::kRingBlocks, all_gather},
    {moecclOpReduceScatter, "ring", "sum blocks round the ring", kAnyOrder, kRound, tuning::kRingBlocks,
     reduce_scatter},
};

}  // namespace

std::span<const Algorithm> ring_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
