// SPDX-License-Identifier: Apache-2.0
// Moves shards of experts between ranks and slots in one plan over all experts.
//
// Collect (Algorithm 2): rank d gets shard d of every expert's gradient from one of the expert's replicas, balanced
// over them.
// Place (Section 4.4): every slot of the new placement gets its expert's weights from the ranks that hold the shards. A
// rank with several replicas receives them once. If the topology has nodes, a shard enters a node once for each expert:
// one of the node's ranks that hold the expert, in turn over the shards, passes it on to the others.
//
// A row is an element of the type. A piece is one rank's part of one expert. It has its own place in the receiver's
// staging, so a plan costs only what it moves: O(slots + pieces of the rank). Chunk c holds the same elements of all
// pieces, so what arrives in a chunk can be passed on in the same chunk.
#pragma once

#include <memory>

#include "src/algo/experts/expert_rows.h"

namespace moeccl::algo {

class ReplicaMove {
 public:
  enum class Way : uint8_t { kDirect, kNodes };
  struct Settings {
    moecclOp_t op = moecclOpCollectGradients;  // or moecclOpPlaceWeights
    uint64_t count = 0;                        // elements of an expert
    uint32_t element_bytes = 1;
    plan::Reach reach;
    uint64_t staging_bytes = 0;
    Way way = Way::kDirect;  // Collect has this one alone
  };
  // Collect fails if an expert has no replica. `placement` and `tree` must outlive this object.
  static Result<ReplicaMove> make(const ReplicaPlacement& placement, const LevelTree& tree, const Settings& settings);

  BoundRows build(uint32_t rank, const ExpertPlaces& places = {}) const;
  const char* name() const { return node_of_ == nullptr ? "direct" : "nodes"; }
  const Chunking& chunking() const { return places_.chunking; }
  uint64_t hash() const;
  uint64_t input_elements(uint32_t rank) const;
  uint64_t output_elements(uint32_t rank) const;
  const Shape& shape() const { return shape_; }

 private:
  // The part of one expert that one rank sends to another, as one of the two sees it.
  struct Piece {
    uint32_t peer = 0;
    uint32_t number = 0;        // of its place in the receiver's staging
    uint32_t origin_place = 0;  // if passed on: of its place in the sender's staging
    uint64_t length = 0;
    uint64_t begin = 0;                // first element in the sender's Input or, with `host`, in each of its slots
    const ExpertHost* host = nullptr;  // where the receiver places it; null: at `begin` of Output
  };
  struct Pieces {
    std::vector<Piece> own;                // from this rank to itself
    std::vector<Piece> sent, arriving;     // shards to and from the ranks that hold them
    std::vector<Piece> passed, passed_on;  // through this rank to the others of its node; through others to this rank
  };
  class Writer;

  ReplicaMove(const ReplicaPlacement& placement, const Settings& settings) : placement_(placement), s_(settings) {}
  Pieces collect_pieces(uint32_t rank, const ExpertPlaces& places) const;
  Pieces place_pieces(uint32_t rank, const ExpertPlaces& places) const;
  uint32_t node_of(uint32_t rank) const { return node_of_ == nullptr ? 0 : (*node_of_)[rank]; }
  uint32_t place_number(uint32_t origin, uint32_t index) const { return origin * placement_.most_experts + index; }

  const ReplicaPlacement& placement_;
  Settings s_;
  const std::vector<uint32_t>* node_of_ = nullptr;  // [n_ranks]; null: all ranks are one node
  uint64_t tree_hash_ = 0;
  Shape shape_;
  StagedPlaces places_;  // of pieces
};

}  // namespace moeccl::algo
