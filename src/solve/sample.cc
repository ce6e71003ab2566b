// SPDX-License-Identifier: Apache-2.0
#include "src/solve/sample.h"

#include <algorithm>
#include <vector>

#include "src/solve/assignment.h"
#include "src/solve/checks.h"
#include "src/solve/sample_cost.h"

namespace moeccl::solve {
namespace {

constexpr double kDefaultGain = 0.05;
constexpr int64_t kDefaultPairs = 65536;  // about a millisecond
// From NetMoE Table 2, with rows of 4 KiB.
constexpr double kBetaIntra = 4096 / 400e9 * 1e6, kBetaInter = 4096 / 100e9 * 1e6;

Status check_shape(const moecclSampleProblem_t& p) {
  MOECCL_TRY(between("problem.n_samples", p.n_samples, 0, kMostSamples));
  MOECCL_TRY(between("problem.n_experts", p.n_experts, 1, 65535));
  MOECCL_TRY(between("problem.n_devices", p.n_devices, 1, 1 << 15));
  MOECCL_TRY(between("problem.n_nodes", p.n_nodes, 1, p.n_devices));
  if (p.num_gather == nullptr && p.n_samples > 0)
    return error(moecclInvalidArgument, "problem.num_gather is NULL: give counts[n_samples][n_experts]");
  MOECCL_TRY(times({{"problem.alpha_intra_us", p.alpha_intra_us},
                    {"problem.alpha_inter_us", p.alpha_inter_us},
                    {"problem.beta_intra_us", p.beta_intra_us},
                    {"problem.beta_inter_us", p.beta_inter_us}}));
  MOECCL_TRY(gain_share(p.min_gain));
  MOECCL_TRY(indices("problem.expert_device", p.expert_device, p.n_experts, p.n_devices));
  MOECCL_TRY(indices("problem.device_node", p.device_node, p.n_devices, p.n_nodes));
  return indices("problem.current", p.current, p.n_samples, p.n_devices);
}

Status check_inner(const moecclSampleProblem_t& p) {
  MOECCL_TRY(between("problem.n_inner", p.n_inner, 0, kMaxInner));
  if (p.n_inner == 0) return {};
  for (const auto& [name, given] : {std::pair<const char*, const void*>{"inner_group", p.inner_group},
                                    {"inner_alpha_us", p.inner_alpha_us},
                                    {"inner_beta_us", p.inner_beta_us}})
    if (given == nullptr)
      return error(moecclInvalidArgument, "problem.{} is NULL: give the figures of {} inner levels", name, p.n_inner);
  const auto devices = static_cast<size_t>(p.n_devices);
  std::vector<int32_t> parent(devices);
  for (int32_t l = 0; l < p.n_inner; ++l) {
    MOECCL_TRY(times({{"problem.inner_alpha_us", p.inner_alpha_us[l]}, {"problem.inner_beta_us", p.inner_beta_us[l]}}));
    const int32_t* group = p.inner_group + static_cast<size_t>(l) * devices;
    MOECCL_TRY(indices("problem.inner_group", group, p.n_devices, p.n_devices));
    std::fill(parent.begin(), parent.end(), -1);
    for (int32_t j = 0; j < p.n_devices; ++j) {
      const int32_t above = l > 0           ? group[j - p.n_devices]
                            : p.device_node ? p.device_node[j]
                                            : even_group(j, p.n_devices, p.n_nodes);
      int32_t& known = parent[static_cast<size_t>(group[j])];
      if (known >= 0 && known != above)
        return error(moecclInvalidArgument,
                     "problem.inner_group: group {} of level {} lies in several groups of the level above", group[j],
                     l);
      known = above;
    }
  }
  return {};
}

// A sample's tokens of both operations together are a cost of the assignment, so they must be below 2^30.
Status check_counts(const moecclSampleProblem_t& p) {
  const auto experts = static_cast<size_t>(p.n_experts);
  for (int32_t i = 0; i < p.n_samples; ++i) {
    int64_t all = 0;
    for (const auto& [name, num] : {std::pair{"num_gather", p.num_gather}, std::pair{"num_scatter", p.num_scatter}}) {
      if (num == nullptr) continue;
      const int32_t* row = num + static_cast<size_t>(i) * experts;
      for (size_t e = 0; e < experts; ++e) {
        if (row[e] < 0)
          return error(moecclInvalidArgument, "problem.{}[{}][{}] is {}: counts are 0 or more", name, i, e, row[e]);
        all += row[e];
      }
      if (all > kMostCost)
        return error(moecclInvalidArgument, "problem.{}: sample {} has {} tokens, at most {} are possible", name, i,
                     all, kMostCost);
    }
  }
  return {};
}

// Everything that a solve needs, laid out at once.
struct Work {
  Work(const moecclSampleProblem_t& p, Arena& arena) : costs(p, arena) {
    const auto items = static_cast<size_t>(p.n_samples);
    const auto devices = static_cast<size_t>(p.n_devices), nodes = static_cast<size_t>(p.n_nodes);
    now = arena.take<int32_t>(items);
    best = arena.take<int32_t>(items);
    group = arena.take<int32_t>(items);
    list = arena.take<int32_t>(items);
    bin = arena.take<int32_t>(items);
    slots = arena.take<int32_t>(devices);
    local = arena.take<int32_t>(devices);
    capacity = arena.take<int32_t>(devices);
    loads = arena.take<NodeLoad>(2 * nodes);
    cost = arena.take<int32_t>(items * std::max(devices, nodes));
  }

