// SPDX-License-Identifier: Apache-2.0
// A topology as a picture: boxes within boxes, NVLink as lines, each GPU's NIC as a dashed line.
#pragma once

#include <span>
#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

// A complete SVG file without scripts or references. Equal hosts in a row are drawn once, with their number.
std::string to_svg(std::span<const Graph> hosts);

}  // namespace moeccl::topology
