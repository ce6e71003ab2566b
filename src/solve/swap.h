// SPDX-License-Identifier: Apache-2.0
// Expert swap (HierMoE, Section IV): finds the two experts whose exchange gives the fullest groups fewer tokens,
// counted without duplicates at every level.
//
// The paper updates a table of E x E swaps for each token, O(D T K E). Here each token is counted once for each ordered
// pair of its experts, and the table follows from sums. Let n(b) be the tokens that chose b, only(a) the tokens whose
// one expert in a's group A is a, N(A, b) those that chose b and any expert of A, and P(a, b) those that chose b and
// only a from A. Then:
//
//   Z(A) after a <-> b  =  Z(A) - only(a) + n(b) - N(A, b) + P(a, b)
//
// All of these are sums over tokens, so ranks can add their counts. Since each level refines the previous one, "a is
// the first, or the only, choice in its group" holds from some level inwards, and one increment serves all levels.
#pragma once

#include <cstdint>
#include <span>

#include "moeccl/solve.h"
#include "src/base/status.h"
#include "src/solve/arena.h"

namespace moeccl::solve {

inline constexpr int32_t kMostSwapExperts = 8192;

// Checks the problem and fills in numeric defaults.
Result<moecclSwapProblem_t> checked(const moecclSwapProblem_t& problem);
Status check_topk(const moecclSwapProblem_t& problem, const int32_t* topk, int64_t n_tokens);

// Takes a checked problem. group[d][e] is the group of expert e at level d under the placement.
void expert_groups(const moecclSwapProblem_t& problem, int32_t* group);

// The position of each count in the flat array.
struct SwapLayout {
  explicit SwapLayout(const moecclSwapProblem_t& p) : experts(static_cast<size_t>(p.n_experts)), n_groups(p.n_groups) {
    length = level(p.n_levels);
  }
  // The layout is n[E]; then for each level Z[U], only[E], N[U][E], P[E][E].
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
  // Returns the duplicate-free tokens of a's group after swapping a and b, which must be in different groups.
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
// pair[2] is -1, -1 when the placement should stay. With kind[E], slots of different kinds keep their experts.
void solve_swap(const moecclSwapProblem_t& problem, const int32_t* counts, int32_t* pair, moecclSwapAnswer_t* answer,
                Arena& arena, std::span<const int32_t> kind = {});
void solve_swap_sequence(const moecclSwapProblem_t& problem, const int32_t* topk, int64_t n_tokens, int32_t max_swaps,
                         int32_t* pairs, int32_t* placement, moecclSwapAnswer_t* answer);

}  // namespace moeccl::solve
