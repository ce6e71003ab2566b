// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "src/driver/ibv.h"
#include "src/driver/sysfs.h"
#include "topology/probes.h"

namespace moeccl::topology {

Result<Graph> probe_verbs(const ProbeSources& sources) {
  MOECCL_ASSIGN_OR_RETURN(const auto devices, driver::list_ibv_devices(sources.ibv_library));
  if (devices.empty()) return error(moecclUnsupported, "libibverbs is here and finds no device");
  const driver::Sysfs sysfs(sources.sysfs_root);
  Graph graph;
  for (const driver::IbvDevice& device : devices) {
    const std::string at = "class/infiniband/" + device.name;
    const std::vector<std::string> path = driver::pci_path(sysfs.real(at + "/device"));
    const std::string pci = path.empty() ? "" : normal_pci(path.back());
    Node node;
    node.kind = NodeKind::kNic;
    node.id = pci.empty() ? "net:" + device.name : "pci:" + pci;  // software devices (rxe, siw) have no PCI address
    node.sources = {"verbs"};
    node.os_devices = {device.name};
    if (const int64_t numa = sysfs.number(at + "/device/numa_node", -1); numa >= 0)
      node.parent = format("numa:{}", numa);
    if (!device.problem.empty()) graph.notes.push_back(device.name + " " + device.problem);
    for (const driver::IbvPort& p : device.ports) {
      if (node.ports.size() >= kMaxPorts) break;
      Port port;
      port.number = p.number;
      port.layer = p.ethernet ? LinkLayer::kEthernet : p.infiniband ? LinkLayer::kInfiniband : LinkLayer::kUnknown;
      port.state = p.active ? PortState::kUp : PortState::kDown;
      port.gbit = p.active ? p.gbit : 0;  // a port that is down reports the slowest rate
      // On Ethernet, verbs tells the size of RDMA's packets, which is at most 4096; sysfs knows the interface's MTU.
      if (!p.ethernet) port.mtu_bytes = p.mtu_bytes;
      // RoCE: the table begins with link-local entries, but a person looks for a routable one (of an IPv4 address).
      const auto routable = std::find_if(p.gids.begin(), p.gids.end(), [](const std::string& gid) {
        return gid.starts_with("0000:0000:0000:0000:0000:ffff");
      });
      port.gid = routable != p.gids.end() ? *routable : p.gids.empty() ? "" : p.gids[0];
      node.ports.push_back(port);
    }
    graph.nodes.push_back(node);
  }
  return graph;
}

}  // namespace moeccl::topology
