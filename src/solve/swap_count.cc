// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "src/solve/checks.h"

#include "src/solve/swap.h"

// The row sums should be vectorized, see assignment.cc.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

namespace moeccl::solve {
namespace {

constexpr int32_t kMostTopK = 64;

// The index of the table [E][E] for a pair (first level where the expert is its group's first choice, first level where
// it is the only one); the latter never precedes the former. "Never first" needs no table.
size_t table_of(size_t first, size_t only) { return only * (only + 1) / 2 + first; }

struct Work {
  Work(const moecclSwapProblem_t& p, Arena& arena) {
    const auto experts = static_cast<size_t>(p.n_experts), levels = static_cast<size_t>(p.n_levels);
    group = arena.take<int32_t>(levels * experts);
    shared = arena.take<uint8_t>(experts * experts);
    n_tables = table_of(0, levels + 1);
    tables = arena.take<int32_t>(n_tables * experts * experts);
    rows = arena.take<int32_t>(2 * (levels + 1) * experts);
  }
  int32_t* group;
  uint8_t* shared;  // [E][E] the number of levels, from the outermost, at which two experts share a group
  size_t n_tables;
  int32_t* tables;
  int32_t* rows;
};

void count_tokens(const moecclSwapProblem_t& p, const int32_t* topk, int64_t n_tokens, int32_t* chosen, Work& w) {
  const auto experts = static_cast<size_t>(p.n_experts), levels = static_cast<size_t>(p.n_levels);
  size_t expert[kMostTopK];
  for (int64_t t = 0; t < n_tokens; ++t) {
    const int32_t* choice = topk + t * p.top_k;
    size_t n = 0;
    for (int32_t j = 0; j < p.top_k; ++j)
      if (choice[j] >= 0) expert[n++] = static_cast<size_t>(choice[j]);
    for (size_t i = 0; i < n; ++i) {
      const uint8_t* shared = w.shared + expert[i] * experts;
      size_t first = 0, only = 0;
      for (size_t j = 0; j < i; ++j) first = std::max<size_t>(first, shared[expert[j]]);
      only = first;
      for (size_t j = i + 1; j < n; ++j) only = std::max<size_t>(only, shared[expert[j]]);
      ++chosen[expert[i]];
      if (first == levels) continue;
      int32_t* row = w.tables + (table_of(first, only) * experts + expert[i]) * experts;
      for (size_t j = 0; j < n; ++j) ++row[expert[j]];
    }
  }
}

// Adds row a of all tables to row a of each level's counts.
void sum_row(const moecclSwapProblem_t& p, const SwapLayout& layout, size_t a, int32_t* counts, Work& w) {
  const size_t experts = layout.experts, levels = static_cast<size_t>(p.n_levels);
  int32_t *first = w.rows, *only = w.rows + (levels + 1) * experts;
  std::fill_n(w.rows, 2 * (levels + 1) * experts, 0);
  for (size_t o = 0; o <= levels; ++o) {
    for (size_t f = 0; f <= o && f < levels; ++f) {
      const int32_t* __restrict row = w.tables + (table_of(f, o) * experts + a) * experts;
      int32_t* __restrict to_first = first + f * experts, * __restrict to_only = only + o * experts;
      for (size_t b = 0; b < experts; ++b) to_first[b] += row[b], to_only[b] += row[b];
    }
  }
  for (size_t d = 0; d < levels; ++d) {
    const auto level = static_cast<int32_t>(d);
    const auto g = static_cast<size_t>(w.group[d * experts + a]);
    int32_t* at = counts + layout.level(level);
    int32_t *full = at, *alone = full + layout.groups(level), *with = alone + experts + g * experts;
    int32_t* pair = alone + experts + layout.groups(level) * experts + a * experts;
    if (d > 0) {
      for (size_t b = 0; b < experts; ++b) {
        first[d * experts + b] += first[(d - 1) * experts + b];
        only[d * experts + b] += only[(d - 1) * experts + b];
      }
    }
    for (size_t b = 0; b < experts; ++b) {
      with[b] += first[d * experts + b];
      pair[b] = only[d * experts + b];
    }
    full[g] += first[d * experts + a];
    alone[a] = only[d * experts + a];
  }
}

constexpr double kMostFigure = 1e15;

Status check_cost_arrays(const moecclSwapProblem_t& p) {
  const double* const all[] = {p.inter_alpha_us, p.inter_beta_us, p.intra_alpha_us, p.intra_beta_us};
  const char* const names[] = {"inter_alpha_us", "inter_beta_us", "intra_alpha_us", "intra_beta_us"};
  const auto given = std::count_if(all, all + 4, [](const double* a) { return a != nullptr; });
  for (int k = 0; given > 0 && k < 4; ++k) {
    if (all[k] == nullptr)
      return error(moecclInvalidArgument, "problem.{} is NULL: give all four cost arrays or none", names[k]);
    for (int32_t d = 0; d < p.n_levels; ++d)
      if (!(all[k][d] >= 0) || all[k][d] > kMostFigure)
        return error(moecclInvalidArgument, "problem.{}[{}] is {}: give a cost of 0 to {}", names[k], d, all[k][d],
                     kMostFigure);
  }
  return {};
}

Status check_numbers(const moecclSwapProblem_t& p) {
  const struct {
    const char* name;
    double value;
  } numbers[] = {{"row_bytes", p.row_bytes}, {"gamma", p.gamma}, {"migrate_us", p.migrate_us}, {"horizon", p.horizon}};
  for (const auto& n : numbers)
    if (!(n.value >= 0) || n.value > kMostFigure)
      return error(moecclInvalidArgument, "problem.{} is {}: give 0 for the default, or a number up to {}", n.name,
                   n.value, kMostFigure);
  if (p.gamma != 0 && (p.gamma < 1 || p.gamma > 1000))
    return error(moecclInvalidArgument, "problem.gamma is {}: between 1 and 1000 are possible", p.gamma);
  MOECCL_TRY(gain_share(p.min_gain));
  if (p.dimension < 0 || p.dimension > p.n_levels)
    return error(moecclInvalidArgument, "problem.dimension is {}: between 1 and {} (n_levels), or 0", p.dimension,
                 p.n_levels);
  if (raw(p.max_function) < 0 || raw(p.max_function) > moecclMaxLogSumExp)
    return error(moecclInvalidArgument, "problem.max_function is {}: give a moecclMaxFunction_t", raw(p.max_function));
  return check_cost_arrays(p);
}

Status check_levels(const moecclSwapProblem_t& p) {
  for (int32_t d = 0; d < p.n_levels; ++d) {
    if (p.n_groups[d] < 1 || p.n_groups[d] > p.n_experts)
      return error(moecclInvalidArgument, "problem.n_groups[{}] is {}: there are between 1 and n_experts ({}) groups",
                   d, p.n_groups[d], p.n_experts);
    if (d > 0 && p.n_groups[d] < p.n_groups[d - 1])
      return error(moecclInvalidArgument, "problem.n_groups[{}] is {}: levels go from the outermost to the GPUs", d,
                   p.n_groups[d]);
  }
  const auto experts = static_cast<size_t>(p.n_experts);
  for (size_t i = 0; p.group_of_slot != nullptr && i < experts * static_cast<size_t>(p.n_levels); ++i) {
    const int32_t bound = p.n_groups[i / experts];
    if (p.group_of_slot[i] < 0 || p.group_of_slot[i] >= bound)
      return error(moecclInvalidArgument, "problem.group_of_slot[{}][{}] is {}: between 0 and {} are possible",
                   i / experts, i % experts, p.group_of_slot[i], bound - 1);
  }
  if (p.placement == nullptr) return {};
  std::vector<bool> taken(experts);
  for (size_t e = 0; e < experts; ++e) {
    const int32_t s = p.placement[e];
    if (s < 0 || s >= p.n_experts || taken[static_cast<size_t>(s)])
      return error(moecclInvalidArgument, "problem.placement[{}] is {}: each slot 0 to {} once", e, s, p.n_experts - 1);
    taken[static_cast<size_t>(s)] = true;
  }
  return {};
}

Status check_nesting(const moecclSwapProblem_t& p) {
  const auto experts = static_cast<size_t>(p.n_experts);
  std::vector<int32_t> group(experts * static_cast<size_t>(p.n_levels)), parent;
  expert_groups(p, group.data());
  for (int32_t d = 1; d < p.n_levels; ++d) {
    parent.assign(static_cast<size_t>(p.n_groups[d]), -1);
    for (size_t e = 0; e < experts; ++e) {
      int32_t& of = parent[static_cast<size_t>(group[static_cast<size_t>(d) * experts + e])];
      const int32_t up = group[static_cast<size_t>(d - 1) * experts + e];
      if (of >= 0 && of != up)
        return error(moecclInvalidArgument,
                     "problem.group_of_slot: level {} does not refine level {} (a group lies in groups {} and {})", d,
                     d - 1, of, up);
      of = up;
    }
  }
  return {};
}

}  // namespace

Result<moecclSwapProblem_t> checked(const moecclSwapProblem_t& given) {
  moecclSwapProblem_t p = given;
  MOECCL_TRY(between("problem.n_experts", p.n_experts, 1, kMostSwapExperts));
  if (p.top_k < 1 || p.top_k > std::min(kMostTopK, p.n_experts))
    return error(moecclInvalidArgument, "problem.top_k is {}: between 1 and {} are possible", p.top_k,
                 std::min(kMostTopK, p.n_experts));
  MOECCL_TRY(between("problem.n_levels", p.n_levels, 1, 8));
  if (p.n_groups == nullptr)
    return error(moecclInvalidArgument, "problem.n_groups is NULL: give the groups of each level");
  MOECCL_TRY(check_levels(p));
  MOECCL_TRY(check_nesting(p));
  MOECCL_TRY(check_numbers(p));
  if (p.row_bytes == 0) p.row_bytes = 14336;
  if (p.gamma == 0) p.gamma = 10;
  if (p.horizon == 0) p.horizon = 1;
  return p;
}

Status check_topk(const moecclSwapProblem_t& p, const int32_t* topk, int64_t n_tokens) {
  MOECCL_TRY(between("n_tokens", n_tokens, 0, INT32_MAX));
  if (n_tokens > 0 && topk == nullptr)
    return error(moecclInvalidArgument, "topk is NULL: give experts[n_tokens][top_k]");
  for (int64_t t = 0; t < n_tokens; ++t) {
    const int32_t* choice = topk + t * p.top_k;
    for (int32_t j = 0; j < p.top_k; ++j) {
      if (choice[j] < -1 || choice[j] >= p.n_experts)
        return error(moecclInvalidArgument, "topk[{}][{}] is {}: between -1 and {} are possible", t, j, choice[j],
                     p.n_experts - 1);
      for (int32_t h = 0; h < j; ++h)
        if (choice[j] >= 0 && choice[h] == choice[j])
          return error(moecclInvalidArgument, "topk[{}] names expert {} twice: a token's experts are distinct", t,
                       choice[j]);
    }
  }
  return {};
}

void expert_groups(const moecclSwapProblem_t& p, int32_t* group) {
  const auto experts = static_cast<size_t>(p.n_experts);
  for (int32_t d = 0; d < p.n_levels; ++d)
    for (int32_t e = 0; e < p.n_experts; ++e) {
      const int32_t slot = p.placement ? p.placement[e] : e;
      const size_t at = static_cast<size_t>(d) * experts;
      group[at + static_cast<size_t>(e)] = p.group_of_slot
                                               ? p.group_of_slot[at + static_cast<size_t>(slot)]
                                               : static_cast<int32_t>(int64_t{slot} * p.n_groups[d] / p.n_experts);
    }
}

size_t swap_count_bytes(const moecclSwapProblem_t& p) {
  Arena measure;
  const Work laid_out(p, measure);
  return measure.used();
}

void count_swaps(const moecclSwapProblem_t& p, const int32_t* topk, int64_t n_tokens, int32_t* counts, Arena& arena) {
  Work w(p, arena);
  const SwapLayout layout(p);
  const size_t experts = layout.experts;
  expert_groups(p, w.group);
  std::fill_n(w.shared, experts * experts, uint8_t{0});
  for (int32_t d = 0; d < p.n_levels; ++d) {
    const int32_t* group = w.group + static_cast<size_t>(d) * experts;
    for (size_t a = 0; a < experts; ++a)
      for (size_t b = 0; b < experts; ++b)
        if (group[a] == group[b]) ++w.shared[a * experts + b];
  }
  std::fill_n(w.tables, w.n_tables * experts * experts, 0);
  std::fill_n(counts, layout.length, 0);
  count_tokens(p, topk, n_tokens, counts, w);
  for (size_t a = 0; a < experts; ++a) sum_row(p, layout, a, counts, w);
}

}  // namespace moeccl::solve
