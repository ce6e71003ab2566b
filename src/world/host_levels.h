// SPDX-License-Identifier: Apache-2.0
// The levels of a new communicator: those of its configuration's topology, or with "auto" those that each host finds
// for its own ranks, below a level of the hosts.
#pragma once

#include "src/base/clock.h"
#include "src/bootstrap/bootstrap.h"
#include "src/plan/levels.h"
#include "src/world/hosts.h"

namespace moeccl::comm {

// Collective call of all ranks of `session`. `topology`: as moecclConfig_t gives it; without one, a level of the hosts
// if there are several.
Result<plan::LevelTree> tree_of_ranks(bootstrap::Session& session, const Hosts& hosts, const std::string& topology,
                                      Deadline deadline);

// What a host's first rank sends. Reading needs the number of the host's ranks; errors name `rank`, the sender.
std::vector<std::byte> write_levels(const Result<plan::LevelTree>& own);
Result<plan::LevelTree> read_levels(std::span<const std::byte> bytes, uint32_t n_ranks, uint32_t rank);

}  // namespace moeccl::comm
