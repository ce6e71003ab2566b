// SPDX-License-Identifier: Apache-2.0
// Derives containment from sets of processors; the probes that see processors share it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

inline constexpr uint32_t kNvidia = 0x10de, kAmd = 0x1002;  // PCI vendors
// Decides by PCI class (base and sub) and vendor; excludes the display chip of a management controller.
bool is_gpu(uint32_t device_class, uint32_t vendor);

using Attachments = std::map<std::string, Cpus>;  // id of a device or bridge -> the processors near it

// Sets the parents of sockets, NUMA domains, caches and the attached devices, and counts cores by the first processor
// of each. A NUMA domain goes under the smallest socket that holds it, a cache under the smallest NUMA domain or
// socket, and a device under the NUMA domain or socket that fits its processors best (under the host if there is none).
void contain(std::vector<Node>& nodes, const std::vector<uint32_t>& core_cpus, const Attachments& attach);

}  // namespace moeccl::topology
