// SPDX-License-Identifier: Apache-2.0
// Moves shards of experts between ranks and slots, each rank to each other directly, in one plan over all experts.
//
// Collect (Algorithm 2): rank d gets shard d of every expert's gradient from one of its replicas, balanced over them.
// Place (Section 4.4): every slot of the new placement gets its expert's weights from the ranks that hold the shards; a
// rank with several replicas receives them once.
//
// A row is an element of the type. What one rank sends to another is a list of pieces, packed one after another and
// cut into chunks of a staging slot.
#pragma once

#include <memory>

#include "src/algo/builder.h"
#include "src/algo/replica_placement.h"
#include "src/plan/binding.h"

namespace moeccl::algo {

class ReplicaMove {
 public:
  struct Settings {
    moecclOp_t op = moecclOpCollectGradients;  // or moecclOpPlaceWeights
    uint64_t count = 0;                        // elements of an expert
    uint32_t element_bytes = 1;
    plan::Reach reach;
    uint64_t staging_bytes = 0;
  };
  // Collect: fails when an expert has no replica. The placement lives as long as this object.
  static Result<ReplicaMove> make(const ReplicaPlacement& placement, const Settings& settings);

  // A rank's program with the lists that its steps name.
  struct Bound {
    Program program;
    std::vector<plan::RowBlock> rows;
    plan::Binding binding;  // its rows point into `rows`, which keep their place when a Bound is moved
  };
  Bound build(uint32_t rank) const;
  Chunking chunking() const { return chunking_; }
  uint64_t hash() const;
  // Elements that `from` sends to `to`.
  uint64_t sent(uint32_t from, uint32_t to) const;
  uint64_t input_elements(uint32_t rank) const;
  uint64_t output_elements(uint32_t rank) const;
  const Shape& shape() const { return shape_; }

 private:
  // `length` elements from `src` of the sender's Input to each of `dst` of the receiver's Output.
  struct Piece {
    uint64_t src = 0, length = 0;
    std::vector<uint64_t> dst;
  };
  ReplicaMove(const ReplicaPlacement& placement, const Settings& settings) : placement_(placement), s_(settings) {}
  std::vector<Piece> pieces(uint32_t from, uint32_t to) const;
  // The slot of rank `to` that `from` writes; slots are for ranks that send.
  uint32_t slot_index(uint32_t from, uint32_t to) const;
  uint64_t slot_elements() const;  // stride: a chunk in whole cache lines

  const ReplicaPlacement& placement_;
  Settings s_;
  Shape shape_;
  Layout layout_;
  Chunking chunking_;
  std::vector<uint64_t> sent_;  // [n][n]
};

}  // namespace moeccl::algo
