// SPDX-License-Identifier: Apache-2.0
// Times the placement solvers on one core against the papers' own methods, compiled here: Kuhn-Munkres on the expanded
// matrix (NetMoE), the update for every token and expert (HierMoE), Algorithm 1's loops (adaptive replication). Prints
// one line for each:
//   name ratio=R ms=T ...     ms: median processor time of the library's solver; ratio: the time of the paper's method
//                             over it in this run, or what the line says
// Every comparison first checks that both give the same answer.
#include <moeccl/moeccl.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/routing.h"
#include "perf/common/shared_options.h"
#include "perf/solve/algorithm_1.h"
#include "perf/solve/netmoe.h"
#include "src/base/random.h"

namespace {

using moeccl::SplitMix64;
using perf::check;

// Returns the thread's processor time, on which other programs on the machine have no effect.
double ms_of(const std::function<void()>& run) {
  const auto now = [] {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
  };
  const double start = now();
  run();
  return now() - start;
}
double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// Kuhn-Munkres with potentials, O(n^3), on the n x n matrix in which every bin appears capacity times.
int64_t kuhn_munkres(const std::vector<int32_t>& cost, size_t n, size_t bins) {
  const size_t per_bin = n / bins;
  std::vector<int32_t> expanded(n * n);
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < n; ++j) expanded[i * n + j] = cost[i * bins + j / per_bin];
  std::vector<int64_t> row(n + 1), column(n + 1), least(n + 1);
  std::vector<size_t> match(n + 1), way(n + 1);
  std::vector<char> used(n + 1);
  for (size_t i = 1; i <= n; ++i) {
    match[0] = i;
    size_t at = 0;
    std::fill(least.begin(), least.end(), INT64_MAX / 4);
    std::fill(used.begin(), used.end(), char{0});
    do {
      used[at] = 1;
      const size_t r = match[at];
      const int32_t* line = &expanded[(r - 1) * n];
      int64_t delta = INT64_MAX / 4;
      size_t next = 0;
      for (size_t j = 1; j <= n; ++j) {
        if (used[j]) continue;
        const int64_t reduced = line[j - 1] - row[r] - column[j];
        if (reduced < least[j]) least[j] = reduced, way[j] = at;
        if (least[j] < delta) delta = least[j], next = j;
      }
      for (size_t j = 0; j <= n; ++j) {
        if (used[j]) {
          row[match[j]] += delta, column[j] -= delta;
        } else {
          least[j] -= delta;
        }
      }
      at = next;
    } while (match[at] != 0);
    for (; at != 0; at = way[at]) match[at] = match[way[at]];
  }
  int64_t total = 0;
  for (size_t j = 1; j <= n; ++j) total += expanded[(match[j] - 1) * n + j - 1];
  return total;
}

// Returns inter-node costs of samples whose tokens prefer a node: NetMoE's Eq. 8 with 2048 choices of a sample, both
// operations.
std::vector<int32_t> sample_costs(SplitMix64& random, size_t items, size_t bins) {
  std::vector<int32_t> cost(items * bins);
  for (size_t i = 0; i < items; ++i) {
    const size_t favourite = random.below(bins);
    for (size_t b = 0; b < bins; ++b)
      cost[i * bins + b] =
          static_cast<int32_t>(4096 - 4096 / bins - (b == favourite ? random.below(1200) : random.below(200)));
  }
  return cost;
}

void bench_assignment(int32_t items, int32_t bins, int rounds, bool compare) {
  SplitMix64 random(1);
  const auto n = static_cast<size_t>(items), m = static_cast<size_t>(bins);
  const std::vector<int32_t> capacity(m, items / bins);
  std::vector<int32_t> bin(n);
  size_t bytes = 0;
  check(moecclSolveAssignmentWorkspace(items, bins, &bytes), "moecclSolveAssignmentWorkspace");
  std::vector<char> workspace(bytes);
  std::vector<double> ours, theirs;
  for (int round = 0; round < rounds; ++round) {
    const std::vector<int32_t> cost = sample_costs(random, n, m);
    int64_t total = 0;
    ours.push_back(ms_of([&] {
      check(
          moecclSolveAssignment(cost.data(), capacity.data(), items, bins, bin.data(), &total, workspace.data(), bytes),
          "moecclSolveAssignment");
    }));
    if (!compare || round >= 3) continue;
    int64_t optimum = 0;
    theirs.push_back(ms_of([&] { optimum = kuhn_munkres(cost, n, m); }));
    if (optimum != total) perf::fail("the assignment is not the optimum of Kuhn-Munkres");
  }
  const double ms = median(ours);
  if (compare) {
    std::printf("sample_%dx%d ratio=%.0f ms=%.4f (Kuhn-Munkres %.1f ms, same optimum)\n", items, bins,
                median(theirs) / ms, ms, median(theirs));
  } else {
    std::printf("sample_%dx%d ratio=n/a ms=%.3f (Kuhn-Munkres is not run at this size)\n", items, bins, ms);
  }
}

