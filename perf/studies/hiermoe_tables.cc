// SPDX-License-Identifier: Apache-2.0
// Computes HierMoE's Table IV, Fig. 11 and 13 and Section V-E in closed form: Eq. 1 to 6 with the AlltoAlls of Fig. 9,
// over one stated routing for all cells. Prints one JSON line for each number. --search prints how far other routings
// are from the paper.
#include <moeccl/moeccl.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "perf/common/fail.h"
#include "perf/common/pattern.h"
#include "perf/common/shared_options.h"

namespace {

// One server has the levels of Fig. 9 below the node, and its Intra-level-1 for the standard AlltoAll.
constexpr double kInter[][2] = {{497, 5.29e-4}, {301, 1.17e-4}, {149, 2.06e-5}, {149, 2.06e-5}};
constexpr double kIntra[][2] = {{722, 5.70e-4}, {571, 1.27e-4}, {114, 2.63e-5}, {204, 1.64e-5}};

struct Cell {
  const char* item;
  int32_t gpus, experts, top_k;
  double row_bytes, hd2, hd, hiermoe;  // the paper's speed-ups over Megatron-LM; 0: not printed
  bool deepseek = false;
};
// Qwen3-30B-A3B has rows of 2048 bf16, and the half-width DeepSeek-V3 has rows of 3584.
constexpr Cell kCells[] = {{"Table IV, K=6 E=128 G=32", 32, 128, 6, 4096, 0.95, 1.37, 1.56},
                           {"Table IV, K=8 E=128 G=32", 32, 128, 8, 4096, 1.26, 1.72, 1.99},
                           {"Table IV, K=10 E=128 G=32", 32, 128, 10, 4096, 1.30, 1.82, 2.10},
                           {"Table IV, K=8 E=64 G=32", 32, 64, 8, 4096, 1.12, 1.57, 1.83},
                           {"Table IV, K=8 E=256 G=32", 32, 256, 8, 4096, 1.18, 1.61, 1.84},
                           {"Table IV, K=8 E=128 G=8", 8, 128, 8, 4096, 1.24, 2.36, 2.86},
                           {"Table IV, K=8 E=128 G=16", 16, 128, 8, 4096, 1.71, 2.50, 2.62},
                           {"Fig. 11, DeepSeek-V3 K=8 E=256 G=32", 32, 256, 8, 7168, 1.76, 2.55, 2.72, true}};

// Experts belong to clusters that are scattered over all GPUs. A token belongs to one cluster and takes this share of
// its choices from it, the others from all experts. Clusters have popularity ~ 1 / place^zipf. DeepSeek-V3 takes a
// token's experts from 4 of 8 groups.
constexpr size_t kClusters = 8;
struct Routing {
  double zipf = 0.15, share = 0.57;
  uint64_t seed = 1;
};

struct Random {
  uint64_t seed, n = 0;
  uint64_t below(uint64_t bound) { return perf::mix(seed, n++, 7) % bound; }
  double unit() { return static_cast<double>(perf::mix(seed, n++, 11) >> 11) * 0x1p-53; }
};

std::vector<int32_t> tokens_of(const Cell& c, const Routing& r, int64_t n_tokens, uint64_t draw) {
  const auto experts = static_cast<size_t>(c.experts), k = static_cast<size_t>(c.top_k), size = experts / kClusters;
  Random places{r.seed}, random{r.seed * 1000 + draw};
  std::vector<size_t> scattered(experts);
  std::iota(scattered.begin(), scattered.end(), size_t{0});
  for (size_t i = experts; i > 1; --i) std::swap(scattered[i - 1], scattered[places.below(i)]);
  std::vector<double> sums(kClusters);
  for (size_t place = 0; place < kClusters; ++place) sums[place] = std::pow(static_cast<double>(place + 1), -r.zipf);
  std::partial_sum(sums.begin(), sums.end(), sums.begin());
  std::vector<int32_t> topk;
  for (int64_t t = 0; t < n_tokens; ++t) {
    const size_t first = topk.size();
    const auto at = std::upper_bound(sums.begin(), sums.end(), random.unit() * sums.back()) - sums.begin();
    const size_t cluster = std::min(static_cast<size_t>(at), kClusters - 1);
    size_t groups = 0;
    while (c.deepseek && std::popcount(groups) < 4) groups |= size_t{1} << random.below(8);
    while (topk.size() < first + k) {
      const bool near = random.unit() < r.share;
      const size_t e = scattered[near ? cluster * size + random.below(size) : random.below(experts)];
      if (c.deepseek && (groups >> (e * 8 / experts) & 1) == 0) continue;
      if (std::find(topk.begin() + static_cast<ptrdiff_t>(first), topk.end(), static_cast<int32_t>(e)) != topk.end())
        continue;
      topk.push_back(static_cast<int32_t>(e));
    }
  }
  return topk;
}

// A cell's testbed as a problem of the solver, whose before_us is Eq. 1 to 5 of even sources.
class Testbed {
 public:
  Testbed(const Cell& c, const Routing& r, int64_t tokens_per_gpu) : cell_(c) {
    for (const int32_t below : {8, 4, 2, 1})
      if (c.gpus > 8 || below < 8) groups_.push_back(c.gpus / below);
    const size_t first = c.gpus > 8 ? 0 : 1;
    for (size_t l = 0; l < groups_.size(); ++l)
      for (int ab = 0; ab < 2; ++ab)
        inter_[ab].push_back(kInter[first + l][ab]), intra_[ab].push_back(kIntra[first + l][ab]);
    topk_ = tokens_of(c, r, tokens_per_gpu * c.gpus, 0);
    later_ = tokens_of(c, r, tokens_per_gpu * c.gpus, 1);
  }
  int32_t depth() const { return static_cast<int32_t>(groups_.size()); }

