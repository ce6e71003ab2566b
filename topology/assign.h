// SPDX-License-Identifier: Apache-2.0
// Which NIC each GPU uses, decided for the whole host at once: first come would give the near NIC to whoever asks first
// and leave the last GPU with a NIC on the other socket, or with a crowded one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

// How far apart two devices of a host are, near to far; one's order is the other's cost.
enum class Distance : uint8_t { kSwitch, kRoot, kNuma, kSocket, kHost };
const char* distance_name(Distance distance);  // "same PCIe switch", ..., "other socket"

struct Crossing {
  Distance distance = Distance::kHost;
  double bytes_per_ns = 0;  // the narrowest known uplink between; 0: none known
};
Crossing crossing(const Graph& graph, const Node& a, const Node& b);

// [n_users][n_nics] of plain numbers, so that the solver can be tested against trying everything.
struct AssignProblem {
  std::vector<std::vector<Crossing>> paths;
  std::vector<double> nic_bytes_per_ns;  // 0: not known, counts as the slowest known
};
struct AssignChoice {
  std::vector<uint32_t> nics;     // the first is the one; others nobody else needs, no farther away
  double share_bytes_per_ns = 0;  // of the first, when all its users send; 0 when no rate is known
};

// First the smallest share of any user is made as large as it can be (a NIC's rate over its users, bounded by the
// path); among those choices the sum of distances is least; then the loads are even and neighbours stay neighbours.
// Exact (a min-cost flow for the best feasible share), deterministic. Every user gets a NIC when there is one.
std::vector<AssignChoice> assign(const AssignProblem& problem);
// The smallest share that a choice of one NIC per user gives.
double smallest_share(const AssignProblem& problem, const std::vector<uint32_t>& nic_of_user);

// Over a host: users are its GPUs (of_kind(kGpu)), or its NUMA domains when it has none. nics count nics().
struct NicAssignment {
  std::vector<const Node*> users, nics;  // nics: those with a port that is not down, by id
  std::vector<AssignChoice> choices;     // of each user; empty when there are no NICs
};
NicAssignment assign_nics(const Graph& graph);

// Which of these devices ("mlx5_0") a rank uses, nearest first: its own share of them where all n_ranks of the host use
// some, each where default_seats() places it. Positions in `devices`; all, in their order, where the graph does not
// know them.
std::vector<uint32_t> devices_of_rank(const Graph& graph, std::span<const std::string> devices, uint32_t rank,
                                      uint32_t n_ranks);

}  // namespace moeccl::topology
