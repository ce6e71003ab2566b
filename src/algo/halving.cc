// SPDX-License-Identifier: Apache-2.0
// Recursive halving and doubling (Rabenseifner): partners whose numbers differ in one bit exchange halves of what is
// left to sum, until each rank has summed one part; then the results double on the way back. This moves the bytes of a
// ring in 2 log2(n) exchanges instead of 2 (n - 1). Ranks beyond a power of two first fold onto others, as in rd.cc.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/fold.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kSum = 0;
constexpr uint32_t kFold = 1;
constexpr uint32_t kResult = 2;

// One slot for the sums of each exchange, one for results and one for the fold. A partner's results prove that it has
// read the sums, and its next sums that it has taken the results, so one rotation suffices.
Layout layout(const Shape& shape, const LevelTree&) { return {Fold(shape.n_ranks).rounds + 2, 1}; }

class Writer {
 public:
  Writer(ProgramBuilder& b, const Fold& fold, uint32_t rank)
      : b_(b), fold_(fold), rank_(rank), number_(fold.number_of(rank)), n_parts_(1u << fold.rounds) {}

  // `mine`: what this rank adds to the sum. Works in place: each part of the input is sent or summed before its result
  // comes.
  void write(Ref mine) {
    for (uint32_t round = fold_.rounds; round-- > 0; mine = out(rank_)) halve(mine, round);
    for (uint32_t round = 0; round < fold_.rounds; ++round) twice(round);
  }

 private:
  Ref at(Ref ref, uint32_t index) const { return part(ref, index, n_parts_); }
  uint32_t partner(uint32_t round) const { return fold_.rank_of(number_ ^ (1u << round)); }
  // Returns the first of the 2^round parts that concern number `n` in this round.
  static uint32_t first(uint32_t n, uint32_t round) { return n >> round << round; }

  // Gives the partner its half of the parts that both still sum.
  void halve(Ref mine, uint32_t round) {
    const uint32_t size = 1u << round, theirs = first(number_ ^ size, round), kept = first(number_, round);
    for (uint32_t i = 0; i < size; ++i) b_.put(at(slot(partner(round), round), theirs + i), at(mine, theirs + i));
    b_.signal(partner(round), kSum);
    b_.wait(partner(round), kSum);
    for (uint32_t i = 0; i < size; ++i) {
      const Ref srcs[] = {at(mine, kept + i), at(slot(rank_, round), kept + i)};
      b_.reduce(at(out(rank_), kept + i), srcs, round == 0, true);
    }
  }

  // Exchanges the results that each of the two has.
  void twice(uint32_t round) {
    const uint32_t size = 1u << round, kept = first(number_, round), theirs = first(number_ ^ size, round);
    const uint32_t results = fold_.rounds;
    for (uint32_t i = 0; i < size; ++i) b_.put(at(slot(partner(round), results), kept + i), at(out(rank_), kept + i));
    b_.signal(partner(round), kResult);
    b_.wait(partner(round), kResult);
    for (uint32_t i = 0; i < size; ++i) b_.copy(at(out(rank_), theirs + i), at(slot(rank_, results), theirs + i));
  }

  ProgramBuilder& b_;
  const Fold& fold_;
  uint32_t rank_, number_, n_parts_;
};

void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Fold fold(shape.n_ranks);
  fold.around(b, rank, fold.rounds + 1, kFold, [&](Ref mine) { Writer(b, fold, rank).write(mine); });
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "halving", "halve what is left to sum with each partner, then double the results", kAnyOrder,
     layout, tuning::kRingAllReduce, all_reduce},
};

}  // namespace

std::span<const Algorithm> halving_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
