// SPDX-License-Identifier: Apache-2.0
#include "src/select/plan_price.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "src/plan/cost.h"

namespace moeccl::comm {
namespace {

using plan::LevelTree;

// Returns how many groups of a level the largest group of the level above has.
uint32_t fan_out(const LevelTree& tree, uint32_t level) {
  if (level == 0) return tree.levels[0].n_groups;
  std::vector<uint32_t> groups(tree.levels[level - 1].n_groups, 0);
  std::vector<bool> seen(tree.levels[level].n_groups, false);
  for (uint32_t r = 0; r < tree.n_ranks; ++r) {
    const uint32_t group = tree.levels[level].group_of_rank[r];
    if (!seen[group]) ++groups[tree.levels[level - 1].group_of_rank[r]];
    seen[group] = true;
  }
  return *std::max_element(groups.begin(), groups.end());
}

// Returns the ranks in the first half of each group's groups of a level, ascending.
std::vector<uint32_t> half_of(const LevelTree& tree, uint32_t level) {
  const std::vector<uint32_t>& group_of = tree.levels[level].group_of_rank;
  std::vector<uint32_t> parent(tree.levels[level].n_groups, 0);
  if (level > 0)
    for (uint32_t r = 0; r < tree.n_ranks; ++r) parent[group_of[r]] = tree.levels[level - 1].group_of_rank[r];
  const uint32_t n_parents = level > 0 ? tree.levels[level - 1].n_groups : 1;
  const plan::Groups parts(parent, n_parents);
  std::vector<uint32_t> kept;
  for (uint32_t r = 0; r < tree.n_ranks; ++r) {
    const uint32_t group = group_of[r];
    if (parts.index_of(group) < (parts.size(parent[group]) + 1) / 2) kept.push_back(r);
  }
  return kept;
}

struct World {
  LevelTree tree;
  plan::Profile profile;
};

// Returns half of a world. Hosts that lose ranks keep the cores and the rate of memory that each remaining rank had.
World half(const World& world, uint32_t level) {
  World part{world.tree.part(half_of(world.tree, level)), world.profile};
  if (static_cast<int>(level) <= world.profile.host_level) return part;
  const double kept = static_cast<double>(part.tree.n_ranks) / world.tree.n_ranks;
  part.profile.cores = std::max(1u, static_cast<uint32_t>(world.profile.cores * kept + 0.5));
  part.profile.host_copy_bytes_per_ns *= kept;
  return part;
}

std::optional<double> price_in(const algo::Algorithm& a, plan::Shape shape, const World& world) {
  shape.n_ranks = world.tree.n_ranks;
  shape.root %= shape.n_ranks;
  shape.group_of.clear();
  if (!a.applies(shape, world.tree).ok()) return std::nullopt;
  return plan::price(algo::build_all(a, shape, world.tree), world.tree, world.profile).total_ns;
}

}  // namespace

double plan_price_ns(const algo::Algorithm& a, const plan::Shape& shape, const LevelTree& tree,
                     const plan::Profile& profile, uint32_t most_ranks) {
  constexpr uint32_t kLeastFanOut = 3, kWorlds = 3, kWholeToo = 8;
  const auto whole = [&] { return plan::price(algo::build_all(a, shape, tree), tree, profile).total_ns; };
  if (tree.n_ranks <= most_ranks) return whole();
  const auto widest = [](const LevelTree& of) {
    uint32_t level = 0;
    for (uint32_t l = 1; l < of.depth(); ++l)
      if (fan_out(of, l) > fan_out(of, level)) level = l;
    return level;
  };
  // If one level can shrink so often, the worlds differ in nothing else. If none can, all take turns: prices are worse
  // then, so a world that is not too large for its clock is priced as a whole.
  const uint32_t only = widest(tree);
  uint32_t halvings = kWorlds - 1;
  for (uint32_t n = tree.n_ranks; n > most_ranks; n = (n + 1) / 2) ++halvings;
  const bool one_level = (fan_out(tree, only) - 1) >> halvings > 0;
  if (!one_level && tree.n_ranks <= kWholeToo * most_ranks) return whole();
  uint32_t doublings = 0;
  World world{tree, profile};
  std::array<double, kWorlds> price = {};  // the smallest world first
  uint32_t priced = 0;
  while (priced < kWorlds) {
    if (world.tree.n_ranks <= most_ranks) {
      const std::optional<double> ns = price_in(a, shape, world);
      if (!ns) return whole();
      price[kWorlds - ++priced] = *ns;
    } else {
      ++doublings;
    }
    if (priced == kWorlds) break;
    // No level may vanish: that would leave a tree of another kind.
    const uint32_t level = one_level ? only : widest(world.tree);
    if (fan_out(world.tree, level) < kLeastFanOut) return whole();
    world = half(world, level);
    if (world.tree.depth() != tree.depth()) return whole();
  }
  // With each doubling, a latency that is paid once for a doubling adds the same again, bytes of each rank add twice as
  // much, and bytes of each pair of ranks that share an uplink four times as much.
  const double first = price[1] - price[0], second = price[2] - price[1];
  const double growth = first > 0 ? std::clamp(second / first, 1.0, 4.0) : 1.0;
  double ns = price[2], step = std::max(0.0, second);
  for (uint32_t i = 0; i < doublings; ++i) {
    step *= growth;
    ns += step;
  }
  return ns;
}

}  // namespace moeccl::comm