// Times the whole solve on NetMoE's shapes.
void bench_samples(int32_t nodes, const perf::netmoe::Locality& locality) {
  perf::netmoe::Dice random(2);
  const perf::netmoe::Shape shape{nodes};
  moecclSampleProblem_t p = perf::netmoe::problem(shape);
  std::vector<double> ms;
  double before = 0, after = 0;
  int kept = 0;
  for (int round = 0; round < 20; ++round) {
    const std::vector<int32_t> num = perf::netmoe::routing(random, shape, locality);
    std::vector<int32_t> placement(static_cast<size_t>(p.n_samples));
    p.num_gather = num.data();
    moecclSampleAnswer_t a{};
    a.size = sizeof(a);
    ms.push_back(ms_of([&] { check(moecclSolveSamples(&p, placement.data(), &a, nullptr, 0), "moecclSolveSamples"); }));
    before += static_cast<double>(a.inter_before);
    after += static_cast<double>(a.inter_after);
    kept += a.keep;
  }
  std::printf(
      "traffic_%dnodes_locality%.0f ratio=%.3f ms=%.3f (ratio: inter-node tokens before/after, %.1f %% less; kept %d "
      "of 20)\n",
      nodes, 100 * (locality.device + locality.node), before / after, median(ms), 100 * (1 - after / before), kept);
}

constexpr int32_t kExperts = 256, kTopK = 8, kLevels = 4;
constexpr int32_t kGroups[kLevels] = {4, 8, 16, 32};

moecclSwapProblem_t swap_problem() {
  moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
  p.n_experts = kExperts;
  p.top_k = kTopK;
  p.n_levels = kLevels;
  p.n_groups = kGroups;
  return p;
}

// HierMoE's update, cases 1 to 4 of Fig. 8. It looks at each token, level, chosen expert a, and expert b that is not
// chosen and belongs to another group: b's group gains the token if it has none, and a's group loses it if a is alone.
// gain and lose [D][E][E].
void papers_update(const std::vector<int32_t>& topk, std::vector<int32_t>& gain, std::vector<int32_t>& lose,
                   std::vector<int32_t>& base) {
  const size_t n_tokens = topk.size() / kTopK;
  gain.assign(size_t{kLevels} * kExperts * kExperts, 0);
  lose = gain;
  base.assign(size_t{kLevels} * 32, 0);
  for (size_t d = 0; d < kLevels; ++d) {
    const size_t width = static_cast<size_t>(kExperts / kGroups[d]);
    for (size_t t = 0; t < n_tokens; ++t) {
      int32_t count[32] = {};
      bool chosen[kExperts] = {};
      for (size_t j = 0; j < kTopK; ++j) {
        const auto e = static_cast<size_t>(topk[t * kTopK + j]);
        chosen[e] = true;
        if (count[e / width]++ == 0) ++base[d * 32 + e / width];
      }
      for (size_t j = 0; j < kTopK; ++j) {
        const auto a = static_cast<size_t>(topk[t * kTopK + j]);
        const size_t at = (d * kExperts + a) * kExperts;
        const bool alone = count[a / width] == 1;
        for (size_t b = 0; b < kExperts; ++b) {
          if (chosen[b] || b / width == a / width) continue;
          if (count[b / width] == 0) ++gain[at + b];
          if (alone) ++lose[at + b];
        }
      }
    }
  }
}

