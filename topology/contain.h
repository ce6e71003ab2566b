// SPDX-License-Identifier: Apache-2.0
// Who contains whom, from sets of processors: what probes that see processors share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

inline constexpr uint32_t kNvidia = 0x10de, kAmd = 0x1002;  // PCI vendors
// By PCI class (base and sub) and vendor: not the picture chip of a management controller.
bool is_gpu(uint32_t device_class, uint32_t vendor);

using Attachments = std::map<std::string, Cpus>;  // id of a device or bridge -> the processors near it

// Sets the parents of sockets, NUMA domains and caches and of what is attached, and counts cores by the first
// processor of each. A NUMA domain goes under the smallest socket that holds it, a cache under the smallest NUMA domain
// or socket, a device under the NUMA domain or socket that fits its processors best (none: the host).
void contain(std::vector<Node>& nodes, const std::vector<uint32_t>& core_cpus, const Attachments& attach);

}  // namespace moeccl::topology
