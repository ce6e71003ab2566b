// SPDX-License-Identifier: Apache-2.0
// The cost of placements of samples: NetMoE Eq. 1 to 5, with the maximum over nodes as well as over channels.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "moeccl/solve.h"
#include "src/solve/arena.h"

namespace moeccl::solve {

constexpr int32_t kMaxInner = 6;

// One of the two operations that a placement affects: the gather of this layer or the scatter of the next.
struct SampleOp {
  // Level 0 is nodes, then come the inner levels, and devices are last.
  int32_t* at[kMaxInner + 2] = {};  // [level] -> [I][its groups]: tokens of a sample for experts of a group
  int64_t* on_node = nullptr;       // [N] summed over all samples
};

// Tokens that pass through each node's channels.
struct NodeLoad {
  int64_t home = 0;   // of samples on this node, for experts elsewhere
  int64_t away = 0;   // of samples elsewhere, for experts on this node
  int64_t intra = 0;  // of samples on this node, for experts of another device of the same innermost group
  std::array<int64_t, kMaxInner> inner{};  // for experts of another group of an inner level on this node
};

class SampleCosts {
 public:
  SampleCosts(const moecclSampleProblem_t& problem, Arena& arena);  // lays out its memory
  void count();                                                     // Eq. 2 and 8 for all samples, devices and nodes

  int32_t device_of_expert(int32_t e) const;
  int32_t n_levels() const { return problem.n_inner + 2; }
  int32_t group(int32_t level, int32_t device) const { return group_[level][device]; }
  int32_t n_groups(int32_t level) const { return static_cast<int32_t>(n_groups_[level]); }
  int32_t node_of_device(int32_t j) const { return group_[0][j]; }
  int32_t current(int32_t i) const;
  const SampleOp& op(int k) const { return op_[k]; }
  int n_ops() const { return problem.num_scatter != nullptr ? 2 : 1; }
  // Returns a sample's tokens for the experts of a group.
  int32_t tokens(int k, int32_t level, int32_t i, int32_t group) const {
    return op_[k].at[level][static_cast<size_t>(i) * n_groups_[level] + static_cast<size_t>(group)];
  }

  // Fills loads[n_ops][N].
  void measure(const int32_t* placement, NodeLoad* loads) const;
  // Applies the move of sample i away from (sign -1) or to (sign 1) device j, as in a swap, to its node's load.
  void shift(int k, int32_t i, int32_t j, int sign, NodeLoad& load) const {
    int64_t here = tokens(k, 0, i, group_[0][j]);
    load.home += sign * (total_[k][static_cast<size_t>(i)] - here);
    load.away -= sign * here;
    for (int32_t l = 0; l < problem.n_inner; ++l) {
      const int64_t inside = tokens(k, l + 1, i, group_[l + 1][j]);
      load.inner[static_cast<size_t>(l)] += sign * (here - inside);
      here = inside;
    }
    load.intra += sign * (here - tokens(k, problem.n_inner + 1, i, j));
  }
  double node_us(const NodeLoad& load) const {
    const double inter =
        problem.alpha_inter_us + problem.beta_inter_us * static_cast<double>(std::max(load.home, load.away));
    double slowest = std::max(inter, problem.alpha_intra_us + problem.beta_intra_us * static_cast<double>(load.intra));
    for (int32_t l = 0; l < problem.n_inner; ++l)
      slowest =
          std::max(slowest, problem.inner_alpha_us[l] +
                                problem.inner_beta_us[l] * static_cast<double>(load.inner[static_cast<size_t>(l)]));
    return slowest;
  }
  // Eq. 5.
  double time_us(const NodeLoad* loads) const;

  const moecclSampleProblem_t& problem;

 private:
  size_t n_nodes_;
  size_t n_groups_[kMaxInner + 2];
  int32_t* group_[kMaxInner + 2];  // [level] -> [J]
  SampleOp op_[2];
  int64_t* total_[2];
};

// Swaps pairs of samples while Eq. 5 falls, and evaluates at most `pairs` pairs. Keeps `loads` up to date.
void refine_samples(const SampleCosts& costs, int32_t* placement, NodeLoad* loads, int64_t pairs);

}  // namespace moeccl::solve
