// SPDX-License-Identifier: Apache-2.0
// Writes a topology for people to read.
#pragma once

#include <span>
#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

// Writes the tree of nodes, the links between them, the NIC of each GPU, the levels that planners see, and the
// contradictions. The text is canonical: equal graphs give equal texts.
std::string to_text(const Graph& graph);
// Writes several hosts; equal ones appear once, with their number.
std::string to_text(std::span<const Graph> hosts);
// "80 GiB", "32 MiB"; "400 Gbit/s", "63 GB/s".
std::string bytes_text(uint64_t bytes);
std::string rate_text(double bytes_per_ns);
// Returns "gpu 0 0000:1b:00.0", "nic mlx5_0", "socket 1": the name of a node in texts and pictures.
std::string label(const Node& node);

}  // namespace moeccl::topology
