// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

// Returns the bytes that all ranks of node 0 put into other nodes.
uint64_t leaving_node_0(const plan::Plan& plan, const plan::LevelTree& tree) {
  uint64_t bytes = 0;
  for (const plan::Program& program : plan.programs) {
    if (tree.levels[0].group_of_rank[program.rank] != 0) continue;
    plan::Binding binding;
    binding.chunking = plan.chunking;
    binding.element_bytes = plan.shape.element_bytes;
    binding.count = plan.shape.count;
    for (const plan::Lane& lane : program.lanes)
      for (const plan::Step& step : lane.steps)
        if (step.kind == plan::StepKind::kPut && tree.levels[0].group_of_rank[step.dst.rank] != 0)
          bytes += plan::resolve(binding, program, step.dst, binding.count, 0).length * kElement;
  }
  return bytes;
}

TEST(Hierarchical, ANodeSendsWhatARankWouldInAFlatRingOfNodes) {
  const plan::LevelTree tree = nodes({4, 4});
  const auto leaving = [&](moecclOp_t op, uint64_t count) {
    return leaving_node_0(plan_of(op, "hier", shape_of(op, 8, count), tree), tree);
  };
  EXPECT_EQ(leaving(moecclOpAllReduce, 80), 80 * kElement);          // 2 (G-1)/G S
  EXPECT_EQ(leaving(moecclOpAllGather, 10), 4 * 10 * kElement);      // the blocks of its ranks, once
  EXPECT_EQ(leaving(moecclOpReduceScatter, 10), 4 * 10 * kElement);  // one sum of each block of the other nodes
}

TEST(Hierarchical, UnevenNodesSendNoMoreBlocks) {
  const plan::LevelTree tree = nodes({3, 5, 1});
  EXPECT_EQ(leaving_node_0(plan_of(moecclOpAllGather, "hier", shape_of(moecclOpAllGather, 9, 10), tree), tree),
            3 * 2 * 10 * kElement);
  EXPECT_EQ(leaving_node_0(plan_of(moecclOpReduceScatter, "hier", shape_of(moecclOpReduceScatter, 9, 10), tree), tree),
            6 * 10 * kElement);
}

TEST(Hierarchical, ChunksOfManyNodesStayLong) {
  const auto chunk_bytes = [](uint32_t n_nodes, uint32_t size) {
    plan::Shape shape = shape_of(moecclOpAllReduce, n_nodes * size, (64 << 20) / kElement);
    return find(moecclOpAllReduce, "hier")->chunking(shape, nodes(std::vector<uint32_t>(n_nodes, size))).chunk *
           kElement;
  };
  EXPECT_EQ(chunk_bytes(2, 4), 1u << 20);
  EXPECT_EQ(chunk_bytes(8, 8), 1u << 20);
  EXPECT_GE(chunk_bytes(128, 8), 3u << 20);
}

}  // namespace
}  // namespace moeccl::algo::testing
