// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>

#include "src/driver/sysfs.h"
#include "topology/contain.h"
#include "topology/probes.h"

namespace moeccl::topology {

namespace {

using driver::Sysfs;

class SysfsProbe {
 public:
  explicit SysfsProbe(const Sysfs& sysfs) : sysfs_(sysfs) {}

  Graph run() {
    processors();
    pci();
    interfaces();
    contain(graph_.nodes, core_cpus_, {});
    return std::move(graph_);
  }

 private:
  Node& start(NodeKind kind, const std::string& id) {
    Node node;
    node.kind = kind;
    node.id = id;
    node.sources = {"sysfs"};
    graph_.nodes.push_back(node);
    return graph_.nodes.back();
  }

  void processors() {
    std::map<int, Cpus> sockets;
    std::map<std::string, uint64_t> caches;
    std::set<std::pair<int, int>> cores;
    // Kernels that know their processors from a device tree number the cores of each cluster from 0.
    const auto first_of_core = [&](const driver::SysfsCpu& c) {
      if (c.first_thread >= 0) return static_cast<uint32_t>(c.first_thread) == c.cpu;
      return c.core < 0 || cores.insert({c.package, c.core}).second;
    };
    for (const driver::SysfsCpu& c : driver::sysfs_cpus(sysfs_)) {
      if (c.package >= 0) sockets[c.package].push_back(c.cpu);
      if (!c.last_cache_cpus.empty()) caches[c.last_cache_cpus] = c.last_cache_bytes;
      if (first_of_core(c)) core_cpus_.push_back(c.cpu);
    }
    start(NodeKind::kHost, "host");
    for (const auto& [number, cpus] : sockets) {
      Node& node = start(NodeKind::kSocket, format("socket:{}", number));
      node.number = number;
      node.cpus = cpus;
    }
    for (const driver::SysfsNuma& domain : driver::sysfs_numa(sysfs_)) {
      Node& node = start(NodeKind::kNuma, format("numa:{}", domain.number));
      node.number = domain.number;
      if (!parse_cpus(domain.cpus, &node.cpus)) node.cpus.clear();
      node.memory_bytes = domain.memory_bytes;
    }
    for (const auto& [text, bytes] : caches) {
      Cpus cpus;
      if (!parse_cpus(text, &cpus) || cpus.empty()) continue;
      Node& node = start(NodeKind::kCache, format("cache:3:{}", cpus[0]));
      node.number = 3;
      node.cpus = cpus;
      node.memory_bytes = bytes;
    }
  }

  static std::string id_of(const std::string& part) {
    return part.starts_with("pci") ? "root:" + part.substr(3) : "pci:" + normal_pci(part);
  }

  // Adds GPUs and NICs with the bridges above them.
  void pci() {
    std::map<std::string, driver::SysfsPciDevice> by_id;
    const auto devices = driver::sysfs_pci_devices(sysfs_);
    for (const driver::SysfsPciDevice& d : devices) by_id[id_of(d.path.back())] = d;
    std::set<std::string> made;
    for (const driver::SysfsPciDevice& d : devices) {
      NodeKind kind;
      if (is_gpu(d.device_class, d.vendor)) {
        kind = NodeKind::kGpu;
      } else if (d.device_class == 0x0200 || d.device_class == 0x0207 || d.device_class == 0x0280) {
        kind = NodeKind::kNic;
      } else {
        continue;
      }
      for (size_t i = 0; i < d.path.size(); ++i) {
        const std::string id = id_of(d.path[i]);
        if (!made.insert(id).second) continue;
        const bool last = i + 1 == d.path.size();
        Node& node = start(last ? kind : i == 0 ? NodeKind::kRoot : NodeKind::kSwitch, id);
        if (i > 0) node.parent = id_of(d.path[i - 1]);
        // The NUMA domain of a root is that of the devices below it.
        if (i == 0 && d.numa >= 0) node.parent = format("numa:{}", d.numa);
        if (const auto it = by_id.find(id); it != by_id.end()) node.uplink.bytes_per_ns = it->second.bytes_per_ns;
        if (last && !d.physical.empty()) node.physical = id_of(d.physical);
      }
    }
  }

  void interfaces() {
    for (const driver::SysfsInterface& i : driver::sysfs_interfaces(sysfs_)) {
      if (i.loopback || i.is_virtual) continue;
      std::string id = "net:" + i.name;
      if (!i.path.empty() && !i.path.back().starts_with("pci")) id = id_of(i.path.back());
      Node* node = graph_.find(id);
      if (node == nullptr) {
        node = &start(NodeKind::kNic, id);
        if (i.numa >= 0) node->parent = format("numa:{}", i.numa);
      }
      if (node->kind != NodeKind::kNic || node->ports.size() >= kMaxPorts) continue;
      // If several interfaces share one port (representors of virtual functions), the first stands for it.
      if (std::any_of(node->ports.begin(), node->ports.end(), [&](const Port& p) { return p.number == i.port; }))
        continue;
      node->os_devices.push_back(i.name);
      Port port;
      port.number = i.port;
      port.interface = i.name;
      port.layer = i.infiniband ? LinkLayer::kInfiniband : LinkLayer::kEthernet;
      port.state = i.state == "down" || i.state == "lowerlayerdown" ? PortState::kDown
                   : i.state == "up"                                ? PortState::kUp
                                                                    : PortState::kUnknown;
      port.gbit = static_cast<double>(i.mbit) / 1000;
      port.mtu_bytes = i.mtu_bytes;
      port.address = i.address;
      node->ports.push_back(port);
    }
  }

  const Sysfs& sysfs_;
  Graph graph_;
  std::vector<uint32_t> core_cpus_;
};

}  // namespace

Result<Graph> probe_sysfs(const ProbeSources& sources) {
  const Sysfs sysfs(sources.sysfs_root);
  if (!sysfs.exists("devices/system/cpu") && !sysfs.exists("class/net") && !sysfs.exists("bus/pci"))
    return error(moecclUnsupported, "{} is not mounted, or a container hides it", sources.sysfs_root);
  return SysfsProbe(sysfs).run();
}

}  // namespace moeccl::topology
