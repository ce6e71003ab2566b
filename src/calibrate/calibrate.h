// SPDX-License-Identifier: Apache-2.0
// Measures what plans and links cost, through the communicator's own executor and links, and gives all ranks the same
// profile.
#pragma once

#include <string>

#include "src/comm/communicator.h"

namespace moeccl::comm {

struct CalibrateOptions {
  double budget_ms = 20'000;       // no measurement begins after it, on rank 0's clock
  uint64_t max_bytes = 16u << 20;  // of the larger of an operation's send and receive buffers
  double batch_ms = 1;             // operations are timed in batches of about this length
  // Rounds of batches in each pass over all operations and sizes. A plan's time changes over seconds, as the host
  // places its cores, so every plan must be seen more than once.
  int n_batches = 3, n_passes = 3;
};

// Collective; blocks. Coarse sizes come first, so that a small budget still covers every algorithm. The profile is the
// same on all ranks and is not in use yet.
Result<plan::Profile> calibrate(Communicator& comm, const CalibrateOptions& options);

// Collective: uses `profile` from the next operation on if all ranks give the same one; otherwise fails with
// moecclMismatch on all ranks, naming two that differ. `why` is this rank's own failure to make a profile: then all
// ranks fail.
Status use_profile(Communicator& comm, const plan::Profile& profile, Status why);
// Collective: every rank reads its own `path`. A file that does not fit the topology is a failure or, where the
// communicator has `grown` from the one that it may describe, is left out with a warning. `text`: the file, if it has
// been read.
Status load_profile(Communicator& comm, const std::string& path, bool grown = false, std::string text = {});
Status save_profile(const Communicator& comm, const std::string& path);
Status save_profile_in_cache(const Communicator& comm);

// Follows MOECCL_PROFILE and MOECCL_CALIBRATE at init; does nothing if neither is set. The cache is
// $XDG_CACHE_HOME/moeccl/<topology hash>-<ranks>x<cores>.json, or else in ~/.cache; rank 0's copy is the one that
// counts.
Status profile_at_init(Communicator& comm, bool grown);

}  // namespace moeccl::comm
