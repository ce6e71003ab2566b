// SPDX-License-Identifier: Apache-2.0
// Expert swap (HierMoE, Section IV): which two experts to exchange so that the fullest groups get fewer tokens, counted
// without duplicates at every level.
//
// The paper updates a table of E x E swaps for each token, O(D T K E). Here each token is counted once for each ordered
// pair of its experts, and the table follows from sums. With n(b) the tokens that chose b, only(a) the tokens whose one
// expert in a's group A is a, N(A, b) those that chose b and any of A, P(a, b) those that chose b and of A only a:
//
//   Z(A) after a <-> b  =  Z(A) - only(a) + n(b) - N(A, b) + P(a, b)
//
// All of these are sums over tokens, so that ranks add their counts. Since each level refines the one before, "a is the
// first, or the only, choice in its group" holds from some level inwards, and one increment serves all levels.
#pragma once

#include <cstdint>
#include <span>

#include "moeccl/solve.h"
#include "src/base/status.h"
#include "src/solve/arena.h"

namespace moeccl::solve {

// Checks, and fills in defaults that are numbers.
Result<moecclSwapProblem_t> checked(const moecclSwapProblem_t& problem);
Status check_topk(const moecclSwapProblem_t& problem, const int32_t* topk, int64_t n_tokens);

// For checked problems. group[d][e]: the group of expert e at level d under the placement.
void expert_groups(const moecclSwapProblem_t& problem, int32_t* group);

// Where each count stands in the flat array.
struct SwapLayout {
  explicit SwapLayout(const moecclSwapProblem_t& p) : experts(static_cast<size_t>(p.n_experts)), n_groups(p.n_groups) {
    length = level(p.n_levels);
  }
  // n[E]; then for each level Z[U], only[E], N[U][E], P[E][E].
  size_t level(int32_t d) const {
    size_t at = experts;
    for (int32_t k = 0; k < d; ++k) at += (groups(k) + experts) * (experts + 1);
    return at;
  }
  size_t groups(int32_t d) const { return static_cast<size_t>(n_groups[d]); }
  size_t experts;
  size_t length;

 private:
  const int32_t* n_groups;
};
struct SwapLevel {
  SwapLevel(const SwapLayout& layout, const int32_t* counts, int32_t d)
      : chosen(counts),
        full(counts + layout.level(d)),
        only(full + layout.groups(d)),
        with(only + layout.experts),
        pair(with + layout.groups(d) * layout.experts),
        experts(layout.experts) {}
  // Duplicate-free tokens of a's group after a and b have changed places; their groups differ.
  int64_t after(size_t a, size_t group_of_a, size_t b) const {
    return int64_t{full[group_of_a]} - only[a] + chosen[b] - with[group_of_a * experts + b] + pair[a * experts + b];
  }
  const int32_t *chosen, *full, *only, *with, *pair;
  size_t experts;
};

size_t swap_count_bytes(const moecclSwapProblem_t& problem);
void count_swaps(const moecclSwapProblem_t& problem, const int32_t* topk, int64_t n_tokens, int32_t* counts,
                 Arena& arena);

size_t swap_solve_bytes(const moecclSwapProblem_t& problem);
// pair[2] is -1, -1 when the answer is keep. kind[E], or none: slots of different kinds keep their experts.
void solve_swap(const moecclSwapProblem_t& problem, const int32_t* counts, int32_t* pair, moecclSwapAnswer_t* answer,
                Arena& arena, std::span<const int32_t> kind = {});
void solve_swap_sequence(const moecclSwapProblem_t& problem, const int32_t* topk, int64_t n_tokens, int32_t max_swaps,
                         int32_t* pairs, int32_t* placement, moecclSwapAnswer_t* answer);

}  // namespace moeccl::solve
