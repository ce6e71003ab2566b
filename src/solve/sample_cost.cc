// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "src/solve/sample.h"
#include "src/solve/sample_cost.h"

namespace moeccl::solve {

SampleCosts::SampleCosts(const moecclSampleProblem_t& p, Arena& arena)
    : problem(p), n_nodes_(static_cast<size_t>(p.n_nodes)) {
  const auto items = static_cast<size_t>(p.n_samples), devices = static_cast<size_t>(p.n_devices);
  for (int32_t level = 0; level < n_levels(); ++level) {
    n_groups_[level] = level == 0 ? n_nodes_ : devices;
    group_[level] = arena.take<int32_t>(devices);
    if (level == 0 || level > p.n_inner) continue;
    const int32_t* group = p.inner_group + static_cast<size_t>(level - 1) * devices;
    n_groups_[level] = static_cast<size_t>(*std::max_element(group, group + devices)) + 1;
  }
  for (int k = 0; k < n_ops(); ++k) {
    for (int32_t level = 0; level < n_levels(); ++level)
      op_[k].at[level] = arena.take<int32_t>(items * n_groups_[level]);
    op_[k].on_node = arena.take<int64_t>(n_nodes_);
    total_[k] = arena.take<int64_t>(items);
  }
}

int32_t SampleCosts::device_of_expert(int32_t e) const {
  return problem.expert_device ? problem.expert_device[e] : even_group(e, problem.n_experts, problem.n_devices);
}
int32_t SampleCosts::current(int32_t i) const {
  return problem.current ? problem.current[i] : even_group(i, problem.n_samples, problem.n_devices);
}

void SampleCosts::count() {
  const auto items = static_cast<size_t>(problem.n_samples), experts = static_cast<size_t>(problem.n_experts);
  const size_t devices = static_cast<size_t>(problem.n_devices), last = static_cast<size_t>(problem.n_inner) + 1;
  for (int32_t j = 0; j < problem.n_devices; ++j) {
    group_[0][j] = problem.device_node ? problem.device_node[j] : even_group(j, problem.n_devices, problem.n_nodes);
    for (size_t l = 1; l < last; ++l) group_[l][j] = problem.inner_group[(l - 1) * devices + static_cast<size_t>(j)];
    group_[last][j] = j;
  }
  for (int k = 0; k < n_ops(); ++k) {
    const int32_t* num = k == 0 ? problem.num_gather : problem.num_scatter;
    SampleOp& op = op_[k];
    for (size_t l = 0; l <= last; ++l) std::fill_n(op.at[l], items * n_groups_[l], 0);
    std::fill_n(op.on_node, n_nodes_, 0);
    int32_t* device = op.at[last];
    for (size_t e = 0; e < experts; ++e) {
      // Columns are the outer loop, so that the owner is looked up once; samples are few enough for the cache.
      const auto j = static_cast<size_t>(device_of_expert(static_cast<int32_t>(e)));
      for (size_t i = 0; i < items; ++i) device[i * devices + j] += num[i * experts + e];
    }
    for (size_t i = 0; i < items; ++i) {
      int64_t all = 0;
      for (size_t j = 0; j < devices; ++j) {
        const int32_t tokens = device[i * devices + j];
        for (size_t l = 0; l < last; ++l) op.at[l][i * n_groups_[l] + static_cast<size_t>(group_[l][j])] += tokens;
        all += tokens;
      }
      total_[k][i] = all;
      for (size_t n = 0; n < n_nodes_; ++n) op.on_node[n] += op.at[0][i * n_nodes_ + n];
    }
  }
}

void SampleCosts::measure(const int32_t* placement, NodeLoad* loads) const {
  for (int k = 0; k < n_ops(); ++k) {
    NodeLoad* load = loads + static_cast<size_t>(k) * n_nodes_;
    for (size_t n = 0; n < n_nodes_; ++n) load[n] = {0, op_[k].on_node[n], 0, {}};
    for (int32_t i = 0; i < problem.n_samples; ++i)
      shift(k, i, placement[i], 1, load[static_cast<size_t>(group_[0][placement[i]])]);
  }
}

double SampleCosts::time_us(const NodeLoad* loads) const {
  double sum = 0;
  for (int k = 0; k < n_ops(); ++k) {
    double slowest = 0;
    for (size_t n = 0; n < n_nodes_; ++n)
      slowest = std::max(slowest, node_us(loads[static_cast<size_t>(k) * n_nodes_ + n]));
    sum += slowest;
  }
  return sum;
}

namespace {

// The three slowest nodes of an operation: whichever two nodes a swap touches, the slowest of the others is among them.
struct Slowest {
  double us[3] = {-1, -1, -1};
  int32_t node[3] = {-1, -1, -1};

