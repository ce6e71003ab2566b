// SPDX-License-Identifier: Apache-2.0
// New communicators from parts of an existing one.
#pragma once

#include <memory>
#include <vector>

#include "src/comm/communicator.h"

namespace moeccl::comm {

// Collective call. Returns null for a negative color.
Result<std::unique_ptr<Communicator>> split(Communicator& parent, int color, int key, const moecclConfig_t* config);

// Returns why a communicator that comes from `parent` need not be waited for: it was aborted, revoked or has failed.
Status still_wanted(Communicator& parent);
// Returns the configuration for a communicator that is made from `parent`. If `given` is null, it is inherited.
Result<Config> config_of_part(Communicator& parent, const moecclConfig_t* given);
// Gives the part of these members of `parent`, in this order, what it takes over: their places in the parent's topology
// unless `config` has another one, and the measurements of the lines that its data crosses. Refers to all arguments.
void hand_down(Communicator& parent, const Config& config, const std::vector<uint32_t>& members, Parent& from);
// The measurements of the parent's links also hold for those of the part.
void inherit_profile(Communicator& parent, const Config& config, Communicator& part);

// A small all-gather for the communicator's own needs. `mine` is a block of `bytes`, and all[n_ranks] are blocks of
// that size.
Status all_gather_bytes(Communicator& comm, const void* mine, size_t bytes, void* all);

}  // namespace moeccl::comm
