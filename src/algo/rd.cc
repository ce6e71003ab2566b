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

// One slot per exchange and one for the fold. With two rotations, a partner's data of chunk c + 1 proves that the
// partner is done with chunk c.
Layout layout(const Shape& shape, const LevelTree&) { return {Fold(shape.n_ranks).rounds + 1, tuning::kOverlap}; }

// Both partners sum in the same order, so that all ranks get the same bits.
void exchange(ProgramBuilder& b, const Fold& fold, uint32_t rank, uint32_t round, Ref mine) {
  const uint32_t number = fold.number_of(rank), partner = fold.rank_of(number ^ (1u << round));
  b.put(slot(partner, round), mine);
  b.signal(partner, kExchange);
  b.wait(partner, kExchange);
  Ref srcs[] = {mine, slot(rank, round)};
  if (number & (1u << round)) std::swap(srcs[0], srcs[1]);
  b.reduce(out(rank), srcs, round + 1 == fold.rounds);
}

void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Fold fold(shape.n_ranks);
  fold.around(b, rank, fold.rounds, kFold, [&](Ref mine) {
    for (uint32_t round = 0; round < fold.rounds; ++round, mine = out(rank)) exchange(b, fold, rank, round, mine);
  });
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "rd", "recursive doubling: log2(n) exchanges of the whole message", kAnyOrder, layout,
     tuning::kDoubling, all_reduce},
};

}  // namespace

std::span<const Algorithm> rd_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
