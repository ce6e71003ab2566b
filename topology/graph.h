// SPDX-License-Identifier: Apache-2.0
// A host as plain data: nodes (host, sockets, NUMA domains, last-level caches, PCI switches, GPUs, NICs) in a tree of
// containment, and links that are not part of the tree (NVLink, between sockets). Probes make partial graphs, and
// merge() (merge.h) combines them. Everything here is a function of its arguments.
//
// Ids consist of what every probe can know of a node, so that the nodes of partial graphs match:
//   "host"             the host                    "cache:3:16"        the L3 cache whose first processor is 16
//   "socket:0"         by the kernel's number      "root:0000:16"      a PCI root, by domain and first bus
//   "numa:1"           by the kernel's number      "pci:0000:17:00.0"  PCI devices of every kind, bridges too
//   "net:eth0"         a network interface without a PCI device
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"
#include "src/plan/levels.h"

namespace moeccl::topology {

enum class NodeKind : uint8_t { kHost, kSocket, kNuma, kCache, kRoot, kSwitch, kNvSwitch, kGpu, kNic };
enum class LinkLayer : uint8_t { kUnknown, kEthernet, kInfiniband };
enum class PortState : uint8_t { kUnknown, kDown, kUp };
enum class LinkKind : uint8_t { kNvlink, kSockets, kPeer };  // kPeer: GPUs that may read each other over PCIe

// Processor numbers of the kernel, ascending.
using Cpus = std::vector<uint32_t>;

struct Port {
  uint32_t number = 1;         // from 1, as verbs counts
  std::string interface = {};  // the network interface, "" if there is none
  LinkLayer layer = LinkLayer::kUnknown;
  PortState state = PortState::kUnknown;
  double gbit = 0;  // 1e9 bits per second each way; 0: unknown
  uint32_t mtu_bytes = 0;
  std::string gid = {};      // the first that is not zero, "" if there is none
  std::string address = {};  // of the interface: the first IPv4 or else IPv6 address
};

struct Node {
  std::string id;
  NodeKind kind = NodeKind::kHost;
  std::string parent;                   // id; "": unknown to this probe, or the host itself
  std::string name;                     // "NVIDIA H100 80GB HBM3", "mlx5_0", a host's name
  int32_t number = -1;                  // socket, NUMA: the kernel's; cache: its level; GPU: NVML's; -1: unknown
  Cpus cpus;                            // host, socket, NUMA, cache
  uint32_t n_cores = 0;                 // host, socket, NUMA
  uint64_t memory_bytes = 0;            // NUMA, cache, GPU
  plan::LinkCost uplink;                // to the parent (PCIe), each way
  std::vector<Port> ports;              // NICs
  std::vector<std::string> os_devices;  // "mlx5_0", "ib0", "cuda0"
  std::string physical;                 // of a virtual function: the id of the device whose ports it shares
  std::vector<std::string> sources;     // probes that reported it
};

struct Link {
  std::string a, b;  // ids, a < b
  LinkKind kind = LinkKind::kNvlink;
  uint32_t count = 1;   // links in parallel
  plan::LinkCost cost;  // all of them together, each way
  std::vector<std::string> sources;
};

struct Graph {
  std::vector<Node> nodes;
  std::vector<Link> links;
  std::vector<std::string> notes;  // contradictions between probes, one sentence each

  const Node* find(std::string_view id) const;
  Node* find(std::string_view id);
  std::vector<const Node*> of_kind(NodeKind kind) const;  // in the order of nodes; GPUs by number, then id
};

inline constexpr size_t kMaxNodes = 1u << 16;  // of one graph; bounds what a file can make the library allocate
inline constexpr uint32_t kMaxCpus = 1u << 16;
inline constexpr size_t kMaxPorts = 256;  // of one NIC

// Checks what every complete graph fulfils: one host that comes first, parents that exist and precede their children,
// unique ids, links between nodes that exist, and finite figures. The error names the node.
Status validate(const Graph& graph);

// Sorts the nodes of a valid graph so that each is followed by all that it contains; children stay in their order.
void order_by_containment(Graph& graph);

// Returns the nodes from a node to the host, both included.
std::vector<const Node*> path_to_host(const Graph& graph, const Node& node);
// Returns the innermost node that contains both.
const Node* common_ancestor(const Graph& graph, const Node& a, const Node& b);
// Returns the nearest node of this kind at or above `node`, or null if there is none.
const Node* enclosing(const Graph& graph, const Node& node, NodeKind kind);

// Returns the groups of GPUs that NVLink joins, directly or through switches; a GPU without NVLink is its own group.
// GPUs are indices into of_kind(kGpu), ascending; groups are in the order of their first GPU.
std::vector<std::vector<uint32_t>> nvlink_islands(const Graph& graph);

const char* kind_name(NodeKind kind);  // "host", "socket", ...
const char* link_name(LinkKind kind);
const char* layer_name(LinkLayer layer);
const char* state_name(PortState state);
// Returns the rate of the NIC's ports that are not down, in GB/s each way; 0: unknown.
double nic_bytes_per_ns(const Node& nic);
bool nic_usable(const Node& nic);  // has a port that is not known to be down
// Removes virtual functions whose physical device is among the NICs: both send over the same wire.
void leave_out_virtual(std::vector<const Node*>& nics);

std::string cpus_text(const Cpus& cpus);  // "0-15,32-47"
// Does the reverse, for at most kMaxCpus processors. Accepts "" (none).
bool parse_cpus(std::string_view text, Cpus* cpus);

// Returns "0000:3b:00.0", in lower case with four digits of domain, or "" for anything else. Also accepts "3b:00.0" and
// "00000000:3B:00.0", which NVML writes.
std::string normal_pci(std::string_view text);

}  // namespace moeccl::topology
