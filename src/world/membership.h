// SPDX-License-Identifier: Apache-2.0
// Making a rank a member of a communicator: from a unique id to links.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "moeccl/comm.h"
#include "src/base/clock.h"
#include "src/exec/fabric.h"
#include "src/plan/levels.h"
#include "src/plan/plan.h"
#include "src/plan/profile.h"
#include "src/world/config.h"
#include "src/world/cuda_side.h"
#include "src/world/reunion.h"
#include "src/world/shared_uplinks.h"

namespace moeccl::comm {

// State that a communicator inherits from the one from which it was split.
struct Parent {
  std::shared_ptr<const SharedUplinks> uplinks;      // null: the communicator has its own
  std::shared_ptr<const plan::LevelTree> described;  // of the new communicator's ranks; see Membership
  // Returns what that communicator's profile says of a tree of the new one's ranks. Empty: the new one reads the
  // profile of MOECCL_PROFILE by itself.
  std::function<plan::Profile(const plan::LevelTree&)> profile_for;
  std::function<Status()> others_alive;  // see bootstrap::JoinOptions; may be empty
  std::function<Status()> still_wanted;  // a failure ends the making of the communicator; may be empty
  bool grows = false;                    // that one becomes this one, which has more ranks
  Deadline until;                        // of the call that makes this one, as it has begun before
  // See bootstrap::JoinOptions, for ids that rank 0's process hands out before connect(); may be empty.
  std::function<Result<moecclUniqueId>()> ask_again;
};

// The results of connect().
struct Membership {
  uint32_t rank = 0, n_ranks = 1;
  Config config;
  plan::LevelTree tree;
  // The tree as a topology gave it to this communicator, or to the one from which it was split. Null: no topology was
  // given, or it is paced, and then `uplinks` has it.
  std::shared_ptr<const plan::LevelTree> described;
  plan::Reach reach;        // for ordinary buffers
  bool heap_reach = false;  // for the symmetric heap
  uint32_t ranks_on_host = 1, cores_on_host = 1;
  uint32_t cores = 1;   // of all hosts
  int host_level = -1;  // the tree's level whose groups are hosts; -1: one host, or the user's topology has links
  std::string address;  // of this host, for ranks on other hosts; empty if all ranks are here
  std::unique_ptr<exec::Fabric> fabric;
  std::shared_ptr<const SharedUplinks> uplinks;  // null if not paced
  std::unique_ptr<CudaSide> cuda;
  std::string why_no_cuda;  // set when some rank asked for CUDA
  MeetingPlaces places;     // for use when ranks are lost
  // MOECCL_PROFILE's file, if it has been read: later it may be another one. Empty: it has not.
  std::string profile_text;
};

// Collective call.
Result<Membership> connect(const moecclUniqueId& id, uint32_t n_ranks, uint32_t rank, const Config& config,
                           const Parent& parent);
// Does the same for ranks that have met again.
Result<Membership> connect(Reunion& met, const Config& config, const Parent& parent);

}  // namespace moeccl::comm
