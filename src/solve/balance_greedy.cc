// SPDX-License-Identifier: Apache-2.0
// The method of EPLB's eplb.py, in its own float32 arithmetic and with its order among equals, so that the search
// starts where EPLB ends; and lower bounds.
#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

#include "src/solve/balance_layer.h"

namespace moeccl::solve {
namespace {

// Returns the items pack by pack: the heaviest item first, each to the lightest pack that has room.
std::vector<size_t> pack(std::span<const float> weight, size_t n_packs) {
  const size_t room = weight.size() / n_packs;
  std::vector<size_t> order(weight.size()), packed(weight.size()), used(n_packs);
  std::iota(order.begin(), order.end(), size_t{0});
  if (room == 1) return order;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weight[a] > weight[b]; });
  std::vector<float> sum(n_packs);
  for (const size_t item : order) {
    size_t lightest = n_packs;
    for (size_t p = 0; p < n_packs; ++p)
      if (used[p] < room && (lightest == n_packs || sum[p] < sum[lightest])) lightest = p;
    packed[lightest * room + used[lightest]++] = item;
    sum[lightest] += weight[item];
  }
  return packed;
}

// Gives each further replica to the item with the largest share, which makes the largest share as small as it can be.
// Calls give(item) for each, and returns the replicas of the items.
template <class T, class Give>
std::vector<size_t> count_replicas(std::span<const T> weight, size_t n_replicas, Give&& give) {
  std::vector<size_t> counts(weight.size(), 1);
  std::priority_queue<std::pair<T, std::ptrdiff_t>> largest;  // among equals the first item
  for (size_t i = 0; i < weight.size(); ++i) largest.emplace(weight[i], -static_cast<std::ptrdiff_t>(i));
  for (size_t given = weight.size(); given < n_replicas; ++given) {
    const auto i = static_cast<size_t>(-largest.top().second);
    largest.pop();
    give(i);
    ++counts[i];
    largest.emplace(weight[i] / static_cast<T>(counts[i]), -static_cast<std::ptrdiff_t>(i));
  }
  return counts;
}

double least_largest_share(Loads load, size_t n_replicas) {
  const std::vector<size_t> counts = count_replicas(load, n_replicas, [](size_t) {});
  double largest = 0;
  for (size_t i = 0; i < load.size(); ++i) largest = std::max(largest, load[i] / static_cast<double>(counts[i]));
  return largest;
}

}  // namespace

std::vector<double> group_loads(const BalanceShape& shape, Loads load) {
  std::vector<double> sums(shape.groups);
  for (size_t e = 0; e < load.size(); ++e) sums[e * shape.groups / shape.experts] += load[e];
  return sums;
}

Slots split_groups(const BalanceShape& shape, Loads load) {
  std::vector<float> weight(shape.groups);
  for (size_t e = 0; e < load.size(); ++e) weight[e * shape.groups / shape.experts] += static_cast<float>(load[e]);
  const std::vector<size_t> packed = pack(weight, shape.pools);
  return {packed.begin(), packed.end()};
}

Slots greedy_placement(const BalanceShape& shape, Loads load, const Slots& groups) {
  const size_t in_pool = shape.experts / shape.pools, group_size = shape.experts / shape.groups;
  Slots slots;
  for (size_t first = 0; first < shape.experts; first += in_pool) {
    std::vector<size_t> expert(in_pool), replica(in_pool);
    std::vector<float> weight(in_pool);
    for (size_t i = 0; i < in_pool; ++i) {
      const auto group = static_cast<size_t>(groups[(first + i) / group_size]);
      expert[i] = group * group_size + i % group_size;
      weight[i] = static_cast<float>(load[expert[i]]);
    }
    std::iota(replica.begin(), replica.end(), size_t{0});
    const std::vector<size_t> counts =
        count_replicas(std::span<const float>(weight), shape.pool_slots(), [&](size_t i) { replica.push_back(i); });
    std::vector<float> share;
    for (const size_t i : replica) share.push_back(weight[i] / static_cast<float>(counts[i]));
    for (const size_t r : pack(share, shape.pool_gpus())) slots.push_back(static_cast<int32_t>(expert[replica[r]]));
  }
  return slots;
}

double least_fullest(const BalanceShape& shape, Loads load) {
  const double even = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(shape.gpus);
  if (shape.pools == 1) return std::max(even, least_largest_share(load, shape.slots));
  // No group's experts can have more replicas than the others of their node leave. And of the i largest groups, two are
  // on one node, or each is on another; then one of them is together with a group that is not among the smallest
  // i * besides - 1.
  std::vector<double> groups = group_loads(shape, load);
  const size_t group_size = shape.experts / shape.groups, besides = shape.groups / shape.pools - 1;
  double least = even;
  for (size_t g = 0; g < shape.groups; ++g)
    least = std::max(least, least_largest_share(load.subspan(g * group_size, group_size),
                                                shape.pool_slots() - besides * group_size));
  std::sort(groups.begin(), groups.end());
  double smallest = 0;  // the sum of besides - 1 groups
  for (size_t g = 0; g + 1 < besides; ++g) smallest += groups[g];
  for (size_t i = 1; besides > 0 && i <= shape.pools; ++i) {
    const double ith = groups[shape.groups - i], other = std::min(ith, groups[i * besides - 1]);
    least = std::max(least, (ith + other + smallest) / static_cast<double>(shape.pool_gpus()));
  }
  return least;
}

}  // namespace moeccl::solve
