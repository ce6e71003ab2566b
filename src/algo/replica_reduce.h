// SPDX-License-Identifier: Apache-2.0
// AllReduce over the replicas of every expert, wherever their slots are, as one plan (adaptive replication, Section
// 4.1). A rank with several replicas adds them up first and takes part once. The ranks that hold an expert need no
// separate communicator: the placement names them at every call.
//
// "direct": where peers' buffers can be reached, each rank of an expert sums one part of all replicas and writes it to
// all of them, in one pass and without staging.
// "flat": the ranks of an expert cut it into as many parts as there are ranks; each sums one part and the others fetch
// it.
// "nodes": the same inside each group of the outermost level; then the groups' sums of a part meet at one of the
// groups. An expert crosses between groups 2 * (groups - 1) times, however many ranks hold it.
//
// Input and Output are [slots of the rank][count]; in place they are the same memory.
#pragma once

#include "src/algo/builder.h"
#include "src/algo/replica_placement.h"

namespace moeccl::algo {

enum class ReduceKind : uint8_t { kDirect, kFlat, kNodes };
const char* reduce_kind_name(ReduceKind kind);

class ReplicaReduce {
 public:
  // shape: from replica_shape(). All arguments must outlive this object.
  ReplicaReduce(const ReplicaPlacement& placement, const Shape& shape, const LevelTree& tree, ReduceKind kind,
                bool average);

  const char* name() const { return reduce_kind_name(kind_); }
  // Returns success, or why the kind cannot run here.
  static Status applies(ReduceKind kind, const plan::Reach& reach, const LevelTree& tree);
  const Layout& layout() const { return layout_; }
  Chunking chunking() const;
  Status fits() const { return chunks_fit(shape_, layout_); }
  Program build(uint32_t rank) const;
  uint64_t hash() const;
  plan::Plan build_all() const;

 private:
  // The ranks of one group that hold an expert.
  struct Group {
    uint32_t node = 0;
    std::vector<const ExpertHost*> members;  // ascending
  };
  struct Expert {
    uint32_t number = 0, n_parts = 1, n_replicas = 0;
    std::vector<Group> groups;
    bool shared() const { return groups.size() > 1 || groups[0].members.size() > 1; }
  };
  // A rank's view of one of its experts.
  struct Own {
    const Expert* expert = nullptr;
    const Group* group = nullptr;
    const ExpertHost* host = nullptr;
    uint32_t group_index = 0, first_slot = 0;  // first_slot: of its staging
  };
  struct Writer;

  uint32_t staging_slots(const Expert& e, const Group& g) const;
  static uint32_t owner(const Expert& e, uint32_t group, uint32_t part);
  // Returns the group in which a part's sums meet. It differs between experts, so that all groups are busy.
  static uint32_t root(const Expert& e, uint32_t part) {
    return (part + e.number) % static_cast<uint32_t>(e.groups.size());
  }
  // Returns the first staging slot of an expert on a rank that holds it.
  uint32_t first_slot(uint32_t rank, const Expert& e) const;

  const ReplicaPlacement& placement_;
  const Shape& shape_;
  const LevelTree& tree_;
  ReduceKind kind_;
  bool average_;
  std::vector<Expert> experts_;                   // those with a replica
  std::vector<std::vector<uint32_t>> of_rank_;    // [n_ranks] positions in experts_
  std::vector<std::vector<uint32_t>> slot_base_;  // [n_ranks], parallel to of_rank_
  Layout layout_;
};

// Returns what all ranks know of a call. Blocks are slots.
Shape replica_shape(const ReplicaPlacement& placement, uint64_t count, uint32_t element_bytes, plan::Reach reach,
                    uint64_t staging_bytes);

}  // namespace moeccl::algo
