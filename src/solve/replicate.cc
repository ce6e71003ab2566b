// SPDX-License-Identifier: Apache-2.0
#include "src/solve/replicate.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>
#include <vector>

#include "src/solve/checks.h"

namespace moeccl::solve {
namespace {

// numpy's argmax and argmin return the first of equal values, so the heap orders by (value, lower index first).
struct Entry {
  double value;
  int32_t expert;
};
struct LargestFirst {
  bool operator()(const Entry& a, const Entry& b) const {
    return a.value != b.value ? a.value < b.value : a.expert > b.expert;
  }
};
struct SmallestFirst {
  bool operator()(const Entry& a, const Entry& b) const {
    return a.value != b.value ? a.value > b.value : a.expert > b.expert;
  }
};

double total_of(const double* popularity, int32_t n) {
  double sum = 0;
  for (int32_t e = 0; e < n; ++e) sum += popularity[e];
  return sum;
}

}  // namespace

Status check_popularity(const double* popularity, int32_t n_experts, int32_t n_slots) {
  MOECCL_TRY(between("n_experts", n_experts, 1, 65535));
  if (n_slots < n_experts || n_slots > 1 << 26)
    return error(moecclInvalidArgument, "n_slots is {}: each of the {} experts needs one, and at most {} are possible",
                 n_slots, n_experts, 1 << 26);
  if (popularity == nullptr) return error(moecclInvalidArgument, "popularity is NULL: give one number for each expert");
  for (int32_t e = 0; e < n_experts; ++e)
    if (!(popularity[e] >= 0) || popularity[e] > 1e300)
      return error(moecclInvalidArgument, "popularity[{}] is {}: give 0 to 1e+300", e, popularity[e]);
  if (!std::isfinite(total_of(popularity, n_experts)))
    return error(moecclInvalidArgument, "popularity sums to more than a double holds: scale it down");
  return {};
}

void replica_counts(const double* popularity, int32_t n_experts, int32_t n_slots, int32_t* counts) {
  const double sum = total_of(popularity, n_experts);
  std::vector<double> diff(static_cast<size_t>(n_experts));
  int64_t given = 0;
  for (int32_t e = 0; e < n_experts; ++e) {
    const double goal = sum > 0 ? popularity[e] / sum * n_slots : static_cast<double>(n_slots) / n_experts;
    counts[e] = static_cast<int32_t>(std::floor(std::max(goal, 1.0)));
    diff[static_cast<size_t>(e)] = counts[e] - goal;
    given += counts[e];
  }
  if (given > n_slots) {
    // An expert with one replica never loses it: the paper's loop skips it, so it needs no place in the heap.
    std::priority_queue<Entry, std::vector<Entry>, LargestFirst> heap;
    for (int32_t e = 0; e < n_experts; ++e)
      if (counts[e] > 1) heap.push({diff[static_cast<size_t>(e)], e});
    for (; given > n_slots; --given) {
      const Entry top = heap.top();
      heap.pop();
      if (--counts[top.expert] > 1) heap.push({top.value - 1, top.expert});
    }
  } else if (given < n_slots) {
    std::priority_queue<Entry, std::vector<Entry>, SmallestFirst> heap;
    for (int32_t e = 0; e < n_experts; ++e) heap.push({diff[static_cast<size_t>(e)], e});
    for (; given < n_slots; ++given) {
      const Entry top = heap.top();
      heap.pop();
      ++counts[top.expert];
      heap.push({top.value + 1, top.expert});
    }
  }
}

void fewest_drops(const double* popularity, int32_t n_experts, int32_t n_slots, double capacity_factor,
                  int32_t* counts) {
  const double capacity = capacity_factor * total_of(popularity, n_experts) / n_slots;
  struct Want {
    double saved, load;  // tokens that one more replica saves; tokens of each replica now
    int32_t expert;
  };
  const auto less = [](const Want& a, const Want& b) {
    if (a.saved != b.saved) return a.saved < b.saved;
    return a.load != b.load ? a.load < b.load : a.expert > b.expert;
  };
  const auto want = [&](int32_t e) {
    const double left = popularity[e] - capacity * counts[e];
    return Want{std::clamp(left, 0.0, capacity), popularity[e] / counts[e], e};
  };
  std::priority_queue<Want, std::vector<Want>, decltype(less)> heap(less);
  for (int32_t e = 0; e < n_experts; ++e) {
    counts[e] = 1;
    heap.push(want(e));
  }
  for (int32_t given = n_experts; given < n_slots; ++given) {
    const int32_t e = heap.top().expert;
    heap.pop();
    ++counts[e];
    heap.push(want(e));
  }
}

double dropped(const double* popularity, const int32_t* counts, int32_t n_experts, int32_t n_slots,
               double capacity_factor) {
  const double capacity = capacity_factor * total_of(popularity, n_experts) / n_slots;
  double sum = 0;
  for (int32_t e = 0; e < n_experts; ++e) sum += std::max(0.0, popularity[e] - capacity * counts[e]);
  return sum;
}

Status check_counts(const int32_t* counts, int32_t n_experts, int32_t n_slots) {
  int64_t sum = 0;
  for (int32_t e = 0; e < n_experts; ++e) {
    if (counts[e] < 1)
      return error(moecclInvalidArgument, "counts[{}] is {}: each expert has at least one replica", e, counts[e]);
    sum += counts[e];
  }
  if (sum == n_slots) return {};
  return error(moecclInvalidArgument, "counts sum to {}: give replicas for all {} slots", sum, n_slots);
}

Status check_slots(const int32_t* slot_expert, int32_t n_slots, int32_t n_experts) {
  std::vector<bool> present(static_cast<size_t>(n_experts));
  for (int32_t s = 0; s < n_slots; ++s) {
    if (slot_expert[s] < 0 || slot_expert[s] >= n_experts)
      return error(moecclInvalidArgument, "slot_expert[{}] is {}: between 0 and {} are possible", s, slot_expert[s],
                   n_experts - 1);
    present[static_cast<size_t>(slot_expert[s])] = true;
  }
  const auto missing = std::find(present.begin(), present.end(), false);
  if (missing == present.end()) return {};
  return error(moecclInvalidArgument, "slot_expert has no slot for expert {}: each needs one",
               missing - present.begin());
}

void grad_sources(const int32_t* slot_expert, int32_t n_experts, int32_t n_ranks, int32_t slots_per_rank,
                  int32_t* source, int64_t* sends) {
  if (sends != nullptr) std::fill_n(sends, n_ranks, 0);
  std::vector<std::vector<int32_t>> ranks(static_cast<size_t>(n_experts));  // ascending, each rank once
  for (int32_t s = 0; s < n_ranks * slots_per_rank; ++s) {
    auto& of = ranks[static_cast<size_t>(slot_expert[s])];
    if (of.empty() || of.back() != s / slots_per_rank) of.push_back(s / slots_per_rank);
  }
  for (size_t e = 0; e < ranks.size(); ++e) {
    for (int32_t r = 0; r < n_ranks; ++r) {
      const bool here = std::binary_search(ranks[e].begin(), ranks[e].end(), r);
      const int32_t from = here ? r : ranks[e][static_cast<size_t>(r) % ranks[e].size()];
      source[e * static_cast<size_t>(n_ranks) + static_cast<size_t>(r)] = from;
      if (sends != nullptr && !here) ++sends[from];
    }
  }
}

Status replica_comm_time(const moecclReplicaCost_t& c, double* static_s, double* adaptive_s) {
  if (c.n_ranks < 1) return error(moecclInvalidArgument, "cost.n_ranks is {}: give 1 or more", c.n_ranks);
  if (c.slots_per_rank < 1)
    return error(moecclInvalidArgument, "cost.slots_per_rank is {}: give 1 or more", c.slots_per_rank);
  if (c.n_experts < 1 || c.n_experts > int64_t{c.n_ranks} * c.slots_per_rank)
    return error(moecclInvalidArgument, "cost.n_experts is {}: between 1 and the {} slots are possible", c.n_experts,
                 int64_t{c.n_ranks} * c.slots_per_rank);
  MOECCL_TRY(at_least_0({{"cost.grad_bytes", c.grad_bytes}, {"cost.weight_bytes", c.weight_bytes}}));
  for (const auto& [name, value] :
       {std::pair{"pci_bandwidth", c.pci_bandwidth}, std::pair{"net_bandwidth", c.net_bandwidth}})
    if (!(value > 0) || value > 1e30)
      return error(moecclInvalidArgument, "cost.{} is {}: give bytes a second", name, value);
  const double n = c.n_ranks, e = c.n_experts, s = c.slots_per_rank, bytes = c.grad_bytes + c.weight_bytes;
  *static_s = e / n * bytes / c.pci_bandwidth + (s * n - e) / n * bytes / c.net_bandwidth;
  *adaptive_s = e / n * bytes / c.pci_bandwidth + (s * n - s) / n * bytes / c.net_bandwidth;
  return {};
}

}  // namespace moeccl::solve
