// SPDX-License-Identifier: Apache-2.0
#include "src/solve/swap.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace moeccl::solve {
namespace {

// From HierMoE Fig. 9, four nodes of eight A6000, in us and us per byte: Inter-level-1 to 3 (the last entry is unused
// with four levels), and the flat AlltoAll and Intra-level-1 to 3. Deeper levels repeat the last entry.
constexpr double kInterAlpha[] = {497, 301, 149, 149}, kInterBeta[] = {5.29e-4, 1.17e-4, 2.06e-5, 2.06e-5};
constexpr double kIntraAlpha[] = {722, 571, 114, 204}, kIntraBeta[] = {5.70e-4, 1.27e-4, 2.63e-5, 1.64e-5};

struct Link {
  double alpha, beta;
};
Link inter(const moecclSwapProblem_t& p, int32_t d) {
  const int32_t at = std::min(d, 3);
  return p.inter_alpha_us ? Link{p.inter_alpha_us[d], p.inter_beta_us[d]} : Link{kInterAlpha[at], kInterBeta[at]};
}
Link intra(const moecclSwapProblem_t& p, int32_t d) {
  const int32_t at = std::min(d, 3);
  return p.intra_alpha_us ? Link{p.intra_alpha_us[d], p.intra_beta_us[d]} : Link{kIntraAlpha[at], kIntraBeta[at]};
}

double power(double x, double gamma) {
  const int n = static_cast<int>(gamma);
  if (n != gamma || n > 64) return std::pow(x, gamma);
  double result = 1;
  for (int bits = n; bits > 0; bits >>= 1, x *= x)
    if (bits & 1) result *= x;
  return result;
}

// A maximum is a sum (or the largest) of terms that is finished once, so two groups' terms can be exchanged.
struct Terms {
  moecclMaxFunction_t function;
  double gamma, scale;  // counts are divided by scale, or it is subtracted, so that powers stay in range

  double term(double x) const {
    if (function == moecclMaxPlain) return x;
    if (function == moecclMaxSmooth) return power(std::max(x, 0.0) / scale, gamma);
    return std::exp(std::min(x - scale, 600.0));
  }
  double join(double a, double b) const { return function == moecclMaxPlain ? std::max(a, b) : a + b; }
  double none() const { return function == moecclMaxPlain ? -1e300 : 0; }
  double finish(double joined) const {
    if (function == moecclMaxPlain) return joined;
    if (function == moecclMaxSmooth) return joined <= 0 ? 0 : scale * std::pow(joined, 1 / gamma);
    return joined <= 0 ? 0 : scale + std::log(joined);
  }
};
Terms terms_of(const moecclSwapProblem_t& p, double largest) {
  return {p.max_function, p.gamma, p.max_function == moecclMaxLogSumExp ? largest : std::max(largest, 1.0)};
}

// One term of Eq. 8: factor * max(Z of one level).
struct Part {
  int32_t level;
  double factor, alpha;
};

class Objective {
 public:
  Objective(const moecclSwapProblem_t& p, const int32_t* counts, Arena& arena)
      : p_(p), layout_(p), counts_(counts), experts_(layout_.experts) {
    const auto levels = static_cast<size_t>(p.n_levels);
    group_ = arena.take<int32_t>(levels * experts_);
    for (size_t d = 0; d < levels; ++d) {
      const size_t n = layout_.groups(static_cast<int32_t>(d));
      full_[d] = arena.take<double>(n);
      rest_[d] = arena.take<double>(n * n);
    }
  }

