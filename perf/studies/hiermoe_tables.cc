// SPDX-License-Identifier: Apache-2.0
// Computes HierMoE's Table IV and Fig. 11 and 13 in closed form: Eq. 1 to 6 with the AlltoAlls of Fig. 9, over two
// stated routings for all cells: one for the rows without swaps, and a more skewed one for the rows with swaps, as an
// even routing leaves nothing to swap. Prints one JSON line for each number. --search looks for a routing that is
// closer to the paper's.
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

// Popularity ~ 1 / place^zipf over shuffled experts. apart: the share of a token's choices that go to the quarter of
// the experts with the fewest of them so far; below 0: to the quarter of its first choice. DeepSeek-V3 takes a token's
// experts from 4 of 8 groups.
struct Routing {
  double zipf = 0, apart = 0;
  uint64_t seed = 1;
};

struct Random {
  uint64_t seed, n = 0;
  uint64_t below(uint64_t bound) { return perf::mix(seed, n++, 7) % bound; }
  double unit() { return static_cast<double>(perf::mix(seed, n++, 11) >> 11) * 0x1p-53; }
};

std::vector<int32_t> tokens_of(const Cell& c, const Routing& r, int64_t n_tokens, uint64_t draw) {
  const auto experts = static_cast<size_t>(c.experts), k = static_cast<size_t>(c.top_k);
  Random places{r.seed}, random{r.seed * 1000 + draw};
  std::vector<size_t> order(experts);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = experts; i > 1; --i) std::swap(order[i - 1], order[places.below(i)]);
  std::vector<double> sums(experts);
  for (size_t place = 0; place < experts; ++place)
    sums[order[place]] = std::pow(static_cast<double>(place + 1), -r.zipf);
  std::partial_sum(sums.begin(), sums.end(), sums.begin());
  std::vector<int32_t> topk;
  for (int64_t t = 0; t < n_tokens; ++t) {
    const size_t first = topk.size();
    size_t in_quarter[4] = {};
    size_t groups = 0;
    while (c.deepseek && std::popcount(groups) < 4) groups |= size_t{1} << random.below(8);
    bool forced = random.unit() < std::fabs(r.apart);
    while (topk.size() < first + k) {
      const auto at = std::upper_bound(sums.begin(), sums.end(), random.unit() * sums.back()) - sums.begin();
      const auto e = std::min(static_cast<size_t>(at), experts - 1);
      const size_t quarter = e * 4 / experts;
      const auto begin = topk.begin() + static_cast<ptrdiff_t>(first);
      if (c.deepseek && (groups >> (e * 8 / experts) & 1) == 0) continue;
      if (forced && !c.deepseek && topk.size() > first) {
        const size_t wanted = r.apart > 0
                                  ? static_cast<size_t>(std::min_element(in_quarter, in_quarter + 4) - in_quarter)
                                  : static_cast<size_t>(*begin) * 4 / experts;
        if (r.apart > 0 ? in_quarter[quarter] != in_quarter[wanted] : quarter != wanted) continue;
      }
      if (std::find(begin, topk.end(), static_cast<int32_t>(e)) != topk.end()) continue;
      topk.push_back(static_cast<int32_t>(e));
      ++in_quarter[quarter];
      forced = random.unit() < std::fabs(r.apart);
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
    size_t n = 0;
    perf::check(moecclSwapCountsLength(&p, &n), "moecclSwapCountsLength");
    std::vector<int32_t> counts(n);
    perf::check(moecclSwapCount(&p, later_.data(), static_cast<int64_t>(later_.size()) / cell_.top_k, counts.data(),
                                nullptr, 0),
                "moecclSwapCount");
    int32_t pair[2];
    moecclSwapAnswer_t a{};
    a.size = sizeof(a);
    perf::check(moecclSolveSwap(&p, counts.data(), pair, &a, nullptr, 0), "moecclSolveSwap");
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

 private:
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
  std::printf(",\"ours\":%.2f,\"how\":\"closed form\",\"command\":\"%s\"%s}\n", ours, command.c_str(), more.c_str());
}

// The paper prints one range for its two models.
void row_in(const std::string& item, double low, double high, double ours, const std::string& command) {
  std::printf("{\"paper\":\"HierMoE\",\"item\":\"%s\",\"paper_value\":\"%.2f to %.2f\",\"rule\":[\"in\",%.2f,%.2f]",
              item.c_str(), low, high, low, high);
  std::printf(",\"ours\":%.2f,\"how\":\"closed form\",\"command\":\"%s\"}\n", ours, command.c_str());
}

// Section V-C: HD2-MoE is the AlltoAll of Fig. 4(b), between nodes and then inside them. One node has only the latter.
double hd2_us(const Testbed& t, const Cell& c, const std::vector<int32_t>& placement) {
  return t.us(c.gpus > 8 ? 2 : 1, true, placement);
}

// By Fig. 9, HD-MoE saves at most this share of Megatron-LM's time over HD2-MoE: docs/performance-papers.md.
constexpr double kMostOverHd2 = 0.125;

void print_cell(const Cell& c, const Routing& r, int64_t tokens, const std::string& command) {
  const Testbed t(c, r, tokens);
  const double megatron = t.us(1, false, {}), hd2 = hd2_us(t, c, {}), hd = t.best_us({});
  const std::string item = c.item;
  row(item + ", HD2-MoE", c.hd2, megatron / hd2, command);
  row(item + ", HD-MoE", c.hd, megatron / hd, command);
  char bound[40] = "";
  if (c.gpus > 8) std::snprintf(bound, sizeof bound, ",\"bound\":%.2f", 1 + kMostOverHd2 * c.hd);
  row(item + ", HD-MoE over HD2-MoE", c.hd / c.hd2, hd2 / hd, command, bound);
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
  row_in(model + ", HierMoE over HD2-MoE-Smart", 1.55, 1.64, hd2_us(t, c, t.swapped(true)) / hiermoe, command);
  row_in(model + ", HierMoE over Tutel-2DH", 2.34, 3.32, t.us(2, false, {}) / hiermoe, command);
}

// Fig. 13 prints no numbers, so this prints times in ms, of four nodes and of one. H: without deduplication.
void print_dimensions(const Cell& c, const Routing& r, int64_t tokens, const std::string& command) {
  const Testbed t(c, r, tokens);
  for (int32_t d = 1; d <= t.depth(); ++d)
    for (const bool dedup : {false, true})
      row("Fig. 13, G=" + std::to_string(c.gpus) + ", " + (dedup ? "HD" : "H") + std::to_string(d) + "-MoE, ms", 0,
          t.us(d, dedup, {}) / 1e3, command);
}

// Prints how far the HD-MoE row is from the paper's, in percent of its worst cell, and the range of HD over HD2.
int search(int64_t tokens) {
  for (const double zipf : {0.0, 0.2, 0.4, 0.7}) {
    for (const double apart : {-0.2, -0.1, 0.0, 0.2}) {
      double worst = 0, low = INFINITY, high = 0;
      for (const Cell& c : kCells) {
        if (c.deepseek) continue;
        const Testbed t(c, {zipf, apart, 1}, tokens);
        const double hd = t.best_us({}), ratio = hd2_us(t, c, {}) / hd;
        worst = std::max(worst, std::fabs(t.us(1, false, {}) / hd / c.hd - 1));
        if (c.gpus == 32) low = std::min(low, ratio), high = std::max(high, ratio);
      }
      std::printf("zipf %.1f apart %4.1f: HD-MoE within %.1f %%, HD over HD2 %.2f to %.2f\n", zipf, apart, 100 * worst,
                  low, high);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  Routing r;
  double swap_zipf = 0.5;
  int64_t tokens = 1024;
  bool searches = false;
  perf::App app("HierMoE's Table IV, Fig. 11 and Fig. 13 by its own Eq. 1-6 and Fig. 9");
  app.add_option("--zipf", r.zipf, "exponent of the experts' popularity")
      ->check(perf::within(0, 10))
      ->capture_default_str();
  app.add_option("--swap-zipf", swap_zipf, "the same in the rows with swaps")
      ->check(perf::within(0, 10))
      ->capture_default_str();
  app.add_option("--apart", r.apart, "share of choices that keep a token's experts in different quarters")
      ->check(perf::within(-1, 1))
      ->capture_default_str();
  app.add_option("--seed", r.seed, "of the routing")->check(perf::not_negative())->capture_default_str();
  app.add_option("--tokens", tokens, "of each GPU")->check(perf::positive())->capture_default_str();
  app.add_flag("--search", searches, "the nearest routing, instead of rows");
  perf::parse_or_exit(app, argc, argv);
  if (searches) return search(tokens);
  char command[200];
  std::snprintf(command, sizeof command,
                "build/perf/hiermoe_tables --zipf %g --swap-zipf %g --apart %g --seed %llu --tokens %lld", r.zipf,
                swap_zipf, r.apart, static_cast<unsigned long long>(r.seed), static_cast<long long>(tokens));
  const Routing skewed{swap_zipf, r.apart, r.seed};
  for (const Cell& c : kCells) print_cell(c, r, tokens, command), print_swapped(c, skewed, tokens, command);
  for (const Cell& c : {kCells[1], kCells[5]}) print_dimensions(c, r, tokens, command);
  return 0;
}