  void add(double time, int32_t n) {
    for (int at = 0; at < 3; ++at) {
      if (time > us[at]) {
        for (int k = 2; k > at; --k) us[k] = us[k - 1], node[k] = node[k - 1];
        us[at] = time;
        node[at] = n;
        return;
      }
    }
  }
  double without(int32_t a, int32_t b) const {
    for (int k = 0; k < 3; ++k)
      if (node[k] != a && node[k] != b) return std::max(0.0, us[k]);
    return 0;
  }
};

class Refiner {
 public:
  Refiner(const SampleCosts& costs, int32_t* placement, NodeLoad* loads, int64_t pairs)
      : costs_(costs), placement_(placement), loads_(loads), pairs_(pairs) {
    n_nodes_ = static_cast<size_t>(costs.problem.n_nodes);
  }

  void run() {
    find_slowest();
    bool better = true;
    while (better && pairs_ > 0) {
      better = false;
      for (int32_t i = 0; i < costs_.problem.n_samples && pairs_ > 0; ++i) {
        if (!is_slow(costs_.node_of_device(placement_[i]))) continue;
        if (const int32_t other = best_partner(i); other >= 0) {
          swap(i, other);
          better = true;
        }
      }
    }
  }

 private:
  bool is_slow(int32_t node) const {
    for (int k = 0; k < costs_.n_ops(); ++k)
      if (slowest_[k].node[0] == node) return true;
    return false;
  }
  void find_slowest() {
    time_ = 0;
    for (int k = 0; k < costs_.n_ops(); ++k) {
      slowest_[k] = {};
      for (size_t n = 0; n < n_nodes_; ++n)
        slowest_[k].add(costs_.node_us(loads_[static_cast<size_t>(k) * n_nodes_ + n]), static_cast<int32_t>(n));
      time_ += slowest_[k].us[0];
    }
  }
  // Returns Eq. 5 after swapping samples a and b.
  double time_after(int32_t a, int32_t b) const {
    const int32_t ja = placement_[a], jb = placement_[b];
    const int32_t na = costs_.node_of_device(ja), nb = costs_.node_of_device(jb);
    double sum = 0;
    for (int k = 0; k < costs_.n_ops(); ++k) {
      const NodeLoad* load = loads_ + static_cast<size_t>(k) * n_nodes_;
      NodeLoad at_a = load[na], at_b = load[nb];
      NodeLoad& to_b = na == nb ? at_a : at_b;
      costs_.shift(k, a, ja, -1, at_a);
      costs_.shift(k, b, ja, 1, at_a);
      costs_.shift(k, b, jb, -1, to_b);
      costs_.shift(k, a, jb, 1, to_b);
      sum += std::max({costs_.node_us(at_a), na == nb ? 0.0 : costs_.node_us(at_b), slowest_[k].without(na, nb)});
    }
    return sum;
  }
  int32_t best_partner(int32_t i) {
    int32_t best = -1;
    double least = time_ * (1 - 1e-9);
    for (int32_t other = 0; other < costs_.problem.n_samples && pairs_ > 0; ++other) {
      if (placement_[other] == placement_[i]) continue;
      --pairs_;
      const double time = time_after(i, other);
      if (time < least) least = time, best = other;
    }
    return best;
  }
  void swap(int32_t a, int32_t b) {
    const int32_t ja = placement_[a], jb = placement_[b];
    for (int k = 0; k < costs_.n_ops(); ++k) {
      NodeLoad* load = loads_ + static_cast<size_t>(k) * n_nodes_;
      NodeLoad &at_a = load[costs_.node_of_device(ja)], &at_b = load[costs_.node_of_device(jb)];
      costs_.shift(k, a, ja, -1, at_a);
      costs_.shift(k, b, ja, 1, at_a);
      costs_.shift(k, b, jb, -1, at_b);
      costs_.shift(k, a, jb, 1, at_b);
    }
    std::swap(placement_[a], placement_[b]);
    find_slowest();
  }

  const SampleCosts& costs_;
  int32_t* placement_;
  NodeLoad* loads_;
  int64_t pairs_;
  size_t n_nodes_ = 0;
  Slowest slowest_[2];
  double time_ = 0;
};

}  // namespace

void refine_samples(const SampleCosts& costs, int32_t* placement, NodeLoad* loads, int64_t pairs) {
  Refiner(costs, placement, loads, pairs).run();
}

}  // namespace moeccl::solve
