// SPDX-License-Identifier: Apache-2.0
// Reads a topology as hwloc writes it (lstopo --of xml, version 2 of the format), but without hwloc, so that errors
// have line numbers and files of other machines work where hwloc is absent. The hwloc probe exports into the same text.
#pragma once

#include <string>
#include <string_view>

#include "topology/graph.h"

namespace moeccl::topology {

// Returns a partial graph: sockets, NUMA domains, caches shared by several cores, PCI bridges, GPUs and NICs with their
// OS devices, and NVLink from hwloc's distances "NVLinkBandwidth". `source` names the producer ("hwloc"). `file` is for
// errors, which read "file:line: ...".
Result<Graph> read_hwloc_xml(std::string_view text, const std::string& file, const std::string& source = "hwloc");

}  // namespace moeccl::topology
