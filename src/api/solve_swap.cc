// SPDX-License-Identifier: Apache-2.0
// Entry points of expert swap.
#include <vector>

#include "src/api/solve_args.h"
#include "src/solve/checks.h"
#include "src/solve/swap.h"

using namespace moeccl;

namespace {

Status best_swap(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t* pair, moecclSwapAnswer_t* answer,
                 void* workspace, size_t workspace_bytes) {
  MOECCL_ASSIGN_OR_RETURN(const moecclSwapProblem_t p, api::take(problem, solve::checked));
  MOECCL_TRY(api::require(counts, "counts", "what moecclSwapCount filled"));
  MOECCL_TRY(api::require(pair, "pair", "room for two experts"));
  MOECCL_TRY(api::check_answer(answer));
  MOECCL_ASSIGN_OR_RETURN(auto w, solve::Workspace::make(workspace, workspace_bytes, solve::swap_solve_bytes(p),
                                                         "moecclSolveSwapWorkspace"));
  moecclSwapAnswer_t made{};
  solve::solve_swap(p, counts, pair, &made, w.arena());
  give(made, answer);
  return {};
}

Status table(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t level, int32_t* z) {
  MOECCL_ASSIGN_OR_RETURN(const moecclSwapProblem_t p, api::take(problem, solve::checked));
  MOECCL_TRY(api::require(counts, "counts", "what moecclSwapCount filled"));
  MOECCL_TRY(api::require(z, "z", "room for [E][E][U] counts"));
  MOECCL_TRY(solve::between("level", level, 0, p.n_levels - 1));
  const solve::SwapLayout layout(p);
  const solve::SwapLevel counted(layout, counts, level);
  const size_t experts = layout.experts, groups = layout.groups(level);
  std::vector<int32_t> all(experts * static_cast<size_t>(p.n_levels));
  solve::expert_groups(p, all.data());
  const int32_t* group = all.data() + static_cast<size_t>(level) * experts;
  for (size_t a = 0; a < experts; ++a) {
    for (size_t b = 0; b < experts; ++b) {
      int32_t* to = z + (a * experts + b) * groups;
      std::copy_n(counted.full, groups, to);
      if (group[a] == group[b]) continue;
      const auto ga = static_cast<size_t>(group[a]), gb = static_cast<size_t>(group[b]);
      to[ga] = static_cast<int32_t>(counted.after(a, ga, b));
      to[gb] = static_cast<int32_t>(counted.after(b, gb, a));
    }
  }
  return {};
}

Status sequence(const moecclSwapProblem_t* problem, const int32_t* topk, int64_t n_tokens, int32_t max_swaps,
                int32_t* pairs, int32_t* placement, moecclSwapAnswer_t* answer) {
  MOECCL_ASSIGN_OR_RETURN(const moecclSwapProblem_t p, api::take(problem, solve::checked));
  MOECCL_TRY(solve::check_topk(p, topk, n_tokens));
  if (max_swaps < 0) return error(moecclInvalidArgument, "max_swaps is {}: give 0 or more", max_swaps);
  if (max_swaps > 0) MOECCL_TRY(api::require(pairs, "pairs", "room for max_swaps pairs"));
  MOECCL_TRY(api::require(placement, "placement", "room for n_experts slots"));
  MOECCL_TRY(api::check_answer(answer));
  moecclSwapAnswer_t made{};
  solve::solve_swap_sequence(p, topk, n_tokens, max_swaps, pairs, placement, &made);
  give(made, answer);
  return {};
}

}  // namespace

moecclResult_t moecclSwapCountsLength(const moecclSwapProblem_t* problem, size_t* n) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::require(n, "n", "the address of a size_t"));
    MOECCL_ASSIGN_OR_RETURN(const moecclSwapProblem_t p, api::take(problem, solve::checked));
    *n = solve::SwapLayout(p).length;
    return {};
  });
}

moecclResult_t moecclSwapCount(const moecclSwapProblem_t* problem, const int32_t* topk, int64_t n_tokens,
                               int32_t* counts, void* workspace, size_t workspace_bytes) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(const moecclSwapProblem_t p, api::take(problem, solve::checked));
    MOECCL_TRY(api::require(counts, "counts", "room for moecclSwapCountsLength numbers"));
    MOECCL_TRY(solve::check_topk(p, topk, n_tokens));
    MOECCL_ASSIGN_OR_RETURN(auto w, solve::Workspace::make(workspace, workspace_bytes, solve::swap_count_bytes(p),
                                                           "moecclSwapCountWorkspace"));
    solve::count_swaps(p, topk, n_tokens, counts, w.arena());
    return {};
  });
}

moecclResult_t moecclSwapCountWorkspace(const moecclSwapProblem_t* problem, size_t* bytes) {
  return api::query_size(problem, solve::checked, solve::swap_count_bytes, bytes);
}

moecclResult_t moecclSwapTable(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t level, int32_t* z) {
  return api::guarded(nullptr, [&] { return table(problem, counts, level, z); });
}

moecclResult_t moecclSolveSwap(const moecclSwapProblem_t* problem, const int32_t* counts, int32_t* pair,
                               moecclSwapAnswer_t* answer, void* workspace, size_t workspace_bytes) {
  return api::guarded(nullptr, [&] { return best_swap(problem, counts, pair, answer, workspace, workspace_bytes); });
}

moecclResult_t moecclSolveSwapWorkspace(const moecclSwapProblem_t* problem, size_t* bytes) {
  return api::query_size(problem, solve::checked, solve::swap_solve_bytes, bytes);
}

moecclResult_t moecclSolveSwapSequence(const moecclSwapProblem_t* problem, const int32_t* topk, int64_t n_tokens,
                                       int32_t max_swaps, int32_t* pairs, int32_t* placement,
                                       moecclSwapAnswer_t* answer) {
  return api::guarded(nullptr, [&] { return sequence(problem, topk, n_tokens, max_swaps, pairs, placement, answer); });
}
