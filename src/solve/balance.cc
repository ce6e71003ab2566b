// SPDX-License-Identifier: Apache-2.0
#include "src/solve/balance.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "src/solve/balance_layer.h"
#include "src/solve/checks.h"
#include "src/solve/replicate.h"

namespace moeccl::solve {
namespace {

constexpr double kTolerance = 0.001;
constexpr int64_t kWorkOfSlot = 4096;       // 4 ms for a layer of 288 slots
constexpr int64_t kWorkOfGroups = 1 << 14;  // there are few groups
constexpr int32_t kMostSlots = 1 << 16, kMostOfGpu = 1024;

// Whether each slot has an expert and each expert a slot.
bool whole(const BalanceShape& shape, const Slots& slots) {
  return slots.size() == shape.slots &&
         check_slots(slots.data(), static_cast<int32_t>(shape.slots), static_cast<int32_t>(shape.experts)).ok();
}

bool by_node(const moecclBalanceProblem_t& p) { return p.n_groups % p.n_nodes == 0; }

Status check_shape(const moecclBalanceProblem_t& p) {
  MOECCL_TRY(between("problem.n_layers", p.n_layers, 1, 65535));
  MOECCL_TRY(between("problem.n_experts", p.n_experts, 1, 65535));
  MOECCL_TRY(between("problem.n_gpus", p.n_gpus, 1, 1024));
  if (p.n_slots < p.n_experts || p.n_slots > kMostSlots || p.n_slots % p.n_gpus != 0)
    return error(moecclInvalidArgument,
                 "problem.n_slots is {}: give a multiple of n_gpus ({}) from n_experts ({}) to {}", p.n_slots, p.n_gpus,
                 p.n_experts, kMostSlots);
  if (p.n_slots / p.n_gpus > kMostOfGpu)
    return error(moecclInvalidArgument, "problem.n_gpus is {}: n_slots ({}) give a GPU more than {} experts", p.n_gpus,
                 p.n_slots, kMostOfGpu);
  constexpr int32_t kAny = std::numeric_limits<int32_t>::max();
  MOECCL_TRY(between("problem.n_groups", p.n_groups, 1, kAny));
  MOECCL_TRY(between("problem.n_nodes", p.n_nodes, 1, kAny));
  if (!by_node(p)) return {};  // EPLB's global policy, in which groups and nodes mean nothing
  MOECCL_TRY(between("problem.n_groups", p.n_groups, 1, p.n_experts));
  MOECCL_TRY(between("problem.n_nodes", p.n_nodes, 1, p.n_gpus));
  if (p.n_experts % p.n_groups != 0)
    return error(moecclInvalidArgument, "problem.n_groups is {}: give a divisor of n_experts ({})", p.n_groups,
                 p.n_experts);
  if (p.n_gpus % p.n_nodes != 0)
    return error(moecclInvalidArgument, "problem.n_nodes is {}: give a divisor of n_gpus ({})", p.n_nodes, p.n_gpus);
  return {};
}

Status check_figures(const moecclBalanceProblem_t& p) {
  if (p.load == nullptr) return error(moecclInvalidArgument, "problem.load is NULL: give loads[n_layers][n_experts]");
  const auto layers = static_cast<size_t>(p.n_layers), experts = static_cast<size_t>(p.n_experts);
  for (size_t i = 0; i < layers * experts; ++i)
    if (!(p.load[i] >= 0) || p.load[i] > 1e30)
      return error(moecclInvalidArgument, "problem.load[{}][{}] is {}: give a number from 0 to 1e30", i / experts,
                   i % experts, p.load[i]);
  const auto slots = static_cast<size_t>(p.n_slots);
  for (size_t i = 0; p.current != nullptr && i < layers * slots; ++i)
    if (p.current[i] < -1 || p.current[i] >= p.n_experts)
      return error(moecclInvalidArgument, "problem.current[{}][{}] is {}: give an expert from 0 to {}, or -1 for none",
                   i / slots, i % slots, p.current[i], p.n_experts - 1);
  MOECCL_TRY(at_least_0({{"problem.move_cost", p.move_cost}}));
  return at_least_0({{"problem.tolerance", p.tolerance}}, 1, "a share from ");
}

// Whether a search may begin here: each slot has an expert, each expert a slot, and each pool as many groups as it
// should have, of which none can then be on two pools.
bool usable(const BalanceShape& shape, const Slots& slots) {
  if (!whole(shape, slots)) return false;
  for (size_t p = 0; p < shape.pools; ++p) {
    std::vector<bool> here(shape.groups);
    for (size_t s = p * shape.pool_slots(); s < (p + 1) * shape.pool_slots(); ++s)
      here[static_cast<size_t>(slots[s]) * shape.groups / shape.experts] = true;
    if (std::count(here.begin(), here.end(), true) != static_cast<std::ptrdiff_t>(shape.groups / shape.pools))
      return false;
  }
  return true;
}

struct Layer {
  Slots slots;
  Judged judged;
  double greedy = 0, bound = 0;  // loads of the fullest GPU
};

Layer solve_layer(const BalanceShape& shape, Loads load, const moecclBalanceProblem_t& p, const Slots& current) {
  Layer best;
  const Slots groups = split_groups(shape, load), greedy = greedy_placement(shape, load, groups);
  best.greedy = fullest_gpu(shape, load, greedy);
  best.bound = least_fullest(shape, load);
  const double enough = std::min(best.greedy, best.bound * (1 + p.tolerance));
  const BalanceTerms anew{nullptr, 0, enough}, from{current.empty() ? nullptr : current.data(), p.move_cost, enough};
  const auto consider = [&](const Slots& found) {
    for (const bool exchange_pools : {true, false}) {
      const Slots slots = stay_near(shape, found, from.current, exchange_pools);
      const Judged judged = judge(shape, load, from, slots);
      if (best.slots.empty() || judged.better_than(best.judged)) best.slots = slots, best.judged = judged;
      if (from.current == nullptr || shape.pools == 1) return;
    }
  };
  consider(greedy);
  if (p.max_work < 0) return best;
  if (usable(shape, current)) consider(search_placement(shape, load, from, current, p.max_work));
  const auto search = [&](const Slots& start) {
    if (best.judged.cost > enough) consider(search_placement(shape, load, anew, start, p.max_work));
  };
  // The best split of the groups comes first: of two placements within the tolerance, it has the emptier nodes.
  const BalanceShape nodes{shape.groups, shape.groups, 1, shape.pools, 1};
  const std::vector<double> sums = group_loads(shape, load);
  const Slots split = search_placement(nodes, sums, {}, groups, shape.pools > 1 ? kWorkOfGroups : 0);
  if (split != groups) search(greedy_placement(shape, load, split));
  search(greedy);
  return best;
}

}  // namespace

Result<moecclBalanceProblem_t> checked(const moecclBalanceProblem_t& given) {
  moecclBalanceProblem_t p = given;
  if (p.n_groups == 0) p.n_groups = 1;
  if (p.n_nodes == 0) p.n_nodes = 1;
  if (p.tolerance == 0) p.tolerance = kTolerance;
  if (p.max_work == 0) p.max_work = kWorkOfSlot * p.n_slots;
  MOECCL_TRY(check_shape(p));
  MOECCL_TRY(check_figures(p));
  return p;
}

void solve_balance(const moecclBalanceProblem_t& p, int32_t* slot_expert, moecclBalanceAnswer_t* answer) {
  BalanceShape shape;
  shape.experts = static_cast<size_t>(p.n_experts), shape.slots = static_cast<size_t>(p.n_slots);
  shape.gpus = static_cast<size_t>(p.n_gpus);
  if (by_node(p)) shape.groups = static_cast<size_t>(p.n_groups), shape.pools = static_cast<size_t>(p.n_nodes);
  double mean = 0, before = 0, after = 0, greedy = 0, bound = 0;
  bool known = true;
  *answer = {};
  for (size_t l = 0; l < static_cast<size_t>(p.n_layers); ++l) {
    Loads load(p.load + l * shape.experts, shape.experts);
    const double sum = std::accumulate(load.begin(), load.end(), 0.0);
    const std::vector<double> alike(shape.experts, 1);
    Slots current;
    if (p.current != nullptr) current.assign(p.current + l * shape.slots, p.current + (l + 1) * shape.slots);
    // Without any load nothing is worth a move, and where nothing is placed yet, experts get replicas alike.
    const Layer layer = solve_layer(shape, sum > 0 || usable(shape, current) ? load : Loads(alike), p, current);
    std::copy(layer.slots.begin(), layer.slots.end(), slot_expert + l * shape.slots);
    answer->moved += layer.judged.moved;
    answer->kept_layers += layer.slots == current;
    if (!(sum > 0)) continue;
    mean += sum / static_cast<double>(shape.gpus);
    after += layer.judged.fullest;
    greedy += layer.greedy;
    bound += layer.bound;
    known = known && whole(shape, current);
    if (known) before += fullest_gpu(shape, load, current);
  }
  const auto balance = [&](double fullest) { return fullest > 0 ? mean / fullest : 1; };
  answer->balance = balance(after);
  answer->balance_greedy = balance(greedy);
  answer->balance_bound = balance(bound);
  answer->balance_before = known && p.current != nullptr ? balance(before) : 0;
}

}  // namespace moeccl::solve
