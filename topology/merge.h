// SPDX-License-Identifier: Apache-2.0
// Several probes' partial graphs, made one.
#pragma once

#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

// Parts in order of trust: what an earlier one says stays, later ones fill in what it did not know. Nodes meet by id
// (a NIC's ports by their number). Of two parents the one further in wins: verbs knows a NIC's NUMA domain, hwloc the
// PCI switch in that domain. What contradicts each other is told in `notes`.
//
// The result is valid and in canonical order (children by kind, number and id), whatever the order within the parts:
// PCI bridges that lead to no GPU or NIC, or to one thing alone, are left out (the slower of two uplinks stays), nodes
// without a known parent hang on the host, GPUs are numbered.
Result<Graph> merge(const std::vector<Graph>& parts);

}  // namespace moeccl::topology
