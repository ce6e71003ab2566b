// SPDX-License-Identifier: Apache-2.0
// Measures what plans of gradient collection, gradient reduction and weight placement cost, and how many bytes the last
// two send between nodes. Prints one line for each:
//   collect ranks=N nodes=M ms=T most=U  processor time of one rank's plan, make and build: median and most of nine
//   bytes ranks=N nodes=M placement=P entered=R left=L per_rank=Q
// entered: the bytes that enter nodes, relative to each expert entering each node that holds it once, without the
// shards of the node's own ranks. left: the same for gradients on their way to the owners of their shards. per_rank:
// the same quotient for a plan that sends to each rank that holds the expert.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "perf/common/fail.h"
#include "perf/common/shared_options.h"
#include "src/algo/experts/gradient_reduce.h"
#include "src/algo/replica_move.h"
#include "src/solve/replicate.h"

namespace {

using moeccl::algo::GradientReduce;
using moeccl::algo::ReplicaMove;
using moeccl::algo::ReplicaPlacement;
using moeccl::plan::LevelTree;

constexpr uint32_t kExperts = 64, kSlots = 2, kRanksOfNode = 8;
constexpr uint64_t kCount = 4 << 20;  // elements of an expert: bf16, 8 MiB
constexpr uint64_t kStaging = 16 << 20;

double cpu_ms() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

// Applies Algorithm 1 to a popularity that falls as rank^-zipf; replicas are contiguous.
ReplicaPlacement placement_of(uint32_t n_ranks, uint32_t slots, double zipf) {
  std::vector<double> popularity;
  for (uint32_t e = 0; e < kExperts; ++e) popularity.push_back(std::pow(e + 1, -zipf));
  std::vector<int32_t> counts(kExperts), slot_expert;
  moeccl::solve::replica_counts(popularity.data(), static_cast<int32_t>(kExperts),
                                static_cast<int32_t>(n_ranks * slots), counts.data());
  for (uint32_t e = 0; e < kExperts; ++e)
    slot_expert.insert(slot_expert.end(), static_cast<size_t>(counts[e]), static_cast<int32_t>(e));
  return *ReplicaPlacement::make(kExperts, std::vector<uint32_t>(n_ranks, slots), slot_expert);
}

LevelTree tree_of(uint32_t n_ranks, bool nodes) {
  if (!nodes) return LevelTree::flat(n_ranks);
  return *LevelTree::from_sizes({{"node", {}, std::vector<uint32_t>(n_ranks / kRanksOfNode, kRanksOfNode)}});
}

ReplicaMove make(const ReplicaPlacement& placement, const LevelTree& tree, moecclOp_t op, uint64_t count) {
  const bool nodes = op == moecclOpPlaceWeights && tree.depth() > 1;
  auto made = ReplicaMove::make(
      placement, tree, {op, count, 2, {}, kStaging, nodes ? ReplicaMove::Way::kNodes : ReplicaMove::Way::kDirect});
  if (!made.ok()) perf::fail(made.status().message());
  return *made;
}

GradientReduce make_sum(const ReplicaPlacement& placement, const LevelTree& tree, uint64_t count) {
  const auto way =
      GradientReduce::nodes_save_bytes(placement, tree) ? GradientReduce::Way::kNodes : GradientReduce::Way::kDirect;
  auto made = GradientReduce::make(placement, tree, {count, 2, true, {}, kStaging, way});
  if (!made.ok()) perf::fail(made.status().message());
  return std::move(*made);
}

void time_plans(uint32_t n_ranks, bool nodes) {
  const ReplicaPlacement placement = placement_of(n_ranks, kSlots, 1.0);
  const LevelTree tree = tree_of(n_ranks, nodes);
  for (const moecclOp_t op : {moecclOpCollectGradients, moecclOpReduceGradients, moecclOpPlaceWeights}) {
    std::vector<double> ms;
    for (uint32_t i = 0; i < 9; ++i) {
      const double start = cpu_ms();
      const uint32_t rank = i * n_ranks / 9;
      const auto bound = op == moecclOpReduceGradients ? make_sum(placement, tree, kCount).build(rank)
                                                       : make(placement, tree, op, kCount).build(rank);
      ms.push_back(cpu_ms() - start);
      if (bound.program.n_steps() == 0) perf::fail("an empty program");
    }
    std::nth_element(ms.begin(), ms.begin() + 4, ms.end());
    std::printf("%s ranks=%u nodes=%u ms=%.2f most=%.2f\n",
                op == moecclOpPlaceWeights      ? "place"
                : op == moecclOpReduceGradients ? "reduce"
                                                : "collect",
                n_ranks, nodes ? n_ranks / kRanksOfNode : 1, ms[4], *std::max_element(ms.begin(), ms.end()));
  }
}

// Returns the bytes that all ranks' programs put into other nodes.
template <class Rows>
uint64_t between_nodes(const Rows& move, const LevelTree& tree) {
  uint64_t elements = 0;
  const std::vector<uint32_t>& node = tree.levels[0].group_of_rank;
  for (uint32_t r = 0; r < tree.n_ranks; ++r) {
    const moeccl::algo::BoundRows bound = move.build(r);
    for (const auto& lane : bound.program.lanes)
      for (const auto& step : lane.steps)
        if (step.rows != moeccl::plan::kNoRows && node[step.dst.rank] != node[r])
          for (uint32_t c = 0; c < move.chunking().n_chunks; ++c) {
            const size_t list = size_t{step.rows} * move.chunking().n_chunks + c;
            const bool sums = step.kind == moeccl::plan::StepKind::kReduceRows;
            elements += sums ? bound.sums[list].count : bound.rows[list].count;
          }
  }
  return elements;
}

void count_bytes(uint32_t n_ranks, double zipf, const char* name) {
  constexpr uint64_t kFew = 1 << 16;
  const ReplicaPlacement placement = placement_of(n_ranks, n_ranks <= 32 ? 8 : kSlots, zipf);
  const LevelTree tree = tree_of(n_ranks, true);
  const std::vector<uint32_t>& node = tree.levels[0].group_of_rank;
  std::vector<uint64_t> outside(tree.levels[0].n_groups, kFew);
  for (uint32_t r = 0; r < n_ranks; ++r) outside[node[r]] -= moeccl::algo::shard_of(kFew, n_ranks, r).length;
  uint64_t once = 0, each = 0;
  for (const auto& hosts : placement.hosts) {
    for (size_t h = 0; h < hosts.size(); ++h) {
      each += outside[node[hosts[h].rank]];
      if (h == 0 || node[hosts[h].rank] != node[hosts[h - 1].rank]) once += outside[node[hosts[h].rank]];
    }
  }
  const uint64_t entered = between_nodes(make(placement, tree, moecclOpPlaceWeights, kFew), tree);
  const uint64_t left = between_nodes(make_sum(placement, tree, kFew), tree);
  const auto beside_once = [&](uint64_t elements) { return static_cast<double>(elements) / static_cast<double>(once); };
  std::printf("bytes ranks=%u nodes=%u placement=%s entered=%.3f left=%.3f per_rank=%.2f\n", n_ranks,
              n_ranks / kRanksOfNode, name, beside_once(entered), beside_once(left), beside_once(each));
}

}  // namespace

int main(int argc, char** argv) {
  perf::App app("What plans of gradient collection, gradient reduction and weight placement cost");
  perf::parse_or_exit(app, argc, argv);
  for (const uint32_t n : {256u, 1024u, 2048u})
    for (const bool nodes : {false, true}) time_plans(n, nodes);
  count_bytes(16, 1.2, "zipf:1.2");
  count_bytes(32, 1.2, "zipf:1.2");
  count_bytes(2048, 0, "uniform");
}