  double us(int32_t dimension, bool dedup, const std::vector<int32_t>& placement) const {
    moecclSwapProblem_t p = problem();
    p.placement = placement.empty() ? nullptr : placement.data();
    p.dimension = dimension;
    p.count_duplicates = dedup ? 0 : 1;
    p.max_function = moecclMaxPlain;
    int32_t pair[2];
    moecclSwapAnswer_t a{};
    a.size = sizeof(a);
    perf::check(moecclSolveSwap(&p, counts_of(p, later_).data(), pair, &a, nullptr, 0), "moecclSolveSwap");
    return a.before_us;
  }
  double best_us(const std::vector<int32_t>& placement) const {
    double best = us(1, true, placement);
    for (int32_t d = 2; d <= depth(); ++d) best = std::min(best, us(d, true, placement));
    return best;
  }
  // The paper swaps at every iteration; this function swaps repeatedly on an earlier step's tokens.
  std::vector<int32_t> swapped(bool count_duplicates) const {
    moecclSwapProblem_t p = problem();
    p.count_duplicates = count_duplicates ? 1 : 0;
    if (count_duplicates) p.dimension = 2;
    constexpr int32_t kSwaps = 100;
    std::vector<int32_t> pairs(2 * kSwaps), placement(static_cast<size_t>(cell_.experts));
    perf::check(moecclSolveSwapSequence(&p, topk_.data(), static_cast<int64_t>(topk_.size()) / cell_.top_k, kSwaps,
                                        pairs.data(), placement.data(), nullptr),
                "moecclSolveSwapSequence");
    return placement;
  }

  // Section V-E: a pair is swapped every so many iterations, by the tokens of that iteration.
  struct Policy {
    int every = 1;
    moecclMaxFunction_t max_function = moecclMaxSmooth;
  };
  std::vector<int32_t> swapped_by(const Policy& policy, const Routing& r) const {
    constexpr int kIterations = 200;
    std::vector<int32_t> slots(static_cast<size_t>(cell_.experts));
    std::iota(slots.begin(), slots.end(), 0);
    const int64_t n_tokens = static_cast<int64_t>(topk_.size()) / cell_.top_k;
    for (int i = 0; i < kIterations; i += policy.every) {
      moecclSwapProblem_t p = problem();
      p.placement = slots.data();
      p.max_function = policy.max_function;
      p.min_gain = 0.001;  // the default of moecclExpertSwapConfig_t
      const std::vector<int32_t> now = tokens_of(cell_, r, n_tokens, 2 + static_cast<uint64_t>(i));
      int32_t pair[2];
      perf::check(moecclSolveSwap(&p, counts_of(p, now).data(), pair, nullptr, nullptr, 0), "moecclSolveSwap");
      if (pair[0] >= 0) std::swap(slots[static_cast<size_t>(pair[0])], slots[static_cast<size_t>(pair[1])]);
    }
    return slots;
  }

