// SPDX-License-Identifier: Apache-2.0
// Measures HierMoE's expert swap by the paper's own time, Eq. 1-6: does the solver predict the same times as the model,
// and do swaps that were chosen on the tokens of earlier iterations make later ones faster? Four nodes of eight A6000
// (Fig. 9).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "src/routing/hiermoe_model.h"
#include "src/solve/swap.h"
#include "topology/synthetic.h"

namespace {

using namespace moeccl;

constexpr uint32_t kRanks = 32, kTopK = 8;
constexpr int32_t kExperts = 128, kLevels = 4;
constexpr int32_t kGroups[kLevels] = {4, 8, 16, 32};
constexpr uint64_t kRowBytes = 4096;  // Qwen3-30B-A3B in bf16

struct Random {
  uint64_t state;
  uint64_t next() {  // SplitMix64
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  size_t below(size_t n) { return static_cast<size_t>(next() % n); }
};

// How tokens choose. Popularity ~ 1 / place^exponent over shuffled experts. clusters: a token takes its experts from
// one cluster of 16 seven times out of eight, and clusters have that popularity. drift: the share of the popularity
// that another order of the experts has taken over after the last iteration.
struct Source {
  const char* kind;
  double exponent;
  bool clusters = false;
  double drift = 0;
  uint64_t seed = 1;
};

class Tokens {
 public:
  explicit Tokens(const Source& s) : source_(s), random_{s.seed * 7919 + 17} {
    const size_t places = s.clusters ? kExperts / 16 : kExperts;
    for (std::vector<size_t>* order : {&first_, &second_}) {
      order->resize(places);
      std::iota(order->begin(), order->end(), size_t{0});
      for (size_t i = places; i > 1; --i) std::swap((*order)[i - 1], (*order)[random_.below(i)]);
    }
    scattered_.resize(kExperts);
    std::iota(scattered_.begin(), scattered_.end(), 0);
    for (size_t i = kExperts; i > 1; --i) std::swap(scattered_[i - 1], scattered_[random_.below(i)]);
  }

  // progress: 0 .. 1, of the drift.
  algo::GlobalRouting draw(uint64_t tokens_per_rank, double progress) {
    const std::vector<double> sums = popularity(progress * source_.drift);
    algo::GlobalRouting r;
    r.n_ranks = kRanks;
    r.top_k = kTopK;
    for (uint64_t g = 0; g <= kRanks; ++g) r.first_token.push_back(g * tokens_per_rank);
    r.expert.reserve(kRanks * tokens_per_rank * kTopK);
    for (uint64_t t = 0; t < kRanks * tokens_per_rank; ++t) draw_token(sums, r.expert);
    return r;
  }

 private:
  std::vector<double> popularity(double share) const {
    std::vector<double> sums(first_.size());
    for (size_t place = 0; place < sums.size(); ++place) {
      const double p = std::pow(static_cast<double>(place + 1), -source_.exponent);
      sums[first_[place]] += (1 - share) * p;
      sums[second_[place]] += share * p;
    }
    std::partial_sum(sums.begin(), sums.end(), sums.begin());
    return sums;
  }
  size_t pick(const std::vector<double>& sums) {
    const auto at = std::upper_bound(sums.begin(), sums.end(), random_.unit() * sums.back());
    return std::min(static_cast<size_t>(at - sums.begin()), sums.size() - 1);
  }
  void draw_token(const std::vector<double>& sums, std::vector<int32_t>& to) {
    const size_t cluster = source_.clusters ? pick(sums) : 0, begin = to.size();
    while (to.size() < begin + kTopK) {
      const size_t e = !source_.clusters       ? pick(sums)
                       : random_.below(8) != 0 ? cluster * 16 + random_.below(16)
                                               : random_.below(kExperts);
      const int32_t expert = source_.clusters ? scattered_[e] : static_cast<int32_t>(e);
      if (std::find(to.begin() + static_cast<ptrdiff_t>(begin), to.end(), expert) == to.end()) to.push_back(expert);
    }
  }

