// SPDX-License-Identifier: Apache-2.0
// Exchanges between ranks whose numbers differ in one bit need a power of two of ranks. With other numbers of ranks,
// the first few pair up: one of each pair adds its input to the other's before, and gets the result after.
#pragma once

#include "src/algo/builder.h"

namespace moeccl::algo {

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

  // Writes the program of `rank`. exchange(mine) sums `mine` into the output of each rank that takes part.
  template <class Exchange>
  void around(ProgramBuilder& b, uint32_t rank, uint32_t fold_slot, uint32_t sig, Exchange&& exchange) const {
    if (idle(rank)) {
      b.put(slot(rank + 1, fold_slot), in(rank));
      b.signal(rank + 1, sig);
      b.wait(rank + 1, sig);
      b.copy(out(rank), slot(rank, fold_slot));
      return;
    }
    if (folds(rank)) {
      b.wait(rank - 1, sig);
      const Ref srcs[] = {slot(rank, fold_slot), in(rank)};
      b.reduce(out(rank), srcs, false);
    }
    exchange(folds(rank) ? out(rank) : in(rank));
    if (folds(rank)) {
      b.put(slot(rank - 1, fold_slot), out(rank));
      b.signal(rank - 1, sig);
    }
  }
};

}  // namespace moeccl::algo