  void prepare() {
    expert_groups(p_, group_);
    for (int32_t d = 0; d < p_.n_levels; ++d) prepare_level(d);
    dimension_ = p_.dimension;
    if (dimension_ == 0) {  // Eq. 6 for the current placement, with max as in Eq. 2 to 5, whatever Eq. 9 uses
      dimension_ = 1;
      for (int32_t d = 2; d <= p_.n_levels; ++d)
        if (current(d, fullest_) < current(dimension_, fullest_)) dimension_ = d;
    }
    n_parts_ = parts(dimension_, parts_);
  }
  int32_t dimension() const { return dimension_; }
  double current() const { return current(dimension_, base_); }
  double max_load() const {
    const size_t n = layout_.groups(p_.n_levels - 1);
    const SwapLevel z(layout_, counts_, p_.n_levels - 1);
    return *std::max_element(z.full, z.full + n);
  }
  // Returns true if Eq. 8 with max, which is the time, would be larger after swapping a and b: a smooth maximum may
  // fall even though the time grows.
  bool slower(size_t a, size_t b) const {
    double sum = 0, now = 0;
    for (int k = 0; k < n_parts_; ++k) {
      const Part& part = parts_[k];
      now += part.factor * fullest_[part.level];
      sum += part.factor * fullest_after(part.level, a, b);
    }
    return sum > now;
  }
  // Returns Eq. 8 after swapping a and b, or infinity as soon as it cannot be below `bound`.
  double after(size_t a, size_t b, double bound) const {
    double sum = 0;
    for (int k = 0; k < n_parts_; ++k) {
      sum += parts_[k].alpha + parts_[k].factor * level_after(parts_[k].level, a, b);
      if (sum >= bound) return INFINITY;
    }
    return sum;
  }