  Source source_;
  Random random_;
  std::vector<size_t> first_, second_;
  std::vector<int32_t> scattered_;
};

struct Machine {
  plan::LevelTree tree = topology::parse_synthetic("node:4 qpi:2 nvl:2 gpu:2", 0).value();
  plan::AllToAllCosts costs;
  std::vector<double> inter_alpha, inter_beta, intra_alpha, intra_beta;  // Fig. 9, in the form of swap.cc
};

Machine machine() {
  // In us, and us per byte.
  constexpr double kInter[4][2] = {{497, 5.29e-4}, {301, 1.17e-4}, {149, 2.06e-5}, {149, 2.06e-5}};
  constexpr double kIntra[4][2] = {{722, 5.70e-4}, {571, 1.27e-4}, {114, 2.63e-5}, {204, 1.64e-5}};
  Machine m;
  const auto fit = [](const double(&f)[2]) {
    plan::AllToAllCosts::Fit cost;
    cost.alpha_ns = f[0] * 1e3;
    cost.bytes_per_ns = 1e-3 / f[1];
    return cost;
  };
  m.costs.standard = fit(kIntra[0]);
  for (int i = 0; i < 3; ++i) m.costs.inter.push_back(fit(kInter[i])), m.costs.intra.push_back(fit(kIntra[i + 1]));
  return m;
}

moecclSwapProblem_t problem_of(const std::vector<int32_t>& placement) {
  moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
  p.n_experts = kExperts;
  p.top_k = kTopK;
  p.n_levels = kLevels;
  p.n_groups = kGroups;
  p.row_bytes = kRowBytes;
  p.placement = placement.data();
  return p;
}

// Returns Eq. 1 to 6 of the traffic between all pairs of ranks, in us, for the best dimension.
double model_us(const Machine& m, const algo::GlobalRouting& routing, const std::vector<int32_t>& slot_of,
                int32_t* dimension = nullptr) {
  std::vector<int32_t> owner;
  for (const int32_t slot : slot_of) owner.push_back(slot * static_cast<int32_t>(kRanks) / kExperts);
  const algo::Placement placement = algo::Placement::make(kExperts, kRanks, owner.data()).value();
  double best = INFINITY;
  for (uint32_t d = 1; d <= kLevels; ++d) {
    const algo::MoeAlgorithm hier{algo::PathKind::kHier, d};
    const algo::Traffic traffic =
        algo::count_traffic(algo::Paths(hier, m.tree, placement), {m.tree, placement, routing}).value();
    const double us = algo::hiermoe_time(hier, traffic, m.tree, m.costs, kRowBytes).total_ns / 1e3;
    if (us < best && dimension != nullptr) *dimension = static_cast<int32_t>(d);
    best = std::min(best, us);
  }
  return best;
}

std::vector<int32_t> counts_of(const moecclSwapProblem_t& p, const algo::GlobalRouting& r) {
  size_t n = 0;
  perf::check(moecclSwapCountsLength(&p, &n), "moecclSwapCountsLength");
  std::vector<int32_t> counts(n);
  perf::check(moecclSwapCount(&p, r.expert.data(), static_cast<int64_t>(r.n_tokens()), counts.data(), nullptr, 0),
              "moecclSwapCount");
  return counts;
}

std::vector<int32_t> identity() {
  std::vector<int32_t> slots(kExperts);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

// Uses even sources: every rank has the same tokens.
int compare_models(const Machine& m, int n) {
  double worst = 0;
  int other_dimension = 0;
  for (int i = 0; i < n; ++i) {
    const Source s{"even", 0.012 * i, i % 4 == 3, 0, static_cast<uint64_t>(i) + 1};
    Tokens tokens(s);
    algo::GlobalRouting r = tokens.draw(i % 2 == 0 ? 64 : 1024, 0);
    const size_t share = r.expert.size() / kRanks;
    for (size_t g = 1; g < kRanks; ++g)
      std::copy_n(r.expert.begin(), share, r.expert.begin() + static_cast<ptrdiff_t>(g * share));
    const std::vector<int32_t> slots = identity();
    moecclSwapProblem_t p = problem_of(slots);
    p.max_function = moecclMaxPlain;
    moecclSwapAnswer_t a{};
    a.size = sizeof(a);
    int32_t pair[2], d = 0;
    perf::check(moecclSolveSwap(&p, counts_of(p, r).data(), pair, &a, nullptr, 0), "moecclSolveSwap");
    const double want = model_us(m, r, slots, &d);
    worst = std::max(worst, std::fabs(a.before_us / want - 1));
    if (a.dimension != d) ++other_dimension;
  }
  std::printf("model: %d routings of even sources: before_us within %.2f %% of Eq. 1-6, another d in %d\n", n,
              100 * worst, other_dimension);
  return worst <= 0.05 && other_dimension == 0 ? 0 : 1;
}

struct Policy {
  int iterations = 60, every = 1;
  uint64_t tokens = 1024, held_out = 4096;
  double min_gain = 0.001, gamma = 0;  // the default of moecclExpertSwapConfig_t
  moecclMaxFunction_t max_function = moecclMaxSmooth;
};

struct Outcome {
  double ratio = 1;  // held-out time without swaps over that with them
  int swaps = 0;
};

Outcome gain_of(const Machine& m, const Source& s, const Policy& policy) {
  Tokens tokens(s);
  std::vector<int32_t> slots = identity();
  Outcome o;
  for (int i = 0; i < policy.iterations; ++i) {
    if (i % policy.every != 0) continue;
    const algo::GlobalRouting r = tokens.draw(policy.tokens, static_cast<double>(i) / policy.iterations);
    moecclSwapProblem_t p = problem_of(slots);
    p.min_gain = policy.min_gain;
    p.gamma = policy.gamma;
    p.max_function = policy.max_function;
    int32_t pair[2];
    perf::check(moecclSolveSwap(&p, counts_of(p, r).data(), pair, nullptr, nullptr, 0), "moecclSolveSwap");
    if (pair[0] < 0) continue;
    std::swap(slots[static_cast<size_t>(pair[0])], slots[static_cast<size_t>(pair[1])]);
    ++o.swaps;
  }
  const algo::GlobalRouting later = tokens.draw(policy.held_out, 1);
  o.ratio = model_us(m, later, identity()) / model_us(m, later, slots);
  return o;
}

// Returns fifty sources: zipf 0 to 1.2, clusters, and popularity that drifts.
std::vector<Source> sources() {
  std::vector<Source> all;
  for (uint64_t seed = 1; seed <= 8; ++seed) all.push_back({"zipf", 0.8, false, 0, seed});
  for (uint64_t i = 0; i < 18; ++i) all.push_back({"zipf", 1.2 * static_cast<double>(i) / 17, false, 0, 100 + i});
  for (uint64_t i = 0; i < 12; ++i) all.push_back({"clustered", 0.1 * static_cast<double>(i), true, 0, 200 + i});
  for (uint64_t i = 0; i < 12; ++i)
    all.push_back({"drifting", 0.1 * static_cast<double>(i + 1), i % 3 == 2, 0.5, 300 + i});
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Policy policy;
  int models = 100;
  size_t stride = 1;
  double at_zipf = 0.02;
  perf::App app("expert swap by HierMoE's Eq. 1-6, on tokens that the solver has not seen");
  app.add_option("--models", models, "random routings for which the solver's price is compared")->capture_default_str();
  app.add_option("--stride", stride, "takes every so many of the 50 routings")
      ->check(perf::range(1, 50))
      ->capture_default_str();
  app.add_option("--iterations", policy.iterations, "steps whose tokens the solver sees")
      ->check(perf::positive())
      ->capture_default_str();
  app.add_option("--every", policy.every, "iterations from solve to solve")
      ->check(perf::positive())
      ->capture_default_str();
  app.add_option("--tokens", policy.tokens, "of each rank in an iteration")->capture_default_str();
  app.add_option("--held-out", policy.held_out, "tokens of each rank by which a placement is judged")
      ->capture_default_str();
  app.add_option("--min-gain", policy.min_gain, "least gain of a swap")->capture_default_str();
  app.add_option("--gamma", policy.gamma, "of the smooth maximum (0: the solver's own)")->capture_default_str();
  app.add_option("--at-zipf", at_zipf, "the least mean gain at zipf 0.8")->capture_default_str();
  int max_function = 0;
  app.add_option("--max", max_function, "0 smooth, 1 plain, 2 log-sum-exp")->capture_default_str();
  perf::parse_or_exit(app, argc, argv);
  policy.max_function = static_cast<moecclMaxFunction_t>(max_function);
  const Machine m = machine();
  int failed = compare_models(m, models);
  double least = INFINITY, sum = 0, all = 0;
  int n = 0, slower = 0, seen = 0;
  const std::vector<Source> every = sources();
  for (size_t i = 0; i < every.size(); i += stride) {
    const Source& s = every[i];
    const Outcome o = gain_of(m, s, policy);
    std::printf("%-9s exponent %.2f%s: %.4f after %d swaps\n", s.kind, s.exponent, s.clusters ? " clusters" : "",
                o.ratio, o.swaps);
    least = std::min(least, o.ratio);
    slower += o.ratio < 1 ? 1 : 0;
    all += o.ratio, ++seen;
    if (s.exponent == 0.8 && !s.clusters && s.drift == 0) sum += o.ratio - 1, ++n;
  }
  std::printf("%d routings held out: least %.4f, mean %.4f, slower in %d; zipf 0.8: mean gain %.2f %%\n", seen, least,
              all / seen, slower, 100 * sum / n);
  if (slower > 0 || sum / n < at_zipf) failed = 1;
  return failed;
}
