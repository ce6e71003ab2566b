// Recursive doubling: log2(n) exchanges of the whole message with the rank whose number differs in one bit. Of other
// than a power of two ranks, the first few pair up: one of each pair adds its input to the other's before, and gets the
// result after.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kExchange = 0;
constexpr uint32_t kFold = 1;

// The ranks that take part in the exchanges are numbered 0 .. 2^rounds - 1.
struct Fold {
  uint32_t rounds = 0;
  uint32_t n_pairs = 0;  // ranks 2i and 2i + 1 for i < n_pairs fold onto the second

  explicit Fold(uint32_t n) {
    while ((uint32_t{2} << rounds) <= n) ++rounds;
    n_pairs = n - (uint32_t{1} << rounds);
  }
  bool idle(uint32_t rank) const { return rank < 2 * n_pairs && rank % 2 == 0; }
  bool folds(uint32_t rank) const { return rank < 2 * n_pairs && rank % 2 == 1; }
  uint32_t number_of(uint32_t rank) const { return rank < 2 * n_pairs ? rank / 2 : rank - n_pairs; }
  uint32_t rank_of(uint32_t number) const { return number < n_pairs ? 2 * number + 1 : number + n_pairs; }
};

// A slot per exchange and one for the fold. With two rotations a partner's data of chunk c + 1 proves that it is done
// with chunk c.
Layout layout_of(const Shape& shape) { return {Fold(shape.n_ranks).rounds + 1, tuning::kOverlap}; }

Status applies(const Shape& shape, const LevelTree&) {
  MOECCL_TRY(needs_any_order(shape, "rd"));
  return chunks_fit(shape, layout_of(shape));
}

Chunking chunking(const Shape& shape, const LevelTree&) { return cut(shape, layout_of(shape), tuning::kDoubling); }

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

Program all_reduce(const Shape& shape, const LevelTree&, uint32_t rank) {
  if (shape.n_ranks == 1) return solo(shape);
  const Fold fold(shape.n_ranks);
  ProgramBuilder b(shape, rank, layout_of(shape));
  const uint32_t fold_slot = fold.rounds;
  if (fold.idle(rank)) {
    b.put(slot(rank + 1, fold_slot), in(rank));
    b.signal(rank + 1, kFold);
    b.wait(rank + 1, kFold);
    b.copy(out(rank), slot(rank, fold_slot));
    return std::move(b).finish();
  }
  Ref mine = in(rank);
  if (fold.folds(rank)) {
    b.wait(rank - 1, kFold);
    const Ref srcs[] = {slot(rank, fold_slot), mine};
    b.reduce(out(rank), srcs, false);
    mine = out(rank);
  }
  for (uint32_t round = 0; round < fold.rounds; ++round) {
    exchange(b, fold, rank, round, mine);
    mine = out(rank);
  }
  if (fold.folds(rank)) {
    b.put(slot(rank - 1, fold_slot), out(rank));
    b.signal(rank - 1, kFold);
  }
  return std::move(b).finish();
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "rd", "recursive doubling: log2(n) exchanges of the whole message", applies, chunking,
     all_reduce},
};

}  // namespace

std::span<const Algorithm> rd_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