 private:
  // Computes Eq. 8 and 9 for dimension d. Eq. 2, 4 and 5 count one GPU's tokens, but the joined counts are those of all
  // GPUs: G/U[i-1] GPUs share what reaches a group in Inter-level-i (all G in Inter-level-1), and G/U[d-1] in
  // Intra-level-(d-1).
  int parts(int32_t d, Part* to) const {
    const int32_t last = p_.n_levels - 1;
    const auto part = [&](int32_t level, int32_t outside, const Link& link) {
      const double parents = outside < 0 ? 1 : p_.n_groups[outside];
      const double gpus = p_.n_groups[level] / parents, holders = p_.n_groups[last] / parents;
      return Part{level, gpus / holders * p_.row_bytes * link.beta, link.alpha};
    };
    int n = 0;
    for (int32_t i = 0; i + 1 < d; ++i) to[n++] = part(i, i - 1, inter(p_, i));
    to[n++] = part(last, d - 2, intra(p_, d - 1));
    return n;
  }
  double current(int32_t d, const double* maximum) const {
    Part part[8];
    const int n = parts(d, part);
    double sum = 0;
    for (int k = 0; k < n; ++k) sum += part[k].alpha + part[k].factor * maximum[part[k].level];
    return sum;
  }
  void prepare_level(int32_t d) {
    const size_t n = layout_.groups(d);
    const SwapLevel z(layout_, counts_, d);
    double* full = full_[d];
    if (p_.count_duplicates) {
      std::fill_n(full, n, 0);
      for (size_t e = 0; e < experts_; ++e) full[group_[static_cast<size_t>(d) * experts_ + e]] += counts_[e];
    } else {
      std::copy_n(z.full, n, full);
    }
    fullest_[d] = *std::max_element(full, full + n);
    for (size_t g = 0; g < n; ++g) insert_top(top_[d], full, static_cast<int32_t>(g));
    const Terms& t = terms_[d] = terms_of(p_, fullest_[d]);
    // rest[A][B] joins all groups except A and B, by running over the groups before, between and after them.
    std::vector<double> term(n), before(n + 1, t.none()), behind(n + 1, t.none());
    for (size_t g = 0; g < n; ++g) term[g] = t.term(full[g]);
    for (size_t g = 0; g < n; ++g) before[g + 1] = t.join(before[g], term[g]);
    for (size_t g = n; g-- > 0;) behind[g] = t.join(behind[g + 1], term[g]);
    for (size_t a = 0; a < n; ++a) {
      double between = t.none();
      for (size_t b = a + 1; b < n; ++b) {
        rest_[d][a * n + b] = rest_[d][b * n + a] = t.join(t.join(before[a], between), behind[b + 1]);
        between = t.join(between, term[b]);
      }
    }
    base_[d] = t.finish(before[n]);
  }
  // The groups of a and b at a level, and their tokens after the swap.
  struct Pair {
    size_t ga, gb;
    double za, zb;
  };
  Pair pair_after(int32_t d, size_t a, size_t b) const {
    const int32_t* group = group_ + static_cast<size_t>(d) * experts_;
    Pair p{static_cast<size_t>(group[a]), static_cast<size_t>(group[b]), 0, 0};
    if (p.ga == p.gb) return p;
    if (p_.count_duplicates) {
      const double moved = static_cast<double>(counts_[b]) - counts_[a];
      p.za = full_[d][p.ga] + moved, p.zb = full_[d][p.gb] - moved;
    } else {
      const SwapLevel z(layout_, counts_, d);
      p.za = static_cast<double>(z.after(a, p.ga, b));
      p.zb = static_cast<double>(z.after(b, p.gb, a));
    }
    return p;
  }
  double level_after(int32_t d, size_t a, size_t b) const {
    const Pair p = pair_after(d, a, b);
    if (p.ga == p.gb) return base_[d];
    const Terms& t = terms_[d];
    const size_t n = layout_.groups(d);
    const double joined = t.join(t.join(rest_[d][p.ga * n + p.gb], t.term(p.za)), t.term(p.zb));
    constexpr double kPrecise = 1e-250;
    if (p_.max_function != moecclMaxLogSumExp || joined > kPrecise) return t.finish(joined);
    // So far below the old maximum, the exponentials are 0.
    const Terms own = terms_of(p_, fullest_after(d, a, b));
    double sum = own.none();
    for (size_t g = 0; g < n; ++g) sum = own.join(sum, own.term(g == p.ga ? p.za : g == p.gb ? p.zb : full_[d][g]));
    return own.finish(sum);
  }
  double fullest_after(int32_t d, size_t a, size_t b) const {
    const Pair p = pair_after(d, a, b);
    if (p.ga == p.gb) return fullest_[d];
    double most = std::max(p.za, p.zb);
    for (const int32_t g : top_[d])
      if (g >= 0 && static_cast<size_t>(g) != p.ga && static_cast<size_t>(g) != p.gb)
        most = std::max(most, full_[d][g]);
    return most;
  }
  // Keeps the three fullest groups, because at least one of them is not in a given pair.
  static void insert_top(int32_t (&top)[3], const double* full, int32_t g) {
    for (int32_t& at : top) {
      if (g < 0) return;
      if (at < 0 || full[g] > full[at]) std::swap(at, g);
    }
  }

  const moecclSwapProblem_t& p_;
  const SwapLayout layout_;
  const int32_t* counts_;
  const size_t experts_;
  int32_t* group_;
  double *full_[8], *rest_[8];
  double base_[8] = {}, fullest_[8] = {};  // Eq. 9's maximum, and max, of each level
  int32_t top_[8][3] = {{-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1},
                        {-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1}, {-1, -1, -1}};
  Terms terms_[8] = {};
  int32_t dimension_ = 1;
  Part parts_[8] = {};
  int n_parts_ = 0;
};

}  // namespace

size_t swap_solve_bytes(const moecclSwapProblem_t& p) {
  Arena measure;
  const Objective laid_out(p, nullptr, measure);
  return measure.used();
}

