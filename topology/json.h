// SPDX-License-Identifier: Apache-2.0
// Topologies in our own file format: JSON with a version and units, which a person can write. There is one entry of
// "hosts" for each kind of host:
//
//   {"moeccl_topology": 1,
//    "units": {"bandwidth": "GB/s", "latency": "ns", "memory": "bytes", "rate": "Gbit/s"},
//    "hosts": [{"count": 2, "nodes": [{"id": "host", "kind": "host", "cpus": "0-7", "cores": 8}, ...],
//               "links": [{"kind": "nvlink", "a": "pci:0000:1b:00.0", "b": "...", "bandwidth": 300}]}]}
//
// docs/topology.md lists the fields. Unknown fields, other units and impossible figures are errors.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

inline constexpr size_t kMaxJsonBytes = 64u << 20;
inline constexpr uint32_t kMaxHosts = 4096;

// Returns one graph for each host (a "count" is expanded). Errors read "file:line: hosts[0].nodes[3] (gpu...): ...".
Result<std::vector<Graph>> read_json(std::string_view text, const std::string& file);
// read_json() turns the text back into the same graphs.
std::string to_json(std::span<const Graph> hosts);

}  // namespace moeccl::topology