void compare_tables(const moecclSwapProblem_t& p, const std::vector<int32_t>& counts, const std::vector<int32_t>& gain,
                    const std::vector<int32_t>& lose, const std::vector<int32_t>& base) {
  for (size_t d = 0; d < kLevels; ++d) {
    const auto groups = static_cast<size_t>(kGroups[d]);
    const size_t width = kExperts / groups;
    std::vector<int32_t> z(size_t{kExperts} * kExperts * groups);
    check(moecclSwapTable(&p, counts.data(), static_cast<int32_t>(d), z.data()), "moecclSwapTable");
    for (size_t a = 0; a < kExperts; ++a)
      for (size_t b = 0; b < kExperts; ++b)
        for (size_t g = 0; g < groups; ++g) {
          const size_t ab = (d * kExperts + a) * kExperts + b, ba = (d * kExperts + b) * kExperts + a;
          int32_t want = base[d * 32 + g];
          if (a / width != b / width && g == a / width) want += gain[ba] - lose[ab];
          if (a / width != b / width && g == b / width) want += gain[ab] - lose[ba];
          if (z[(a * kExperts + b) * groups + g] != want)
            perf::fail("the tables of swaps differ from the paper's update");
        }
  }
}

void bench_swap_count() {
  const moecclSwapProblem_t p = swap_problem();
  const std::vector<int32_t> topk = perf::uniform_topk({32768, kTopK, kExperts}, 1);
  size_t length = 0, bytes = 0;
  check(moecclSwapCountsLength(&p, &length), "moecclSwapCountsLength");
  check(moecclSwapCountWorkspace(&p, &bytes), "moecclSwapCountWorkspace");
  std::vector<int32_t> counts(length), gain, lose, base;
  std::vector<char> workspace(bytes);
  const auto count = [&](int64_t tokens) {
    return ms_of([&] {
      check(moecclSwapCount(&p, topk.data(), tokens, counts.data(), workspace.data(), bytes), "moecclSwapCount");
    });
  };
  std::vector<double> rank, ours, theirs;
  for (int round = 0; round < 7; ++round) rank.push_back(count(1024));
  for (int round = 0; round < 7; ++round) ours.push_back(count(32768));
  for (int round = 0; round < 3; ++round) theirs.push_back(ms_of([&] { papers_update(topk, gain, lose, base); }));
  compare_tables(p, counts, gain, lose, base);
  std::printf("swap_count_32768 ratio=%.1f ms=%.2f (the paper's update %.0f ms, tables equal)\n",
              median(theirs) / median(ours), median(ours), median(theirs));
  std::printf("swap_count_1024_of_32_ranks ratio=%.1f ms=%.2f (ratio: all tokens on one rank / one rank's share)\n",
              median(ours) / median(rank), median(rank));
  std::vector<double> best;
  int32_t pair[2];
  for (int round = 0; round < 5; ++round)
    best.push_back(
        ms_of([&] { check(moecclSolveSwap(&p, counts.data(), pair, nullptr, nullptr, 0), "moecclSolveSwap"); }));
  std::printf("swap_best_pair ratio=n/a ms=%.2f (E=256, all %d pairs, smooth-max)\n", median(best),
              kExperts * (kExperts - 1) / 2);
}

// Tokens choose within one of 32 clusters of 16 experts, which are scattered over the GPUs. Clusters are zipf-popular.
std::vector<int32_t> clustered_topk(size_t n_tokens) {
  SplitMix64 random(4);
  std::vector<int32_t> topk;
  for (size_t t = 0; t < n_tokens; ++t) {
    const auto cluster = static_cast<int32_t>(32 * std::pow(random.unit(), 2));
    const auto start = static_cast<int32_t>(random.below(8));
    for (int32_t j = 0; j < kTopK; ++j) topk.push_back((cluster * 5 + (start + j) % 16 * 17) % kExperts);
  }
  return topk;
}

double judged_us(moecclSwapProblem_t p, const std::vector<int32_t>& topk, const std::vector<int32_t>& placement,
                 int32_t dimension) {
  p.placement = placement.data();
  p.dimension = dimension;
  size_t length = 0;
  check(moecclSwapCountsLength(&p, &length), "moecclSwapCountsLength");
  std::vector<int32_t> counts(length);
  check(moecclSwapCount(&p, topk.data(), static_cast<int64_t>(topk.size() / kTopK), counts.data(), nullptr, 0),
        "moecclSwapCount");
  int32_t pair[2];
  moecclSwapAnswer_t a{};
  a.size = sizeof(a);
  check(moecclSolveSwap(&p, counts.data(), pair, &a, nullptr, 0), "moecclSolveSwap");
  return a.before_us;
}