void solve_swap(const moecclSwapProblem_t& p, const int32_t* counts, int32_t* pair, moecclSwapAnswer_t* answer,
                Arena& arena, std::span<const int32_t> kind) {
  Objective q(p, counts, arena);
  q.prepare();
  const double before = q.current();
  // Sums of the same terms in another order differ in their last digits.
  constexpr double kLeastGain = 1e-9;
  double best = before * (1 - kLeastGain);
  pair[0] = pair[1] = -1;
  const auto experts = static_cast<size_t>(p.n_experts);
  const auto kind_of = [&](size_t e) { return kind[p.placement != nullptr ? static_cast<size_t>(p.placement[e]) : e]; };
  for (size_t a = 0; a < experts; ++a) {
    for (size_t b = a + 1; b < experts; ++b) {
      if (!kind.empty() && kind_of(a) != kind_of(b)) continue;
      const double time = q.after(a, b, best);
      if (time < best && !q.slower(a, b)) {
        best = time;
        pair[0] = static_cast<int32_t>(a);
        pair[1] = static_cast<int32_t>(b);
      }
    }
  }
  if (pair[0] < 0) best = before;
  *answer = {};
  answer->before_us = before;
  answer->gain = before > 0 ? 1 - best / before : 0;
  answer->dimension = q.dimension();
  answer->max_load_before = static_cast<int64_t>(q.max_load());
  answer->max_load_after = answer->max_load_before;
  answer->keep = pair[0] < 0 || answer->gain < p.min_gain || (before - best) * p.horizon <= p.migrate_us;
  if (answer->keep) {
    pair[0] = pair[1] = -1;
  } else {
    answer->n_swaps = 1;
    const int32_t last = p.n_levels - 1;
    const SwapLayout layout(p);
    const SwapLevel z(layout, counts, last);
    std::vector<int32_t> group(experts * static_cast<size_t>(p.n_levels));
    expert_groups(p, group.data());
    const auto a = static_cast<size_t>(pair[0]), b = static_cast<size_t>(pair[1]);
    const auto ga = static_cast<size_t>(group[static_cast<size_t>(last) * experts + a]);
    const auto gb = static_cast<size_t>(group[static_cast<size_t>(last) * experts + b]);
    int64_t load = 0;
    for (size_t g = 0; g < layout.groups(last); ++g)
      load = std::max(load, ga != gb && g == ga   ? z.after(a, ga, b)
                            : ga != gb && g == gb ? z.after(b, gb, a)
                                                  : z.full[g]);
    answer->max_load_after = load;
  }
  answer->after_us = answer->keep ? before : best;
}

void solve_swap_sequence(const moecclSwapProblem_t& problem, const int32_t* topk, int64_t n_tokens, int32_t max_swaps,
                         int32_t* pairs, int32_t* placement, moecclSwapAnswer_t* answer) {
  moecclSwapProblem_t p = problem;
  for (int32_t e = 0; e < p.n_experts; ++e) placement[e] = problem.placement ? problem.placement[e] : e;
  p.placement = placement;
  std::vector<int32_t> counts(SwapLayout(p).length);
  const size_t count_bytes = swap_count_bytes(p), solve_bytes = swap_solve_bytes(p);
  auto w = Workspace::make(nullptr, 0, std::max(count_bytes, solve_bytes), "");
  moecclSwapAnswer_t all{};
  for (int32_t s = 0; s <= max_swaps; ++s) {
    w->arena().release(0);
    count_swaps(p, topk, n_tokens, counts.data(), w->arena());
    w->arena().release(0);
    int32_t pair[2];
    moecclSwapAnswer_t step{};
    solve_swap(p, counts.data(), pair, &step, w->arena());
    if (s == 0) all = step, all.n_swaps = 0;
    all.after_us = step.before_us;
    all.max_load_after = step.max_load_before;
    if (step.keep || s == max_swaps) break;
    p.dimension = step.dimension;  // the choice of Eq. 6 is made once, so that times are comparable
    pairs[2 * s] = pair[0];
    pairs[2 * s + 1] = pair[1];
    std::swap(placement[pair[0]], placement[pair[1]]);
    ++all.n_swaps;
  }
  all.gain = all.before_us > 0 ? 1 - all.after_us / all.before_us : 0;
  all.keep = all.n_swaps == 0;
  *answer = all;
}

}  // namespace moeccl::solve
