// SPDX-License-Identifier: Apache-2.0
// The topology "auto": the levels that each host finds for its own ranks, below a level of the hosts.
#pragma once

#include "src/base/clock.h"
#include "src/bootstrap/bootstrap.h"
#include "src/plan/levels.h"
#include "src/world/hosts.h"

namespace moeccl::comm {

// Collective call of all ranks of `session`. Each host's first rank speaks for it, because ranks that are bound to
// parts of a host may see less of it.
Result<plan::LevelTree> levels_of_hosts(bootstrap::Session& session, const Hosts& hosts, Deadline deadline);

// What a host's first rank sends. Reading needs the number of the host's ranks; errors name `rank`, the sender.
std::vector<std::byte> write_levels(const Result<plan::LevelTree>& own);
Result<plan::LevelTree> read_levels(std::span<const std::byte> bytes, uint32_t n_ranks, uint32_t rank);

}  // namespace moeccl::comm
