// SPDX-License-Identifier: Apache-2.0
// The uplinks that a communicator's paced links cross, and how a communicator that is split from it shares them.
#pragma once

#include <memory>
#include <vector>

#include "src/plan/levels.h"
#include "transport/paced/paced_link.h"
#include "transport/shm/segment.h"

namespace moeccl::comm {

// The uplinks of an emulated cluster, in the memory of the communicator that was created first. They live as long as
// any communicator that uses them.
struct SharedUplinks {
  plan::LevelTree tree;
  std::vector<std::shared_ptr<transport::shm::Segment>> segments;  // [tree.n_ranks]
  std::vector<uint32_t> member;  // [ranks of the communicator] the rank's number in the tree

  // Returns the uplinks for a communicator of `ranks`, which are numbers in this one's communicator. From now on, the
  // uplinks serve traffic by class.
  std::shared_ptr<const SharedUplinks> of_part(const std::vector<uint32_t>& ranks) const;
  // Returns the tree of the communicator's own ranks.
  plan::LevelTree own_tree() const { return tree.part(member); }
  // Returns the uplinks between two ranks of the communicator; 0 bytes_per_ns means not paced.
  transport::paced::PacedUplinks between(uint32_t a, uint32_t b) const;

 private:
  // A group's words are in the segment of its first rank.
  transport::PaceWords* words(uint32_t level, uint32_t member_rank) const;
};

}  // namespace moeccl::comm
