// SPDX-License-Identifier: Apache-2.0
// AllToAll between nodes of data that all ranks of a node hold alike, with blocks of any size (MoNTA under tensor
// parallelism). Dispatch and combine of a tensor-parallel group move such data. Rank k of node d takes part k of each
// block that comes to its node, from rank k mod t of the sender's node, and passes it on inside its node: each element
// crosses between nodes once. A node's own block is copied. This is TensorAllToAll's "lean" with lists instead of equal
// blocks.
//
// A row is an element of the type. Chunk c holds the same elements of all parts, so that parts of one chunk are passed
// on while those of the next cross.
#pragma once

#include "src/algo/builder.h"
#include "src/algo/experts/expert_rows.h"
#include "src/algo/nodes.h"
#include "src/plan/checker.h"

namespace moeccl::algo {

class TensorBlocks {
 public:
  struct Settings {
    std::span<const uint64_t> counts;  // [e][e] elements from node to node
    uint32_t element_bytes = 1;
    plan::Reach reach;
    uint64_t staging_bytes = 0;
  };
  // `counts` must outlive this object.
  static Result<TensorBlocks> make(const LevelTree& tree, const Settings& settings);

  BoundRows build(uint32_t rank) const;
  const char* name() const { return "lean"; }
  Chunking chunking() const { return chunking_; }
  uint64_t hash() const;
  const Shape& shape() const { return shape_; }
  uint64_t input_elements(uint32_t rank) const { return block(nodes_.node_of(rank), nodes_.n_nodes(), true); }
  uint64_t output_elements(uint32_t rank) const { return block(nodes_.node_of(rank), nodes_.n_nodes(), false); }
  // Returns what every rank must receive.
  plan::RowExpectation expected() const;

 private:
  class Writer;
  TensorBlocks(const LevelTree& tree, const Settings& settings)
      : s_(settings), nodes_(tree.tensor_groups(), tree.n_tensor_groups()) {}
  uint64_t count(uint32_t from, uint32_t to) const { return s_.counts[size_t{from} * nodes_.n_nodes() + to]; }
  // Returns where the block to (or from) node `other` begins in a rank's buffer; n_nodes: where the buffer ends.
  uint64_t block(uint32_t node, uint32_t other, bool sent) const;

  Settings s_;
  Nodes nodes_;
  Shape shape_;
  Layout layout_;
  Chunking chunking_;  // of a part
};

// Proves the plan of such blocks, as MOECCL_CHECK_PLANS asks for it. The proof takes blocks of few elements, each as
// large as a line, in three chunks: steps depend on the nodes, and hardly on the sizes.
Status prove_tensor_blocks(const LevelTree& tree, std::span<const uint64_t> counts, const plan::Reach& reach);

}  // namespace moeccl::algo
