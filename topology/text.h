// SPDX-License-Identifier: Apache-2.0
// A topology for people: as text and as a picture.
#pragma once

#include <span>
#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

// The tree of nodes, links beside it, the NIC of each GPU, the levels that planners see, and what did not fit together.
// Canonical: equal graphs give equal texts.
std::string to_text(const Graph& graph);
// Several hosts: equal ones once, with their number.
std::string to_text(std::span<const Graph> hosts);
// "80 GiB", "32 MiB"; "400 Gbit/s", "63 GB/s".
std::string bytes_text(uint64_t bytes);
std::string rate_text(double bytes_per_ns);
// "gpu 0 0000:1b:00.0", "mlx5_0", "socket 1": how both name a node.
std::string label(const Node& node);

}  // namespace moeccl::topology
