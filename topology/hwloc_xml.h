// SPDX-License-Identifier: Apache-2.0
// A topology as hwloc writes it (lstopo --of xml, version 2 of the format), read without hwloc: so errors have lines,
// and files of other machines work where hwloc is absent. The probe of hwloc exports into the same text.
#pragma once

#include <string>
#include <string_view>

#include "topology/graph.h"

namespace moeccl::topology {

// A partial graph: sockets, NUMA domains, caches shared by several cores, PCI bridges, GPUs and NICs with their OS
// devices, NVLink from hwloc's distances "NVLinkBandwidth". `source` names who made it ("hwloc"), `file` is for errors,
// which read "file:line: ...".
Result<Graph> read_hwloc_xml(std::string_view text, const std::string& file, const std::string& source = "hwloc");

}  // namespace moeccl::topology
