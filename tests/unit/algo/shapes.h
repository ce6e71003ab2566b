// SPDX-License-Identifier: Apache-2.0
// The shapes and trees on which algorithms are proved. Elements are as large as a line, so that parts can be as small
// as one element.
#pragma once

#include <string>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/plan/levels.h"

namespace moeccl::algo::testing {

struct NamedTree {
  std::string name;
  plan::LevelTree tree;
};

inline plan::LevelTree nodes(const std::vector<uint32_t>& sizes) {
  auto tree = plan::LevelTree::from_sizes({{"node", {}, sizes}});
  return tree.ok() ? *tree : plan::LevelTree{};
}

// Returns every tree of n ranks on which two-level algorithms differ: even, uneven, a node of one rank, three levels,
// and ranks dealt to nodes in turn.
inline std::vector<NamedTree> trees(uint32_t n) {
  std::vector<NamedTree> all = {{"flat", plan::LevelTree::flat(n)}};
  if (n < 3) return all;
  all.push_back({"halves", nodes({n / 2, n - n / 2})});
  all.push_back({"one+rest", nodes({1, n - 1})});
  if (n >= 5) all.push_back({"1+mid+rest", nodes({1, n / 2, n - 1 - n / 2})});
  if (n >= 4 && n % 2 == 0) {
    all.push_back({"pairs", nodes(std::vector<uint32_t>(n / 2, 2))});
    plan::LevelTree dealt = nodes({n / 2, n / 2});
    for (uint32_t r = 0; r < n; ++r) dealt.levels[0].group_of_rank[r] = r % 2;
    all.push_back({"dealt", dealt});
  }
  if (n >= 8 && n % 4 == 0) {
    auto tree = plan::LevelTree::from_sizes({{"node", {}, {2, 2}}, {"socket", {}, std::vector<uint32_t>(4, n / 4)}});
    if (tree.ok()) all.push_back({"three levels", *tree});
  }
  return all;
}

inline plan::Shape shape_of(moecclOp_t op, uint32_t n_ranks, uint64_t count) {
  plan::Shape shape;
  shape.op = op;
  shape.n_ranks = n_ranks;
  shape.count = count;
  shape.element_bytes = 64;
  return shape;
}

inline bool has_root(moecclOp_t op) {
  return op == moecclOpReduce || op == moecclOpBroadcast || op == moecclOpGather || op == moecclOpScatter;
}

// All kinds of reach between ranks. "puts only" is that between hosts.
struct NamedReach {
  const char* name;
  plan::Reach reach;
};
inline constexpr NamedReach kReaches[] = {
    {"staging", {true, false, false}},
    {"views", {true, true, true}},
    {"reads", {true, false, true}},
    {"puts only", {false, false, false}},
};

// Returns a plan of all ranks whose blocks run in `n_chunks` chunks of `chunk` elements, whatever the algorithm would
// choose.
inline plan::Plan plan_of(const Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree,
                          uint64_t chunk, uint32_t n_chunks) {
  plan::Plan plan = build_all(algorithm, shape, tree);
  plan.chunking = {chunk, n_chunks};
  return plan;
}

// For the names of parametrised tests.
inline std::string operation_name(moecclOp_t op) {
  static constexpr const char* kNames[] = {"AllReduce", "Reduce",    "Broadcast", "AllGather", "ReduceScatter",
                                           "AllToAll",  "AllToAllv", "Gather",    "Scatter"};
  return op == moecclOpTensorAllToAll ? "TensorAllToAll" : kNames[op];
}

inline std::vector<const Algorithm*> all_algorithms() {
  std::vector<const Algorithm*> all;
  for (const Algorithm& a : algorithms()) all.push_back(&a);
  return all;
}

inline std::string describe(const Algorithm& algorithm, const plan::Shape& shape) {
  return operation_name(algorithm.op) + " " + algorithm.name + ", " + std::to_string(shape.n_ranks) + " ranks, root " +
         std::to_string(shape.root) + ", count " + std::to_string(shape.count) + (shape.in_place ? ", in place" : "") +
         (shape.deterministic ? ", deterministic" : "") + (shape.scaled ? ", scaled" : "");
}

}  // namespace moeccl::algo::testing