 private:
  static std::vector<int32_t> counts_of(const moecclSwapProblem_t& p, const std::vector<int32_t>& topk) {
    size_t n = 0;
    perf::check(moecclSwapCountsLength(&p, &n), "moecclSwapCountsLength");
    std::vector<int32_t> counts(n);
    perf::check(
        moecclSwapCount(&p, topk.data(), static_cast<int64_t>(topk.size()) / p.top_k, counts.data(), nullptr, 0),
        "moecclSwapCount");
    return counts;
  }
  moecclSwapProblem_t problem() const {
    moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
    p.n_experts = cell_.experts;
    p.top_k = cell_.top_k;
    p.n_levels = depth();
    p.n_groups = groups_.data();
    p.row_bytes = cell_.row_bytes;
    p.inter_alpha_us = inter_[0].data(), p.inter_beta_us = inter_[1].data();
    p.intra_alpha_us = intra_[0].data(), p.intra_beta_us = intra_[1].data();
    return p;
  }

  Cell cell_;
  std::vector<int32_t> groups_, topk_, later_;
  std::vector<double> inter_[2], intra_[2];
};

// `more`: further fields of the line, or nothing.
void row(const std::string& item, double paper, double ours, const std::string& command, const std::string& more = "") {
  std::printf("{\"paper\":\"HierMoE\",\"item\":\"%s\",\"paper_value\":", item.c_str());
  if (paper > 0)
    std::printf("%.2f", paper);
  else
    std::printf("null");
  std::printf(",\"ours\":%.3f,\"how\":\"closed form\",\"command\":\"%s\"%s}\n", ours, command.c_str(), more.c_str());
}

// The paper prints one range for its two models.
struct Range {
  double low, high, bound;  // bound: what the paper's equations allow at most
};
void row_in(const std::string& item, const Range& paper, double ours, const std::string& command) {
  std::printf("{\"paper\":\"HierMoE\",\"item\":\"%s\",\"paper_value\":\"%.2f to %.2f\",\"rule\":[\"in\",%.2f,%.2f]",
              item.c_str(), paper.low, paper.high, paper.low, paper.high);
  std::printf(",\"ours\":%.3f,\"how\":\"closed form\",\"command\":\"%s\",\"bound\":%.2f}\n", ours, command.c_str(),
              paper.bound);
}

// Section V-C: HD2-MoE is the AlltoAll of Fig. 4(b), between nodes and then inside them. One node has only the latter.
double hd2_us(const Testbed& t, const Cell& c, const std::vector<int32_t>& placement) {
  return t.us(c.gpus > 8 ? 2 : 1, true, placement);
}

// By Fig. 9, HD-MoE saves at most this share of Megatron-LM's time over HD2-MoE: docs/performance-papers.md.
constexpr double kMostOverHd2 = 0.125;
double most_over_hd2(const Cell& c) { return 1 + kMostOverHd2 * c.hd; }

void print_cell(const Cell& c, const Routing& r, int64_t tokens, const std::string& command) {
  const Testbed t(c, r, tokens);
  const double megatron = t.us(1, false, {}), hd2 = hd2_us(t, c, {}), hd = t.best_us({});
  const std::string item = c.item;
  const auto bound = [&](double figure) {
    char more[40] = "";
    if (c.gpus > 8) std::snprintf(more, sizeof more, ",\"bound\":%.2f", figure);
    return std::string(more);
  };
  row(item + ", HD2-MoE", c.hd2, megatron / hd2, command, bound(c.hd / most_over_hd2(c)));
  row(item + ", HD-MoE", c.hd, megatron / hd, command);
  row(item + ", HD-MoE over HD2-MoE", c.hd / c.hd2, hd2 / hd, command, bound(most_over_hd2(c)));
}

// Eq. 3 without deduplication over Eq. 1, of an even routing; a skewed one slows the standard AlltoAll down more.
double two_d_over_standard(const Cell& c, int64_t tokens) {
  const double n = static_cast<double>(tokens * c.top_k) * c.row_bytes;
  return (kInter[0][0] + kIntra[1][0] + (kInter[0][1] + kIntra[1][1]) * n) / (kIntra[0][0] + kIntra[0][1] * n);
}

// The rows of HierMoE, which swaps experts.
void print_swapped(const Cell& c, const Routing& r, int64_t tokens, const std::string& command) {
  const Testbed t(c, r, tokens);
  const double hiermoe = t.best_us(t.swapped(false));
  const std::string item = c.item;
  row(item + ", HierMoE", c.hiermoe, t.us(1, false, {}) / hiermoe, command);
  row(item + ", HierMoE over HD-MoE", c.hiermoe / c.hd, t.best_us({}) / hiermoe, command);
  if (!c.deepseek && item != "Table IV, K=8 E=128 G=32") return;
  const std::string model = c.deepseek ? "Fig. 11, DeepSeek-V3" : "Fig. 11, Qwen3-30B-A3B";
  row_in(model + ", HierMoE over HD2-MoE-Smart", {1.55, 1.64, most_over_hd2(c) * c.hiermoe / c.hd},
         hd2_us(t, c, t.swapped(true)) / hiermoe, command);
  row_in(model + ", HierMoE over Tutel-2DH", {2.34, 3.32, c.hiermoe * two_d_over_standard(c, tokens)},
         t.us(2, false, {}) / hiermoe, command);
}

void print_policies(const Cell& c, const Routing& r, int64_t tokens, const std::string& command) {
  const Testbed t(c, r, tokens);
  const auto print = [&](const std::string& what, double paper, const Testbed::Policy& policy) {
    row("Section V-E, HierMoE over HD-MoE, " + what, paper, t.best_us({}) / t.best_us(t.swapped_by(policy, r)),
        command);
  };
  for (const auto& [every, paper] : {std::pair(1, 1.17), {2, 1.17}, {4, 1.15}, {8, 1.13}})
    print("a swap every " + std::to_string(every) + " iterations", paper, {every});
  print("plain maximum", 1.13, {1, moecclMaxPlain});
  print("log-sum-exp", 1.16, {1, moecclMaxLogSumExp});
}

// Fig. 13 prints no numbers, so this prints times in ms, of four nodes and of one. H: without deduplication.
void print_dimensions(const Cell& c, const Routing& r, int64_t tokens, const std::string& command) {
  const Testbed t(c, r, tokens);
  for (int32_t d = 1; d <= t.depth(); ++d)
    for (const bool dedup : {false, true})
      row("Fig. 13, G=" + std::to_string(c.gpus) + ", " + (dedup ? "HD" : "H") + std::to_string(d) + "-MoE, ms", 0,
          t.us(d, dedup, {}) / 1e3, command);
}

// Prints for other routings how far the worst cell of HD-MoE is from the paper's, and the ranges of two ratios.
int search(int64_t tokens) {
  for (const double zipf : {0.0, 0.25, 0.5}) {
    for (const double share : {0.0, 0.1, 0.2, 0.3, 0.4}) {
      double worst = 0, low = INFINITY, high = 0, least = INFINITY, most = 0;
      for (const Cell& c : kCells) {
        if (c.deepseek || c.gpus < 32) continue;
        const Testbed t(c, {zipf, share, 1}, tokens);
        const double hd = t.best_us({}), ratio = hd2_us(t, c, {}) / hd, swaps = hd / t.best_us(t.swapped(false));
        worst = std::max(worst, std::fabs(t.us(1, false, {}) / hd / c.hd - 1));
        low = std::min(low, ratio), high = std::max(high, ratio);
        least = std::min(least, swaps), most = std::max(most, swaps);
      }
      std::printf(
          "zipf %.2f share %.1f: HD-MoE within %.1f %%, HD over HD2 %.2f to %.2f, HierMoE over HD %.2f to %.2f\n", zipf,
          share, 100 * worst, low, high, least, most);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Routing r;
  int64_t tokens = 1024;
  bool searches = false;
  perf::App app("HierMoE's Table IV, Fig. 11 and Fig. 13 by its own Eq. 1-6 and Fig. 9");
  app.add_option("--zipf", r.zipf, "exponent of the clusters' popularity")
      ->check(perf::within(0, 10))
      ->capture_default_str();
  app.add_option("--share", r.share, "share of a token's choices that come from its cluster")
      ->check(perf::within(0, 1))
      ->capture_default_str();
  app.add_option("--seed", r.seed, "of the routing")->check(perf::not_negative())->capture_default_str();
  app.add_option("--tokens", tokens, "of each GPU")->check(perf::positive())->capture_default_str();
  app.add_flag("--search", searches, "the nearest routing, instead of rows");
  perf::parse_or_exit(app, argc, argv);
  if (searches) return search(tokens);
  char command[200];
  std::snprintf(command, sizeof command, "build/perf/hiermoe_tables --zipf %g --share %g --seed %llu --tokens %lld",
                r.zipf, r.share, static_cast<unsigned long long>(r.seed), static_cast<long long>(tokens));
  for (const Cell& c : kCells) print_cell(c, r, tokens, command), print_swapped(c, r, tokens, command);
  print_policies(kCells[1], r, tokens, command);
  for (const Cell& c : {kCells[1], kCells[5]}) print_dimensions(c, r, tokens, command);
  return 0;
}