  SampleCosts costs;
  int32_t *now, *best, *group, *list, *bin, *slots, *local, *capacity, *cost;
  NodeLoad* loads;
};

// Eq. 6 and 10: the fewest tokens between nodes. Costs are tokens, because both operations use the same channel.
void solve_nodes(const moecclSampleProblem_t& p, Work& w, Arena& arena) {
  const auto nodes = static_cast<size_t>(p.n_nodes);
  std::fill_n(w.capacity, nodes, 0);
  for (int32_t j = 0; j < p.n_devices; ++j) w.capacity[w.costs.node_of_device(j)] += w.slots[j];
  for (size_t i = 0; i < static_cast<size_t>(p.n_samples); ++i) {
    int32_t* cost = w.cost + i * nodes;
    std::fill_n(cost, nodes, 0);
    int32_t all = 0;
    for (int k = 0; k < w.costs.n_ops(); ++k) {
      const int32_t* node = w.costs.op(k).at[0] + i * nodes;
      for (size_t n = 0; n < nodes; ++n) cost[n] -= node[n], all += node[n];
    }
    for (size_t n = 0; n < nodes; ++n) cost[n] += all;
  }
  assign({w.cost, w.capacity, p.n_samples, p.n_nodes}, w.group, arena);
}

// Eq. 7 for one group of the level above, whose samples w.group identifies: the fewest tokens between its own groups of
// `level`, that is, the most tokens that stay in theirs. Writes those groups to w.best.
void solve_inside(const moecclSampleProblem_t& p, Work& w, int32_t level, int32_t parent, Arena& arena) {
  int32_t n_items = 0, n_local = 0;
  for (int32_t i = 0; i < p.n_samples; ++i)
    if (w.group[i] == parent) w.list[n_items++] = i;
  for (int32_t j = 0; j < p.n_devices; ++j) {
    if (w.costs.group(level - 1, j) != parent) continue;
    const int32_t group = w.costs.group(level, j);
    const auto at = std::find(w.local, w.local + n_local, group) - w.local;
    if (at == n_local) w.capacity[n_local] = 0, w.local[n_local++] = group;
    w.capacity[at] += w.slots[j];
  }
  const auto width = static_cast<size_t>(n_local);
  for (int32_t at = 0; at < n_items; ++at) {
    int32_t* cost = w.cost + static_cast<size_t>(at) * width;
    int32_t most = 0;
    for (size_t l = 0; l < width; ++l) {
      cost[l] = 0;
      for (int k = 0; k < w.costs.n_ops(); ++k) cost[l] += w.costs.tokens(k, level, w.list[at], w.local[l]);
      most = std::max(most, cost[l]);
    }
    for (size_t l = 0; l < width; ++l) cost[l] = most - cost[l];
  }
  assign({w.cost, w.capacity, n_items, n_local}, w.bin, arena);
  for (int32_t at = 0; at < n_items; ++at) w.best[w.list[at]] = w.local[w.bin[at]];
}

struct Volumes {
  int64_t inter = 0, intra = 0;
};
Volumes sum(const Work& w) {
  Volumes v;
  const auto nodes = static_cast<size_t>(w.costs.problem.n_nodes);
  for (size_t at = 0; at < nodes * static_cast<size_t>(w.costs.n_ops()); ++at) {
    v.inter += w.loads[at].home;
    v.intra += w.loads[at].intra;
    for (const int64_t tokens : w.loads[at].inner) v.intra += tokens;
  }
  return v;
}

// Counts everything, and measures the current placement into w.loads and `a`.
void begin(const moecclSampleProblem_t& p, Work& w, moecclSampleAnswer_t* a) {
  w.costs.count();
  std::fill_n(w.slots, p.n_devices, 0);
  for (int32_t i = 0; i < p.n_samples; ++i) ++w.slots[w.now[i] = w.costs.current(i)];
  w.costs.measure(w.now, w.loads);
  const size_t size = a->size;
  *a = {};
  a->size = size;
  a->before_us = w.costs.time_us(w.loads);
  const Volumes v = sum(w);
  a->inter_before = v.inter;
  a->intra_before = v.intra;
}
void end(Work& w, const int32_t* placement, moecclSampleAnswer_t* a) {
  w.costs.measure(placement, w.loads);
  a->after_us = w.costs.time_us(w.loads);
  const Volumes v = sum(w);
  a->inter_after = v.inter;
  a->intra_after = v.intra;
  for (int32_t i = 0; i < w.costs.problem.n_samples; ++i) {
    a->moved += placement[i] != w.now[i];
    a->moved_nodes += w.costs.node_of_device(placement[i]) != w.costs.node_of_device(w.now[i]);
  }
}

}  // namespace

Result<moecclSampleProblem_t> checked(const moecclSampleProblem_t& given) {
  moecclSampleProblem_t p = given;
  MOECCL_TRY(check_shape(p));
  MOECCL_TRY(check_inner(p));
  MOECCL_TRY(check_counts(p));
  if (p.beta_intra_us == 0 && p.beta_inter_us == 0) p.beta_intra_us = kBetaIntra, p.beta_inter_us = kBetaInter;
  if (p.min_gain == 0) p.min_gain = kDefaultGain;
  if (p.refine_pairs == 0) p.refine_pairs = kDefaultPairs;
  return p;
}

Status check_placement(const moecclSampleProblem_t& p, const int32_t* placement) {
  std::vector<int32_t> room(static_cast<size_t>(p.n_devices));
  for (int32_t i = 0; i < p.n_samples; ++i)
    ++room[static_cast<size_t>(p.current ? p.current[i] : even_group(i, p.n_samples, p.n_devices))];
  for (int32_t i = 0; i < p.n_samples; ++i) {
    const int32_t j = placement[i];
    if (j < 0 || j >= p.n_devices)
      return error(moecclInvalidArgument, "placement[{}] is {}: between 0 and {} are possible", i, j, p.n_devices - 1);
    if (--room[static_cast<size_t>(j)] < 0)
      return error(moecclInvalidArgument, "placement gives device {} more samples than it has now", j);
  }
  return {};
}

size_t sample_bytes(const moecclSampleProblem_t& p) {
  Arena measure;
  const Work laid_out(p, measure);
  return measure.used() + assignment_bytes(p.n_samples, std::max(3, p.n_nodes)) +
         assignment_bytes(p.n_samples, std::max(3, p.n_devices));
}

void solve_samples(const moecclSampleProblem_t& p, int32_t* placement, moecclSampleAnswer_t* a, Arena& arena) {
  Work w(p, arena);
  begin(p, w, a);
  solve_nodes(p, w, arena);
  for (int32_t level = 1; level < w.costs.n_levels(); ++level) {
    for (int32_t g = 0; g < w.costs.n_groups(level - 1); ++g) solve_inside(p, w, level, g, arena);
    std::copy_n(w.best, p.n_samples, w.group);
  }
  w.costs.measure(w.best, w.loads);
  a->two_stage_us = w.costs.time_us(w.loads);
  refine_samples(w.costs, w.best, w.loads, std::max<int64_t>(p.refine_pairs, 0));
  const double found = w.costs.time_us(w.loads);
  a->gain = a->before_us > 0 ? 1 - found / a->before_us : 0;
  a->keep = !(a->gain > 0) || a->gain < p.min_gain;
  std::copy_n(a->keep ? w.now : w.best, p.n_samples, placement);
  end(w, placement, a);
}

void evaluate_samples(const moecclSampleProblem_t& p, const int32_t* placement, moecclSampleAnswer_t* a, Arena& arena) {
  Work w(p, arena);
  begin(p, w, a);
  end(w, placement, a);
  a->two_stage_us = a->after_us;
  a->gain = a->before_us > 0 ? 1 - a->after_us / a->before_us : 0;
  a->keep = a->moved == 0;
}

}  // namespace moeccl::solve
