// SPDX-License-Identifier: Apache-2.0
// New communicators from parts of one.
#pragma once

#include <memory>

#include "src/comm/communicator.h"

namespace moeccl::comm {

// Collective. Null for a negative color.
Result<std::unique_ptr<Communicator>> split(Communicator& parent, int color, int key, const moecclConfig_t* config);

// The configuration of one that comes from `parent`: given null, what it inherits.
Result<Config> config_of_part(Communicator& parent, const moecclConfig_t* given);
// What the parent's links were measured to take holds for the part's.
void inherit_profile(Communicator& parent, const Config& config, Communicator& part);

// A small all-gather on a communicator, for its own needs: `mine` and all[n_ranks] blocks of `bytes`.
Status all_gather_bytes(Communicator& comm, const void* mine, size_t bytes, void* all);

}  // namespace moeccl::comm
