// SPDX-License-Identifier: Apache-2.0
// Turns graphs of hosts into the tree of levels that planners use.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "src/plan/levels.h"
#include "topology/graph.h"

namespace moeccl::topology {

// Where a rank runs: a GPU, cache, NUMA domain or socket of one of the hosts, or "host".
struct Seat {
  uint32_t host = 0;
  std::string node = "host";
};

// Seats n_ranks of one host in the usual order: over its GPUs in turn (rank i of n on GPU i when there are enough, else
// neighbours share), or over its processors in blocks when it has no GPU. 0: a rank for each GPU, or each core.
std::vector<Seat> default_seats(const Graph& graph, uint32_t host, uint32_t n_ranks);

// Returns the levels, outermost first: host, socket, numa, island (of GPUs) or cache (of cores), rank, as far as they
// divide the ranks. An island is what NVLink joins, else a PCIe switch. Sockets that an NVLink island spans count as
// one, because its traffic does not cross between them. Hosts may differ in all of this. A level's link is the slowest
// known link of its groups (0: unknown): a host's NICs together (or its own uplink from a file), the links between
// sockets, the switch's uplink, and for ranks NVLink or PCIe.
Result<plan::LevelTree> level_tree(std::span<const Graph> hosts, std::span<const Seat> seats);
// Uses all ranks of default_seats(); n_ranks is 0 or the number that the hosts give together.
Result<plan::LevelTree> level_tree(std::span<const Graph> hosts, uint32_t n_ranks = 0);

// Joins trees of single hosts under a level "host" without figures, where host_of[r] is the host of rank r and hosts[h]
// the tree of its ranks in ascending order. Hosts whose levels have different names keep only their ranks' level. One
// host's tree stays as it is.
Result<plan::LevelTree> over_hosts(std::span<const plan::LevelTree> hosts, std::span<const uint32_t> host_of);

}  // namespace moeccl::topology
