// SPDX-License-Identifier: Apache-2.0
#include "topology/merge.h"

#include <gtest/gtest.h>

#include "topology/json.h"
#include "topology/synthetic.h"
#include "topology/text.h"
#include "topology/tree.h"

namespace moeccl::topology {
namespace {

Node node(NodeKind kind, const std::string& id, const std::string& parent, const std::string& source) {
  Node n;
  n.kind = kind;
  n.id = id;
  n.parent = parent;
  n.sources = {source};
  return n;
}

Graph merged(const std::vector<Graph>& parts) {
  const auto graph = merge(parts);
  EXPECT_TRUE(graph.ok()) << graph.status().message();
  return graph.ok() ? graph.value() : Graph();
}

TEST(Merge, NothingGivesABareHost) {
  const Graph graph = merged({});
  ASSERT_EQ(graph.nodes.size(), 1u);
  EXPECT_EQ(graph.nodes[0].kind, NodeKind::kHost);
}

// hwloc knows the switch, verbs the port's rate and the NUMA domain, sysfs the interface. Together they are one NIC.
TEST(Merge, ProbesMeetAtPciAddresses) {
  Graph hwloc, verbs, sysfs;
  hwloc.nodes = {node(NodeKind::kNuma, "numa:0", "host", "hwloc"),
                 node(NodeKind::kSwitch, "pci:0000:16:00.0", "numa:0", "hwloc"),
                 node(NodeKind::kGpu, "pci:0000:18:00.0", "pci:0000:16:00.0", "hwloc"),
                 node(NodeKind::kNic, "pci:0000:17:00.0", "pci:0000:16:00.0", "hwloc")};
  verbs.nodes = {node(NodeKind::kNic, "pci:0000:17:00.0", "numa:0", "verbs")};
  verbs.nodes[0].os_devices = {"mlx5_0"};
  verbs.nodes[0].ports = {{.number = 1, .layer = LinkLayer::kInfiniband, .state = PortState::kUp, .gbit = 400}};
  sysfs.nodes = {node(NodeKind::kNic, "pci:0000:17:00.0", "", "sysfs")};
  sysfs.nodes[0].ports = {{.number = 1, .interface = "ib0", .mtu_bytes = 4092}};
  for (const auto& parts : {std::vector<Graph>{hwloc, verbs, sysfs}, {sysfs, verbs, hwloc}, {verbs, hwloc, sysfs}}) {
    const Graph graph = merged(parts);
    const Node* nic = graph.find("pci:0000:17:00.0");
    ASSERT_NE(nic, nullptr);
    EXPECT_EQ(nic->parent, "pci:0000:16:00.0");
    ASSERT_EQ(nic->ports.size(), 1u);
    EXPECT_EQ(nic->ports[0].interface, "ib0");
    EXPECT_DOUBLE_EQ(nic->ports[0].gbit, 400);
    EXPECT_EQ(nic->ports[0].mtu_bytes, 4092u);
    EXPECT_EQ(nic->sources.size(), 3u);
    EXPECT_TRUE(graph.notes.empty());
  }
}

TEST(Merge, ContradictionsAreToldAndTheFirstStays) {
  Graph a, b;
  a.nodes = {node(NodeKind::kNic, "net:eth0", "", "sysfs"), node(NodeKind::kGpu, "pci:0000:01:00.0", "numa:0", "hwloc"),
             node(NodeKind::kNuma, "numa:0", "", "hwloc"), node(NodeKind::kNuma, "numa:1", "", "hwloc")};
  b = a;
  a.nodes[0].ports = {{.gbit = 10}};
  b.nodes[0].ports = {{.gbit = 25}};
  a.nodes[1].memory_bytes = 80;
  b.nodes[1].memory_bytes = 40;
  b.nodes[1].parent = "numa:1";
  const Graph graph = merged({a, b});
  EXPECT_DOUBLE_EQ(graph.find("net:eth0")->ports[0].gbit, 10);
  EXPECT_EQ(graph.find("pci:0000:01:00.0")->memory_bytes, 80u);
  EXPECT_EQ(graph.find("pci:0000:01:00.0")->parent, "numa:0");
  ASSERT_EQ(graph.notes.size(), 3u);
  EXPECT_EQ(graph.notes[0], "net:eth0 port 1 runs at 10 Gbit/s for sysfs and at 25 for sysfs: the first is used");
}

TEST(Merge, CirclesAndOrphansHangOnTheHost) {
  Graph a;
  a.nodes = {node(NodeKind::kSwitch, "pci:0000:01:00.0", "pci:0000:02:00.0", "x"),
             node(NodeKind::kSwitch, "pci:0000:02:00.0", "pci:0000:01:00.0", "x"),
             node(NodeKind::kGpu, "pci:0000:03:00.0", "pci:0000:01:00.0", "x"),
             node(NodeKind::kGpu, "pci:0000:04:00.0", "pci:0000:99:00.0", "x")};
  const Graph graph = merged({a});
  EXPECT_TRUE(validate(graph).ok());
  EXPECT_EQ(graph.find("pci:0000:04:00.0")->parent, "host");
  EXPECT_FALSE(graph.notes.empty());
}

TEST(Merge, GpusAreNumbered) {
  Graph a;
  a.nodes = {node(NodeKind::kGpu, "pci:0000:30:00.0", "", "x"), node(NodeKind::kGpu, "pci:0000:10:00.0", "", "x")};
  Graph graph = merged({a});
  EXPECT_EQ(graph.find("pci:0000:10:00.0")->number, 0);
  EXPECT_EQ(graph.find("pci:0000:30:00.0")->number, 1);
  a.nodes[0].number = 0;  // NVML's numbers are kept
  a.nodes[1].number = 1;
  graph = merged({a});
  EXPECT_EQ(graph.of_kind(NodeKind::kGpu)[0]->id, "pci:0000:30:00.0");
}

TEST(Graph, PciAddressesInOneForm) {
  EXPECT_EQ(normal_pci("0000:3b:00.0"), "0000:3b:00.0");
  EXPECT_EQ(normal_pci("00000000:3B:00.0"), "0000:3b:00.0");
  EXPECT_EQ(normal_pci("3b:00.0"), "0000:3b:00.0");
  EXPECT_EQ(normal_pci("10000:01:00.0"), "10000:01:00.0");  // VMD domains have five digits
  for (const char* bad :
       {"", "3b", "3b:00", ":00.0", "0000:3b:20.0", "0000:3b:00.8", "0000:100:00.0", "x:3b:00.0", "3b:00."})
    EXPECT_EQ(normal_pci(bad), "") << bad;
}

// Two boards of switches, as in a DGX-2. No driver reports the links between the boards.
TEST(Graph, SwitchesOfAHostAreOneFabric) {
  Graph a;
  for (int board = 0; board < 2; ++board) {
    const std::string fabric = "pci:0000:6" + std::to_string(board) + ":00.0";
    a.nodes.push_back(node(NodeKind::kNvSwitch, fabric, "", "x"));
    for (int g = 0; g < 2; ++g) {
      const std::string gpu = "pci:0000:" + std::to_string(board) + std::to_string(g) + ":00.0";
      a.nodes.push_back(node(NodeKind::kGpu, gpu, "", "x"));
      a.links.push_back({gpu, fabric, LinkKind::kNvlink, 6, {0, 150}, {"x"}});
    }
  }
  a.nodes.push_back(node(NodeKind::kGpu, "pci:0000:99:00.0", "", "x"));  // on no switch
  EXPECT_EQ(nvlink_islands(merged({a})), (std::vector<std::vector<uint32_t>>{{0, 1, 2, 3}, {4}}));
}

// An idle GPU's link looks slow in the PCI tree, and so does its port.
TEST(Merge, NvmlKnowsWhatAnIdleLinkCanDo) {
  Graph hwloc, nvml;
  hwloc.nodes = {node(NodeKind::kSwitch, "pci:0000:16:00.0", "host", "hwloc"),
                 node(NodeKind::kGpu, "pci:0000:18:00.0", "pci:0000:16:00.0", "hwloc")};
  hwloc.nodes[0].uplink.bytes_per_ns = hwloc.nodes[1].uplink.bytes_per_ns = 3.9;
  EXPECT_DOUBLE_EQ(merged({hwloc}).find("pci:0000:18:00.0")->uplink.bytes_per_ns, 3.9);
  nvml.nodes = {node(NodeKind::kGpu, "pci:0000:18:00.0", "", "nvml")};
  nvml.nodes[0].uplink.bytes_per_ns = 31.5;
  EXPECT_DOUBLE_EQ(merged({hwloc, nvml}).find("pci:0000:18:00.0")->uplink.bytes_per_ns, 31.5);
}

TEST(Graph, ProcessorSets) {
  Cpus cpus;
  for (const char* text : {"", "0", "0-3", "0-3,8-11,64", "1,3,5"}) {
    ASSERT_TRUE(parse_cpus(text, &cpus)) << text;
    EXPECT_EQ(cpus_text(cpus), text);
  }
  for (const char* bad : {",", "1,", "-1", "2-1", "1,1", "3,2", "a", "0-99999999"})
    EXPECT_FALSE(parse_cpus(bad, &cpus)) << bad;
}

// GPUs and sockets of a file need no numbers, and a host's nodes may stand in any order that begins with the parents.
TEST(Json, NodesArePrintedWhereTheyBelong) {
  const auto hosts = read_json(R"({"moeccl_topology": 1, "hosts": [{"nodes": [
    {"id": "host", "kind": "host"},
    {"id": "socket:0", "kind": "socket", "parent": "host"}, {"id": "socket:1", "kind": "socket", "parent": "host"},
    {"id": "a", "kind": "gpu", "parent": "socket:0"}, {"id": "b", "kind": "gpu", "parent": "socket:1"},
    {"id": "c", "kind": "gpu", "parent": "socket:0"}, {"id": "fabric", "kind": "nvswitch", "parent": "host"}],
    "links": [{"kind": "nvlink", "a": "a", "b": "fabric", "bandwidth": 100},
              {"kind": "nvlink", "a": "b", "b": "fabric", "bandwidth": 200}]}]})",
                               "f.json");
  ASSERT_TRUE(hosts.ok()) << hosts.status().message();
  const std::string text = to_text(*hosts);
  EXPECT_EQ(text.substr(0, text.find("levels")),
            "host\n"
            "  socket:0\n"
            "    gpu a\n"
            "    gpu c\n"
            "  socket:1\n"
            "    gpu b\n"
            "  nvswitch fabric\n"
            "links\n"
            "  nvlink gpu a - 1 nvswitch 100 GB/s\n"
            "  nvlink gpu b - 1 nvswitch 200 GB/s\n"
            "nvlink islands of gpus {a b}\n");
}