void bench_swap_sequence(const char* name, const std::vector<int32_t>& topk) {
  moecclSwapProblem_t p = swap_problem();
  const auto n_tokens = static_cast<int64_t>(topk.size() / kTopK);
  std::vector<int32_t> pairs(128), placement(kExperts);
  moecclSwapAnswer_t a{};
  a.size = sizeof(a);
  for (const int32_t swaps : {1, 8, 64}) {
    const double ms = ms_of([&] {
      check(moecclSolveSwapSequence(&p, topk.data(), n_tokens, swaps, pairs.data(), placement.data(), &a),
            "moecclSolveSwapSequence");
    });
    std::printf(
        "swapseq_%s_%d ratio=%.3f ms=%.1f (ratio: predicted time %.0f -> %.0f us; max load %ld -> %ld; %d swaps)\n",
        name, swaps, a.before_us / a.after_us, ms, a.before_us, a.after_us, static_cast<long>(a.max_load_before),
        static_cast<long>(a.max_load_after), a.n_swaps);
  }
  std::vector<int32_t> smart(kExperts);
  moecclSwapProblem_t counting = p;
  counting.count_duplicates = 1;
  counting.dimension = a.dimension;
  check(moecclSolveSwapSequence(&counting, topk.data(), n_tokens, 64, pairs.data(), smart.data(), nullptr),
        "moecclSolveSwapSequence");
  const double with = judged_us(p, topk, placement, a.dimension), without = judged_us(p, topk, smart, a.dimension);
  std::printf(
      "nodedup_%s_64 ratio=%.3f ms=0 (ratio: predicted time when duplicates are counted, %.0f us, over ours, %.0f us; "
      "none: %.0f)\n",
      name, without / with, without, with, a.before_us);
}

void bench_replicas() {
  SplitMix64 random(5);
  std::vector<double> ours, theirs;
  for (int round = 0; round < 20; ++round) {
    std::vector<double> popularity(kExperts);
    for (size_t e = 0; e < kExperts; ++e)
      popularity[e] = std::floor(1e6 * random.unit() / std::pow(static_cast<double>(e + 1), 1.2)) + 1;
    std::vector<int32_t> counts(kExperts), want;
    ours.push_back(ms_of(
        [&] { check(moecclReplicaCounts(popularity.data(), kExperts, 4096, counts.data()), "moecclReplicaCounts"); }));
    theirs.push_back(ms_of([&] { want = perf::algorithm_1(popularity, 4096); }));
    if (want != counts) perf::fail("replica counts differ from Algorithm 1");
  }
  std::printf("replicas_256x4096 ratio=%.1f ms=%.4f (Algorithm 1's loops %.3f ms, counts equal)\n",
              median(theirs) / median(ours), median(ours), median(theirs));

  moecclReplicaProblem_t p = MOECCL_REPLICA_PROBLEM_INIT;
  p.n_experts = kExperts;
  p.n_ranks = 64;
  p.slots_per_rank = 8;
  p.n_nodes = 8;
  std::vector<int32_t> demand(size_t{64} * kExperts), slots(512);
  for (size_t i = 0; i < demand.size(); ++i)
    demand[i] = static_cast<int32_t>(4000 * random.unit() / std::pow(static_cast<double>(i % kExperts + 1), 0.8)) *
                (i / kExperts / 8 == i % 8 ? 6 : 1);  // each node prefers some experts
  p.demand = demand.data();
  moecclReplicaAnswer_t a{};
  a.size = sizeof(a);
  const double ms = ms_of([&] { check(moecclSolveReplicas(&p, slots.data(), &a), "moecclSolveReplicas"); });
  std::printf(
      "replica_place_256x512 ratio=%.3f ms=%.1f (ratio: predicted time contiguous/ours; inter-node tokens %ld -> %ld, "
      "max load %ld -> %ld)\n",
      a.before_us / a.after_us, ms, static_cast<long>(a.inter_before), static_cast<long>(a.inter_after),
      static_cast<long>(a.max_load_before), static_cast<long>(a.max_load_after));
}

}  // namespace

int main(int argc, char** argv) {
  perf::App app("Times the placement solvers on one core against the papers' own methods");
  perf::parse_or_exit(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  bench_assignment(384, 2, 21, true);
  bench_assignment(1024, 8, 11, true);
  bench_assignment(4096, 32, 5, false);
  bench_assignment(16384, 128, 3, false);
  for (const int32_t nodes : {2, 4}) {
    bench_samples(nodes, {});
    bench_samples(nodes, {0, 0});
  }
  bench_swap_count();
  bench_swap_sequence("zipf", perf::zipf_topk({8192, kTopK, kExperts}, {0.8, 3}, 7));
  bench_swap_sequence("clustered", clustered_topk(8192));
  bench_replicas();
  return 0;
}
