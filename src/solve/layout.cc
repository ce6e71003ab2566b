// SPDX-License-Identifier: Apache-2.0
#include "src/solve/layout.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/solve/arena.h"
#include "src/solve/checks.h"

namespace moeccl::solve {
namespace {

constexpr double kComputeEfficiency = 0.5, kMaxBubble = 0.3;
constexpr double kWord = 2;  // bytes of an activation, weight or gradient: fp16 or bf16

std::vector<int32_t> divisors(int32_t n) {
  std::vector<int32_t> all;
  for (int32_t d = 1; d <= n; ++d)
    if (n % d == 0) all.push_back(d);
  return all;
}

// Table 3: bytes of each parameter's weight, gradient, fp32 master weight and two moments, when the optimizer's state
// (O1), the gradients (O2) and the weights (O3) are sharded over `replicas`.
double bytes_per_parameter(int32_t zero_stage, double replicas) {
  switch (zero_stage) {
    case 1:
      return 4 + 12 / replicas;
    case 2:
      return 2 + 14 / replicas;
    case 3:
      return 16 / replicas;
    default:
      return 16;
  }
}

// Table 4, with the context's share of the sequence in s. Attention keeps 13 of the 34 bytes of a dense block (2 of
// them for the first norm), and each of the k experts keeps 21. Without sequence parallelism, tensor parallelism leaves
// 5 bytes of each undivided.
double activation_bytes(const moecclLayoutProblem_t& p, double t, double c) {
  const double b = std::max(p.micro_batch, 1), h = static_cast<double>(p.hidden), k = p.top_k;
  const double s = static_cast<double>(p.sequence) / c;
  const double bshl = b * s * h * p.n_layers;
  const double scores = 5.0 * p.n_heads * static_cast<double>(p.sequence) / (h * t);
  if (p.recompute == moecclRecomputeFull) return 2 * bshl / t;
  if (p.recompute == moecclRecomputeSelective) return bshl * (13 + 21 * k) / t;
  if (p.sequence_parallel) return bshl * ((13 + 21 * k) / t + scores);
  if (t == 1) return bshl * (13 + 21 * k + scores);  // Eq. 2
  return bshl * (5 + 5 * k + (8 + 16 * k) / t + scores);
}

// Returns the ranks that hold the same dense weights. Order: [TP, EP, CP, PP, DP], CP on EP's ranks when vertical.
double replicas_of(const moecclLayout_t& v) {
  const double c = v.context, d = v.data;
  return v.vertical ? c * d : v.expert * c * d;
}

// Returns the micro batches through each pipeline: c ranks share a sequence. Ranks beyond the batch are idle.
double micro_batches_of(const moecclLayoutProblem_t& p, const moecclLayout_t& v) {
  const double at_once = std::max(p.micro_batch, 1) * replicas_of(v) / v.context;
  return p.global_batch > 0 ? std::ceil(p.global_batch / at_once) : 1;
}

// Returns the operations of a token's forward pass: two for each parameter that it uses, and attention's scores and
// values, half of which a causal mask saves.
double token_flops(const moecclLayoutProblem_t& p) {
  const double parameters = p.dense_parameters + p.moe_parameters * p.top_k / p.n_experts;
  return 2 * parameters + 2.0 * p.n_layers * static_cast<double>(p.hidden) * static_cast<double>(p.sequence);
}

int64_t switch_ranks_of(const moecclLayout_t& v) {
  return v.vertical ? std::max(v.expert, v.context) : int64_t{1} * v.expert * v.context;
}

}  // namespace

Status check(const moecclLayoutProblem_t& p, const moecclLayout_t& v) {
  MOECCL_TRY(between("layout.tensor", v.tensor, 1, 1 << 20));
  MOECCL_TRY(between("layout.expert", v.expert, 1, 1 << 20));
  MOECCL_TRY(between("layout.context", v.context, 1, 1 << 20));
  MOECCL_TRY(between("layout.pipeline", v.pipeline, 1, 1 << 20));
  MOECCL_TRY(between("layout.data", v.data, 1, 1 << 20));
  if (v.vertical && v.context % v.expert != 0)
    return error(moecclInvalidArgument, "layout.context is {}: a vertical layout has a multiple of layout.expert, {}",
                 v.context, v.expert);
  const double ranks = static_cast<double>(switch_ranks_of(v)) * v.tensor * v.pipeline * v.data;
  if (ranks == p.n_gpus) return {};
  return error(moecclInvalidArgument,
               "layout has {:.0f} ranks (tensor * pipeline * data * {}), problem.n_gpus is {}: give degrees of so many",
               ranks, v.vertical ? "context" : "expert * context", p.n_gpus);
}

Status check(const moecclLayoutProblem_t& p) {
  MOECCL_TRY(between("problem.n_gpus", p.n_gpus, 1, 1 << 20));
  MOECCL_TRY(between("problem.gpus_per_node", p.gpus_per_node, 1, 1 << 16));
  MOECCL_TRY(between("problem.n_layers", p.n_layers, 1, 1 << 16));
  MOECCL_TRY(between("problem.n_heads", p.n_heads, 1, 1 << 16));
  MOECCL_TRY(between("problem.n_experts", p.n_experts, 1, 1 << 16));
  MOECCL_TRY(between("problem.top_k", p.top_k, 1, p.n_experts));
  MOECCL_TRY(between("problem.hidden", p.hidden, 1, int64_t{1} << 24));
  MOECCL_TRY(between("problem.sequence", p.sequence, 1, int64_t{1} << 32));
  MOECCL_TRY(above_0({{"problem.gpu_bytes", p.gpu_bytes},
                      {"problem.intra_bandwidth", p.intra_bandwidth},
                      {"problem.inter_bandwidth", p.inter_bandwidth}}));
  MOECCL_TRY(
      at_least_0({{"problem.dense_parameters", p.dense_parameters}, {"problem.moe_parameters", p.moe_parameters}}));
  MOECCL_TRY(between("problem.micro_batch", p.micro_batch, 0, 1 << 20));
  if (p.global_batch < 0)
    return error(moecclInvalidArgument, "problem.global_batch is {}: give 0 or more", p.global_batch);
  MOECCL_TRY(at_least_0({{"problem.gpu_flops", p.gpu_flops}}));
  for (const auto& [name, share] :
       {std::pair{"compute_efficiency", p.compute_efficiency}, std::pair{"max_bubble", p.max_bubble}})
    if (!(share >= 0 && share <= 1))
      return error(moecclInvalidArgument, "problem.{} is {}: give a share between 0 and 1", name, share);
  MOECCL_TRY(between("problem.switch_ranks", p.switch_ranks, 0, 1 << 20));
  MOECCL_TRY(between("problem.zero_stage", p.zero_stage, 0, 3));
  if (raw(p.recompute) < 0 || raw(p.recompute) > moecclRecomputeFull)
    return error(moecclInvalidArgument, "problem.recompute is {}: give a moecclRecompute_t", raw(p.recompute));
  if (p.recompute != moecclRecomputeNone && !p.sequence_parallel)
    return error(moecclInvalidArgument, "problem.recompute needs sequence_parallel 1: Table 4 has no other row for it");
  return {};
}

void price_layout(const moecclLayoutProblem_t& p, moecclLayout_t& v) {
  const double t = v.tensor, e = v.expert, c = v.context, pp = v.pipeline;
  const double replicas = replicas_of(v), expert_replicas = replicas / e;
  const double dense = p.dense_parameters / (pp * t), moe = p.moe_parameters / (pp * t * e);
  v.weight_bytes =
      dense * bytes_per_parameter(p.zero_stage, replicas) + moe * bytes_per_parameter(p.zero_stage, expert_replicas);
  v.activation_bytes = activation_bytes(p, t, c);

  const double b = std::max(p.micro_batch, 1), micro_batches = micro_batches_of(p, v), layers = p.n_layers / pp;
  const double block = b * static_cast<double>(p.sequence) / c * static_cast<double>(p.hidden) * kWord;
  const auto link = [&](double group) { return group <= p.gpus_per_node ? p.intra_bandwidth : p.inter_bandwidth; };
  const double passes = 1e6 * micro_batches * layers;
  // Forward and backward each gather and scatter twice in a block (attention and experts).
  v.tp_us = passes * 8 * block * (t - 1) / t / link(t);
  // Dispatch and combine, forward and backward, each follow Eq. 11: a TP rank's share between the experts' nodes
  // (MoNTA's Drop), and the AllGather of the shares inside its group.
  v.ep_us =
      passes * 4 * block * p.top_k * (e > 1 ? (e - 1) / e / t / link(t * e) + (t - 1) / t / p.intra_bandwidth : 0);
  // Keys and values pass through all context ranks, forward and twice backward (values and their gradients).
  v.cp_us = passes * 3 * 2 * block * (c - 1) / t / link(t * (v.vertical ? c : e * c));
  // The ranks of one stage are adjacent, then come the stages, then the data-parallel copies.
  const double data = v.data, stage = t * replicas / data, copy = stage * pp;
  v.pp_us = pp > 1 ? 1e6 * micro_batches * 2 * block / t / link(copy) : 0;
  const auto all_reduce = [&](double bytes, double n) {
    return 1e6 * 2 * bytes * (n - 1) / n / link(data > 1 ? copy * data : stage);
  };
  v.dp_us = all_reduce(dense * kWord, replicas) + all_reduce(moe * kWord, expert_replicas);
  v.comm_us = v.tp_us + v.ep_us + v.cp_us + v.pp_us + v.dp_us;
}

moecclLayoutCost_t step_of(const moecclLayoutProblem_t& p, const moecclLayout_t& v) {
  const double b = std::max(p.micro_batch, 1), pp = v.pipeline, micro_batches = micro_batches_of(p, v);
  moecclLayoutCost_t cost{};
  cost.micro_batches = static_cast<int32_t>(micro_batches);
  cost.bubble = (pp - 1) / (micro_batches + pp - 1);
  cost.switch_ranks = static_cast<int32_t>(switch_ranks_of(v));
  const double tokens = micro_batches * b * static_cast<double>(p.sequence) / v.context;  // of a GPU
  const double efficiency = p.compute_efficiency > 0 ? p.compute_efficiency : kComputeEfficiency;
  const double passes = p.recompute == moecclRecomputeFull ? 4 : 3;
  if (p.gpu_flops > 0)
    cost.compute_us = 1e6 * passes * tokens * token_flops(p) / (v.tensor * pp) / (p.gpu_flops * efficiency);
  cost.step_us = (cost.compute_us + v.tp_us + v.ep_us + v.cp_us) / (1 - cost.bubble) + v.pp_us + v.dp_us;
  const double sequences = p.global_batch > 0 ? p.global_batch : b * replicas_of(v) / v.context;
  if (p.gpu_flops > 0 && cost.step_us > 0)
    cost.mfu = 3 * sequences * static_cast<double>(p.sequence) * token_flops(p) /
               (1e-6 * cost.step_us * p.gpu_flops * p.n_gpus);
  return cost;
}

std::vector<moecclLayout_t> solve_layout(const moecclLayoutProblem_t& p) {
  std::vector<moecclLayout_t> found;
  for (const int32_t t : divisors(p.gpus_per_node)) {
    if (p.n_gpus % t != 0 || p.n_heads % t != 0) continue;  // tensor parallelism stays in a node and splits heads
    for (const int32_t pp : divisors(p.n_layers)) {
      if (p.n_gpus % (int64_t{t} * pp) != 0) continue;
      const int32_t rest = p.n_gpus / (t * pp);
      for (const int32_t e : divisors(p.n_experts)) {
        for (const int32_t c : divisors(rest)) {
          // Cluster expansion is horizontal while a sequence needs fewer ranks than the experts do, else vertical.
          const bool vertical = c >= e;
          if (vertical ? c % e != 0 : rest % (int64_t{e} * c) != 0) continue;
          if (p.sequence % (int64_t{t} * c) != 0) continue;
          // The two kinds of cluster expansion differ in what the network between nodes must carry.
          const int64_t joined = vertical ? c : int64_t{e} * c;
          if (p.switch_ranks > 0 && joined > p.switch_ranks && t * joined > p.gpus_per_node) continue;
          moecclLayout_t v{};
          v.tensor = t, v.expert = e, v.context = c, v.pipeline = pp, v.vertical = vertical ? 1 : 0;
          v.data = vertical ? rest / c : rest / (e * c);
          price_layout(p, v);
          if (v.weight_bytes + v.activation_bytes <= p.gpu_bytes) found.push_back(v);
        }
      }
    }
  }
  // Bubbles grow with stages and shrink with memory, so if communication is expensive, a list sorted by time alone may
  // be full of idle GPUs.
  const double most = p.max_bubble > 0 ? p.max_bubble : kMaxBubble;
  std::vector<std::pair<std::pair<bool, double>, size_t>> order;
  for (size_t i = 0; i < found.size(); ++i) {
    const moecclLayoutCost_t cost = step_of(p, found[i]);
    order.push_back({{cost.bubble > most, cost.step_us}, i});
  }
  std::sort(order.begin(), order.end());
  std::vector<moecclLayout_t> sorted;
  for (const auto& [key, i] : order) sorted.push_back(found[i]);
  return sorted;
}

}  // namespace moeccl::solve