TEST(Text, ANicIsNamedByItsDeviceAndElseByItsFirstInterface) {
  Node nic = node(NodeKind::kNic, "pci:0000:17:00.0", "host", "sysfs");
  nic.os_devices = {"ens1", "ens1d1"};
  nic.ports = {{.number = 1, .interface = "ens1"}, {.number = 2, .interface = "ens1d1"}};
  EXPECT_EQ(label(nic), "nic ens1");
  nic.os_devices.push_back("mlx4_0");
  EXPECT_EQ(label(nic), "nic mlx4_0");
}

// The file that a person writes for machines that are not here: two kinds of hosts, three hosts in all.
TEST(Json, HostsAreCounted) {
  const std::string host = R"({"id": "host", "kind": "host", "name": "big", "bandwidth": 50, "latency": 2000})";
  const auto gpu = [](int i) {
    return R"({"id": "pci:0000:0)" + std::to_string(i) + R"(:00.0", "kind": "gpu", "parent": "host", "number": )" +
           std::to_string(i) + R"(, "bandwidth": 25})";
  };
  const std::string text = R"({"moeccl_topology": 1, "units": {"bandwidth": "GB/s", "latency": "ns"}, "hosts": [
    {"count": 2, "nodes": [)" +
                           host + "," + gpu(0) + "," + gpu(1) + "]}, {\"nodes\": [" + host + "," + gpu(0) + "]}]}";
  const auto hosts = read_json(text, "cluster.json");
  ASSERT_TRUE(hosts.ok()) << hosts.status().message();
  ASSERT_EQ(hosts.value().size(), 3u);
  const auto tree = level_tree(hosts.value());
  ASSERT_TRUE(tree.ok()) << tree.status().message();
  EXPECT_EQ(tree.value().n_ranks, 5u);
  EXPECT_EQ(tree.value().levels[0].name, "host");
  EXPECT_DOUBLE_EQ(tree.value().levels[0].link.bytes_per_ns, 50);
  EXPECT_DOUBLE_EQ(tree.value().levels[0].link.alpha_ns, 2000);
  EXPECT_DOUBLE_EQ(tree.value().levels[1].link.bytes_per_ns, 25);
  EXPECT_NE(to_text(hosts.value()).find("hosts 0 to 1 of 3\nhost big: network 50 GB/s\n"), std::string::npos)
      << to_text(hosts.value());
}

std::string levels_over(const std::vector<std::string>& hosts, const std::vector<uint32_t>& host_of) {
  std::vector<plan::LevelTree> trees;
  for (const std::string& host : hosts) trees.push_back(*parse_synthetic(host, 0));
  const auto tree = over_hosts(trees, host_of);
  return tree.ok() ? to_synthetic(*tree) : tree.status().message();
}

TEST(Tree, HostsThatAreAlikeKeepTheirLevels) {
  EXPECT_EQ(levels_over({"socket:2(bw=20GB/s) rank:2", "socket:2(bw=10GB/s) rank:1+3"}, {0, 0, 0, 0, 1, 1, 1, 1}),
            "host:2 socket:2(bw=10GB/s) rank:2+2+1+3");
  EXPECT_EQ(levels_over({"socket:2 rank:1", "socket:2 rank:1"}, {0, 1, 0, 1}), "host:2[0,2 1,3] socket:2 rank:1");
  EXPECT_EQ(levels_over({"rank:2", "rank:1"}, {0, 0, 1}), "host:2 rank:2+1");
  EXPECT_EQ(levels_over({"rank:1", "rank:1"}, {0, 1}), "host:2 rank:1");
  EXPECT_EQ(levels_over({"socket:2 rank:2"}, {0, 0, 0, 0}), "socket:2 rank:2") << "one host";
}

TEST(Tree, HostsThatDifferAreToldApartOnly) {
  EXPECT_EQ(levels_over({"socket:2 rank:2", "rank:2"}, {0, 0, 0, 0, 1, 1}), "host:2 rank:4+2");
  EXPECT_EQ(levels_over({"socket:2 rank:2", "numa:2 rank:2"}, {0, 0, 0, 0, 1, 1, 1, 1}), "host:2 rank:4");
  EXPECT_NE(levels_over({"rank:2", "rank:2"}, {0, 1, 1}).find("the levels of host 0 are of 2 ranks, it has 1"),
            std::string::npos);
}

TEST(Tree, SeatsMustExist) {
  const Graph graph = merged({});
  const Seat wrong[] = {{0, "pci:0000:01:00.0"}};
  const auto tree = level_tree({&graph, 1}, wrong);
  ASSERT_FALSE(tree.ok());
  EXPECT_NE(tree.status().message().find("rank 0 sits on pci:0000:01:00.0 of host 0, which does not exist"),
            std::string::npos);
  EXPECT_FALSE(level_tree({&graph, 1}, std::span<const Seat>{}).ok());
}

}  // namespace
}  // namespace moeccl::topology
