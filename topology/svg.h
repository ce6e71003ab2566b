// SPDX-License-Identifier: Apache-2.0
// Draws a topology: boxes within boxes, NVLink as lines, each GPU's NIC as a dashed line.
#pragma once

#include <span>
#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

// Returns a complete SVG file without scripts or references. Consecutive equal hosts are drawn once, with their number.
std::string to_svg(std::span<const Graph> hosts);

}  // namespace moeccl::topology
