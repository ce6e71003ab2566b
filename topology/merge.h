// SPDX-License-Identifier: Apache-2.0
// Merges several probes' partial graphs into one.
#pragma once

#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

// Parts come in order of trust: the values of an earlier part stay, and later ones fill in what it did not know. Nodes
// are matched by id (a NIC's ports by their number). Where two parts name different parents, the inner one wins: verbs
// knows a NIC's NUMA domain, hwloc the PCI switch in that domain. Contradictions are reported in `notes`.
//
// The result is valid and in canonical order (children by kind, number and id), whatever the order within the parts.
// PCI bridges that lead to no GPU or NIC, or to a single node, are left out (the slower of the two uplinks stays).
// Nodes without a known parent become children of the host. GPUs are numbered.
Result<Graph> merge(const std::vector<Graph>& parts);

}  // namespace moeccl::topology
