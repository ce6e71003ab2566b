// SPDX-License-Identifier: Apache-2.0
// Chooses the NIC of each GPU, for the whole host at once. First come, first served would give the near NIC to the
// first GPU that asks, and leave the last GPU with a NIC on the other socket or with a crowded one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

// How far apart two devices of a host are, from near to far; a later value costs more.
enum class Distance : uint8_t { kSwitch, kRoot, kNuma, kSocket, kHost, kUnknown };
const char* distance_name(Distance distance);  // "same PCIe switch", ..., "other socket", "unknown distance"
// Returns false for a device of a host of several sockets whose socket no source knows (its numa_node is -1).
bool place_known(const Graph& graph, const Node& device);

struct Crossing {
  Distance distance = Distance::kHost;
  double bytes_per_ns = 0;  // the narrowest known uplink between them; 0: none is known
};
Crossing crossing(const Graph& graph, const Node& a, const Node& b);

// The paths are [n_users][n_nics], and all inputs are plain numbers, so that the solver can be tested against
// exhaustive search.
struct AssignProblem {
  std::vector<std::vector<Crossing>> paths;
  std::vector<double> nic_bytes_per_ns;  // 0: unknown, counts as the slowest known
};
struct AssignChoice {
  std::vector<uint32_t> nics;     // the first is the user's NIC; the others are free NICs that are no farther away
  double share_bytes_per_ns = 0;  // of the first NIC when all its users send; 0 when no rate is known
};

// First, makes the smallest share of any user as large as possible (a NIC's rate over its users, bounded by the path).
// Among those choices, the sum of distances is least; then the loads are even and neighbours stay neighbours. The
// result is exact (a min-cost flow for the best feasible share) and deterministic. Every user gets a NIC if any exists.
std::vector<AssignChoice> assign(const AssignProblem& problem);

// The assignment of a host. Users are its GPUs (of_kind(kGpu)), or its NUMA domains that have processors when it has
// none. AssignChoice::nics are indices into `nics`.
struct NicAssignment {
  std::vector<const Node*> users, nics;  // nics: those with a port that is not down, by id; see leave_out_virtual()
  std::vector<AssignChoice> choices;     // of each user; empty when there are no NICs
};
NicAssignment assign_nics(const Graph& graph);

// Returns which of these devices ("mlx5_0") a rank uses, nearest first: its own share when all n_ranks of the host,
// each where default_seats() places it, use some. The result holds positions in `devices`; it is all of them, in order,
// if the graph does not know them.
std::vector<uint32_t> devices_of_rank(const Graph& graph, std::span<const std::string> devices, uint32_t rank,
                                      uint32_t n_ranks);
// Returns those of the GPU at a PCI address ("0000:3b:00.0"): its share when all GPUs of the host use some, whichever
// of them a communicator has. The result is empty if the graph does not know the GPU or a device.
std::vector<uint32_t> devices_of_gpu(const Graph& graph, std::span<const std::string> devices, std::string_view pci);
// Returns whether NVLink joins the GPUs at two PCI addresses.
bool joined_by_nvlink(const Graph& graph, std::string_view pci, std::string_view other);

}  // namespace moeccl::topology
