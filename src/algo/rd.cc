// SPDX-License-Identifier: Apache-2.0
// Recursive doubling: log2(n) exchanges of the whole message with the rank whose number differs in one bit.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/fold.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kExchange = 0;
constexpr uint32_t kFold = 1;
// From a rank to itself: a chunk was sent to the first partner, was finished, and, from kRound on, has been through an
// exchange.
constexpr uint32_t kSent = 0, kTaken = 1, kRound = 2;

// Several chunks must be under way on a long line, so there each exchange has a lane. Ranks that fold wait twice more
// for it, which other algorithms do not.
bool in_lanes(const Shape& shape) {
  const Fold fold(shape.n_ranks);
  return crosses_long_line(shape, tuning::kDoubling) && fold.n_pairs == 0 && kRound + fold.rounds <= plan::kMaxSigs;
}

// One slot per exchange and one for the fold. With two rotations, a partner's data of chunk c + 1 proves that the
// partner is done with chunk c.
Layout layout(const Shape& shape, const LevelTree&) {
  const Fold fold(shape.n_ranks);
  return in_lanes(shape) ? Layout{fold.rounds, tuning::kFar} : Layout{fold.rounds + 1, tuning::kOverlap};
}
uint64_t chunk_bytes(const Shape& shape, const LevelTree& tree) {
  if (!in_lanes(shape)) return tuning::kDoubling;
  return far_chunk(shape, static_cast<double>(streams_across(shape, tree).inside), tuning::kDoubling);
}

uint32_t partner_of(const Fold& fold, uint32_t rank, uint32_t round) {
  return fold.rank_of(fold.number_of(rank) ^ (1u << round));
}

void send(ProgramBuilder& b, uint32_t partner, uint32_t round, Ref mine) {
  b.put(slot(partner, round), mine);
  b.signal(partner, kExchange);
}

// Both partners sum in the same order, so that all ranks get the same bits.
void sum(ProgramBuilder& b, const Fold& fold, uint32_t rank, uint32_t round, Ref mine) {
  b.wait(partner_of(fold, rank, round), kExchange);
  Ref srcs[] = {mine, slot(rank, round)};
  if (fold.number_of(rank) & (1u << round)) std::swap(srcs[0], srcs[1]);
  b.reduce(out(rank), srcs, round + 1 == fold.rounds);
}

void exchange(ProgramBuilder& b, const Fold& fold, uint32_t rank, uint32_t round, Ref mine) {
  send(b, partner_of(fold, rank, round), round, mine);
  sum(b, fold, rank, round, mine);
}

// A rank sends at most half the rotations ahead of what it has finished. A rank that has a partner's chunk c therefore
// knows that the partner has finished chunk c - depth / 2 before, and all of that one's partners chunk c - depth. In
// place, a chunk is summed once it has been sent.
void all_reduce_in_lanes(ProgramBuilder& b, const Fold& fold, uint32_t rank) {
  b.lane(LaneKind::kInter);
  b.wait(rank, kTaken, b.depth() / 2);
  send(b, partner_of(fold, rank, 0), 0, in(rank));
  b.signal(rank, kSent);
  for (uint32_t round = 0; round < fold.rounds; ++round) {
    b.lane(LaneKind::kMain);
    b.wait(rank, round == 0 ? kSent : kRound + round - 1);
    sum(b, fold, rank, round, round == 0 ? in(rank) : out(rank));
    const bool last = round + 1 == fold.rounds;
    if (!last) send(b, partner_of(fold, rank, round + 1), round + 1, out(rank));
    b.signal(rank, last ? kTaken : kRound + round);
  }
}

void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Fold fold(shape.n_ranks);
  if (in_lanes(shape)) return all_reduce_in_lanes(b, fold, rank);
  fold.around(b, rank, fold.rounds, kFold, [&](Ref mine) {
    for (uint32_t round = 0; round < fold.rounds; ++round, mine = out(rank)) exchange(b, fold, rank, round, mine);
  });
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "rd", "recursive doubling: log2(n) exchanges of the whole message", kAnyOrder, layout,
     tuning::kDoubling, all_reduce, chunk_bytes},
};

}  // namespace

std::span<const Algorithm> rd_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
