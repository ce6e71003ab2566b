// SPDX-License-Identifier: Apache-2.0
// What placements of samples cost: NetMoE Eq. 1 to 5, with the maximum over nodes as well as over channels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moeccl/solve.h"
#include "src/solve/arena.h"

namespace moeccl::solve {

// One of the two operations that a placement decides: the gather of this layer or the scatter of the next.
struct SampleOp {
  int32_t* device = nullptr;   // [I][J] tokens of a sample for experts of a device
  int32_t* node = nullptr;     // [I][N] and of a node
  int64_t* on_node = nullptr;  // [N] over all samples
};

// Tokens through each node's channels.
struct NodeLoad {
  int64_t home = 0;   // of samples here, for experts elsewhere
  int64_t away = 0;   // of samples elsewhere, for experts here
  int64_t intra = 0;  // of samples here, for experts of another device here
};

class SampleCosts {
 public:
  SampleCosts(const moecclSampleProblem_t& problem, Arena& arena);  // lays out
  void count();                                                     // Eq. 2 and 8 for all samples, devices and nodes

  int32_t device_of_expert(int32_t e) const;
  int32_t node_of_device(int32_t j) const { return node_of_[j]; }
  int32_t current(int32_t i) const;
  const SampleOp& op(int k) const { return op_[k]; }
  int n_ops() const { return problem.num_scatter != nullptr ? 2 : 1; }

  // loads[n_ops][N]
  void measure(const int32_t* placement, NodeLoad* loads) const;
  // What swapping samples, or moving sample i away (sign -1) or to device j of node n (sign 1), changes.
  void shift(int k, int32_t i, int32_t j, int sign, NodeLoad& load) const {
    const auto item = static_cast<size_t>(i);
    const int64_t all = total_[k][item];
    const int64_t here = op_[k].node[item * n_nodes_ + static_cast<size_t>(node_of_[j])];
    load.home += sign * (all - here);
    load.away -= sign * here;
    load.intra += sign * (here - op_[k].device[item * n_devices_ + static_cast<size_t>(j)]);
  }
  double node_us(const NodeLoad& load) const {
    const double inter =
        problem.alpha_inter_us + problem.beta_inter_us * static_cast<double>(std::max(load.home, load.away));
    const double intra = problem.alpha_intra_us + problem.beta_intra_us * static_cast<double>(load.intra);
    return std::max(inter, intra);
  }
  // Eq. 5.
  double time_us(const NodeLoad* loads) const;

  const moecclSampleProblem_t& problem;

 private:
  size_t n_devices_, n_nodes_;
  SampleOp op_[2];
  int64_t* total_[2];
  int32_t* node_of_;
};

// Swaps pairs of samples while Eq. 5 falls, weighing at most `pairs` pairs. loads are kept up to date.
void refine_samples(const SampleCosts& costs, int32_t* placement, NodeLoad* loads, int64_t pairs);

}  // namespace moeccl::solve
