// SPDX-License-Identifier: Apache-2.0
// Sums the gradients of replicated experts at the ranks that hold their shards (adaptive replication, Sections 4.1 and
// 4.3 in one): a reduce-scatter from every expert's replicas to all ranks. Each summand is sent once, so that a rank
// puts (sN - s) / N experts on the network (Appendix A.2); AllReduce and collection put more there if an expert is on
// two ranks or more.
//
// "direct": a rank adds up its own replicas and sends each part to the rank whose shard it is.
// "nodes": the ranks of a node that hold an expert add up first. One of them, in turn over the shards of other nodes,
// takes the others' parts and sends on the sum, so that an expert leaves a node once. This mirrors PlaceWeights.
//
// A row is an element of the type. Chunk c holds the same elements of all shards.
#pragma once

#include "src/algo/experts/expert_rows.h"

namespace moeccl::algo {

class GradientReduce {
 public:
  enum class Way : uint8_t { kDirect, kNodes };
  struct Settings {
    uint64_t count = 0;  // elements of an expert
    uint32_t element_bytes = 1;
    bool average = false;
    plan::Reach reach;
    uint64_t staging_bytes = 0;
    Way way = Way::kDirect;
  };
  // Returns whether "nodes" puts fewer bytes between nodes, as two ranks of a node hold the same expert.
  static bool nodes_save_bytes(const ReplicaPlacement& placement, const LevelTree& tree);
  // Fails if an expert has no replica. `placement` and `tree` must outlive this object.
  static Result<GradientReduce> make(const ReplicaPlacement& placement, const LevelTree& tree,
                                     const Settings& settings);

  BoundRows build(uint32_t rank, const ExpertPlaces& places = {}) const;
  const char* name() const { return node_of_ == nullptr ? "direct" : "nodes"; }
  const Chunking& chunking() const { return places_.chunking; }
  uint64_t hash() const;
  const Shape& shape() const { return shape_; }
  uint64_t input_elements(uint32_t rank) const { return placement_.n_slots(rank) * s_.count; }
  uint64_t output_elements(uint32_t) const { return placement_.n_experts * shape_.count; }

 private:
  // The ranks of one node that hold an expert.
  struct Group {
    uint32_t node = 0;
    std::vector<const ExpertHost*> members;  // ascending
    std::vector<uint32_t> first_passed;      // [members] first place of what the others pass to it
    uint32_t size() const { return static_cast<uint32_t>(members.size()); }
  };
  struct Expert {
    uint32_t number = 0, n_replicas = 0;
    uint32_t first_place = 0;  // of what arrives at the rank that has a shard
    std::vector<Group> groups;
  };
  class Writer;

  GradientReduce(const ReplicaPlacement& placement, const Settings& settings) : placement_(placement), s_(settings) {}
  void group_hosts();
  void number_places();
  uint32_t node_of(uint32_t rank) const { return node_of_ == nullptr ? 0 : (*node_of_)[rank]; }

  const ReplicaPlacement& placement_;
  Settings s_;
  const std::vector<uint32_t>* node_of_ = nullptr;  // [n_ranks]; null: all ranks are one node
  uint64_t tree_hash_ = 0;
  std::vector<Expert> experts_;
  uint32_t n_passed_ = 0, n_places_ = 0;  // places of a rank's staging; those for what is passed to it come first
  Shape shape_;
  StagedPlaces places_;  // of shards
};

}  // namespace moeccl::algo
