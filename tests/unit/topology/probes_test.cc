// SPDX-License-Identifier: Apache-2.0
// The probes that use dlopen, run for real with libraries that fake hardware (tests/support/fake_hardware).
#include "topology/probes.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>

#include "src/driver/ibv.h"
#include "src/driver/ibv_abi.h"
#include "tests/unit/topology/fake_machine.h"
#include "tests/unit/topology/fixture.h"
#include "topology/discover.h"
#include "topology/hwloc_xml.h"
#include "topology/merge.h"
#include "topology/synthetic.h"
#include "topology/text.h"
#include "topology/tree.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
// Compares the structures that src/driver/ibv_abi.h redeclares with the real ones.
namespace own_abi = moeccl::driver::ibv_abi;
static_assert(offsetof(ibv_device, name) == offsetof(own_abi::Device, name));
static_assert(offsetof(ibv_device, ibdev_path) == offsetof(own_abi::Device, ibdev_path));
static_assert(sizeof(ibv_device) == sizeof(own_abi::Device));
static_assert(offsetof(ibv_device_attr, phys_port_cnt) == offsetof(own_abi::DeviceAttr, phys_port_cnt));
static_assert(sizeof(ibv_device_attr) == sizeof(own_abi::DeviceAttr));
static_assert(offsetof(ibv_port_attr, active_mtu) == offsetof(own_abi::PortAttr, active_mtu));
static_assert(offsetof(ibv_port_attr, gid_tbl_len) == offsetof(own_abi::PortAttr, gid_tbl_len));
static_assert(offsetof(ibv_port_attr, lid) == offsetof(own_abi::PortAttr, lid));
static_assert(offsetof(ibv_port_attr, active_width) == offsetof(own_abi::PortAttr, active_width));
static_assert(offsetof(ibv_port_attr, active_speed) == offsetof(own_abi::PortAttr, active_speed));
static_assert(offsetof(ibv_port_attr, link_layer) == offsetof(own_abi::PortAttr, link_layer));
static_assert(sizeof(ibv_port_attr) <= sizeof(own_abi::PortAttr));
static_assert(IBV_PORT_ACTIVE == own_abi::kPortActive && IBV_LINK_LAYER_ETHERNET == own_abi::kLayerEthernet);
#endif

namespace moeccl::topology {
namespace {

constexpr const char* kGid = "fe80000000000000b83fd20300000017";
constexpr const char* kRoceGid = "00000000000000000000ffff0a000001";

TEST(VerbsProbe, TellsPortsRatesAndGids) {
  FakeMachine machine;
  machine.infiniband("mlx5_0", "pci0000:16/0000:16:01.0/0000:17:00.0", 0);
  machine.infiniband("mlx5_1", "pci0000:80/0000:81:00.0", 1);
  machine.script(std::string("nic mlx5_0 17; port 4 5 2 128 1; gid ") + kGid +
                 "; nic mlx5_1 81; port 4 5 2 64 2; gid " + kGid + "; gid " + kRoceGid +
                 "; port 1 3 2 1 2; nic rxe0 0; port 4 3 1 1 2");
  const auto graph = probe_verbs(machine.sources());
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  ASSERT_EQ(graph.value().nodes.size(), 3u);
  const Node& first = graph.value().nodes[0];
  EXPECT_EQ(first.id, "pci:0000:17:00.0");
  EXPECT_EQ(first.parent, "numa:0");
  ASSERT_EQ(first.ports.size(), 1u);
  EXPECT_DOUBLE_EQ(first.ports[0].gbit, 400);
  EXPECT_EQ(first.ports[0].layer, LinkLayer::kInfiniband);
  EXPECT_EQ(first.ports[0].state, PortState::kUp);
  EXPECT_EQ(first.ports[0].mtu_bytes, 4096u);
  EXPECT_EQ(first.ports[0].gid, "fe80:0000:0000:0000:b83f:d203:0000:0017");
  const Node& second = graph.value().nodes[1];
  ASSERT_EQ(second.ports.size(), 2u);
  EXPECT_DOUBLE_EQ(second.ports[0].gbit, 200);
  EXPECT_EQ(second.ports[0].layer, LinkLayer::kEthernet);
  EXPECT_EQ(second.ports[0].gid, "0000:0000:0000:0000:0000:ffff:0a00:0001");  // the routable one
  EXPECT_EQ(second.ports[1].state, PortState::kDown);
  EXPECT_DOUBLE_EQ(second.ports[1].gbit, 0);
  EXPECT_EQ(graph.value().nodes[2].id, "net:rxe0");  // a software device has no PCI address
}

TEST(VerbsProbe, AbsenceAndFailuresAreReasons) {
  FakeMachine machine;
  ProbeSources sources = machine.sources();
  machine.script("");
  EXPECT_NE(probe_verbs(sources).status().message().find("finds no device"), std::string::npos);
  machine.script("nic mlx5_0 1; port 4 5 2 128 1; fail ibv_list " + std::to_string(ENOSYS));
  EXPECT_EQ(probe_verbs(sources).status().code(), moecclUnsupported);
  machine.script("nic mlx5_0 1; port 4 5 2 128 1; fail ibv_open " + std::to_string(EACCES));
  const auto closed = probe_verbs(sources);
  ASSERT_TRUE(closed.ok());
  ASSERT_EQ(closed.value().notes.size(), 1u);
  EXPECT_NE(closed.value().notes[0].find("mlx5_0 cannot be opened (Permission denied)"), std::string::npos);
  machine.script("nic mlx5_0 1; port 4 5 2 128 1; fail ibv_query 22");
  EXPECT_TRUE(probe_verbs(sources).value().nodes[0].ports.empty());
  sources.ibv_library = "/nonexistent/libibverbs.so.1";
  EXPECT_NE(probe_verbs(sources).status().message().find("/nonexistent/libibverbs.so.1"), std::string::npos);
  sources.ibv_library = fake_library("nvml");  // a library, but not the right one
  EXPECT_NE(probe_verbs(sources).status().message().find("has no function ibv_get_device_list"), std::string::npos);
}

TEST(VerbsProbe, RatesOfAllGenerations) {
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(2, 128), 400);  // 4x NDR
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(2, 64), 200);   // 4x HDR
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(2, 32), 100);   // 4x EDR
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(2, 16), 56);    // 4x FDR
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(16, 64), 100);  // 2x HDR
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(3, 64), 0);
  EXPECT_DOUBLE_EQ(driver::ibv_gbit(2, 3), 0);
}

TEST(NvmlProbe, PairsOfGpusByDirectLinks) {
  FakeMachine machine;
  machine.script(
      "gpu 0000:1b:00.0 NVIDIA_A100 80 4 16 8; gpu 0000:1c:00.0 NVIDIA_A100 80 4 16 8; gpu 0000:8b:00.0 NVIDIA_A100 80 "
      "4 16 8;"
      "nvlink 0 gpu 0000:1c:00.0 12 4; nvlink 1 gpu 0000:1b:00.0 12 4; p2p 0 1; p2p 0 2");
  const auto graph = probe_nvml(machine.sources());
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  ASSERT_EQ(graph.value().nodes.size(), 3u);
  const Node& gpu = graph.value().nodes[0];
  EXPECT_EQ(gpu.id, "pci:0000:1b:00.0");
  EXPECT_EQ(gpu.name, "NVIDIA A100");
  EXPECT_EQ(gpu.memory_bytes, uint64_t{80} << 30);
  EXPECT_NEAR(gpu.uplink.bytes_per_ns, 31.5, 0.1);  // generation 4, 16 lanes
  ASSERT_EQ(graph.value().links.size(), 2u);
  EXPECT_EQ(graph.value().links[0].kind, LinkKind::kNvlink);
  EXPECT_EQ(graph.value().links[0].count, 12u);  // both ends report them, but they count once
  EXPECT_DOUBLE_EQ(graph.value().links[0].cost.bytes_per_ns, 300);
  EXPECT_EQ(graph.value().links[1].kind, LinkKind::kPeer);
  EXPECT_EQ(graph.value().links[1].b, "pci:0000:8b:00.0");
  const auto whole = merge({graph.value()});
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(nvlink_islands(whole.value()), (std::vector<std::vector<uint32_t>>{{0, 1}, {2}}));
}

TEST(NvmlProbe, SwitchesHereAndElsewhere) {
  FakeMachine machine;
  machine.script(
      "gpu 0000:01:00.0 GB200 186 5 16 10; gpu 0000:02:00.0 GB200 186 5 16 10;"
      "nvlink 0 switch ffff:ff:ff.0 18 7; nvlink 1 switch ffff:ff:ff.0 18 7");
  const auto graph = probe_nvml(machine.sources());
  ASSERT_TRUE(graph.ok());
  EXPECT_NE(graph.value().find("nvswitch"), nullptr);  // of another chassis: no address, but one fabric
  const auto whole = merge({graph.value()});
  EXPECT_EQ(nvlink_islands(whole.value()).size(), 1u);
  const auto tree = level_tree({&whole.value(), 1});
  EXPECT_DOUBLE_EQ(tree.value().levels.back().link.bytes_per_ns, 900);
}

// Versions of NVLink are nvml.h's numbers: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0 and 5.0 are 1 to 7.
TEST(NvmlProbe, RatesFollowTheVersionOfNvlink) {
  struct Case {
    int major, n_links, version;
    double rate;
  };
  for (const Case& c :
       {Case{6, 4, 1, 80}, Case{7, 6, 2, 150}, Case{7, 6, 3, 150}, Case{8, 12, 4, 300}, Case{8, 12, 5, 300},
        Case{9, 18, 6, 450}, Case{9, 18, 7, 450}, Case{10, 18, 7, 900}, Case{10, 18, 8, 0}}) {
    FakeMachine machine;
    const std::string links = std::to_string(c.n_links) + " " + std::to_string(c.version),
                      major = std::to_string(c.major);
    machine.script("gpu 0000:1b:00.0 A 80 5 16 " + major + "; gpu 0000:1c:00.0 A 80 5 16 " + major +
                   "; nvlink 0 gpu 0000:1c:00.0 " + links + "; nvlink 1 gpu 0000:1b:00.0 " + links);
    const auto graph = probe_nvml(machine.sources());
    ASSERT_TRUE(graph.ok()) << graph.status().message();
    ASSERT_EQ(graph.value().links.size(), 1u);
    EXPECT_DOUBLE_EQ(graph.value().links[0].cost.bytes_per_ns, c.rate) << major << ": " << links;
  }
}

TEST(NvmlProbe, AbsenceIsAReason) {
  FakeMachine machine;
  ProbeSources sources = machine.sources();
  machine.script("fail nvml_init 9");
  EXPECT_EQ(probe_nvml(sources).status().message(), "nvmlInit fails: Driver Not Loaded; does nvidia-smi work here?");
  machine.script("");
  EXPECT_NE(probe_nvml(sources).status().message().find("finds no GPU"), std::string::npos);
  sources.nvml_library = "/nonexistent/libnvidia-ml.so.1";
  EXPECT_EQ(probe_nvml(sources).status().code(), moecclUnsupported);
}

TEST(CudaProbe, SeesWhatItMayAndIsAskedOnlyOnRequest) {
  FakeMachine machine;
  machine.script("gpu 0000:1b:00.0 NVIDIA_L4 24 4 8; gpu 0000:1c:00.0 NVIDIA_L4 24 4 8; p2p 0 1");
  ProbeSources sources = machine.sources();
  const auto graph = probe_cuda(sources);
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  EXPECT_EQ(graph.value().nodes.size(), 2u);
  ASSERT_EQ(graph.value().links.size(), 1u);
  EXPECT_EQ(graph.value().links[0].kind, LinkKind::kPeer);
  sources.cuda = false;
  EXPECT_NE(probe_cuda(sources).status().message().find("not asked"), std::string::npos);
  sources.cuda = true;
  machine.script("fail cuda_init 100");
  EXPECT_EQ(probe_cuda(sources).status().message(), "cuInit fails: CUDA_ERROR_NO_DEVICE");
}

void add_processors(FakeMachine& machine) {
  for (int cpu = 0; cpu < 8; ++cpu) machine.cpu(cpu, cpu / 4, cpu % 4, cpu < 4 ? "0-3" : "4-7");
  machine.numa(0, "0-3", 64);
  machine.numa(1, "4-7", 64);
}

// Without hwloc, sysfs alone gives the same tree.
TEST(SysfsProbe, StandsInForHwloc) {
  FakeMachine machine;
  add_processors(machine);
  const std::string up = "pci0000:16/0000:16:00.0/0000:17:00.0/";
  machine.pci("pci0000:16/0000:16:00.0", 0x0604, 0x8086, 0, "16.0 GT/s PCIe", "16");
  machine.pci(up.substr(0, up.size() - 1), 0x0604, 0x1000, 0, "16.0 GT/s PCIe", "16");
  machine.pci(up + "0000:18:00.0", 0x0302, 0x10de, 0, "2.5 GT/s PCIe", "16");  // idle
  machine.pci(up + "0000:19:00.0", 0x0200, 0x15b3, 0, "16.0 GT/s PCIe", "16");
  machine.pci("pci0000:80/0000:81:00.0", 0x0200, 0x8086, 1, "5.0 GT/s PCIe", "4");
  machine.pci("pci0000:80/0000:82:00.0", 0x0300, 0x1a03, 1);  // the graphics chip of a management controller
  machine.interface("eth0", up + "0000:19:00.0", 100000, 9000, "up");
  machine.interface("eno1", "pci0000:80/0000:81:00.0", 10000, 1500, "down");
  machine.interface("lo", "", 0, 65536, "unknown");
  machine.interface("docker0", "", 10000, 1500, "up");
  machine.script("gpu 0000:18:00.0 NVIDIA_A10 24 4 16");
  const auto found = discover(machine.sources());
  ASSERT_TRUE(found.ok()) << found.status().message();
  const std::string text = to_text(found.value().graph);
  EXPECT_EQ(text,
            "host: 8 cores, cpus 0-7\n"
            "  socket 0: 4 cores, cpus 0-3\n"
            "    numa 0: 4 cores, cpus 0-3, 64 GiB\n"
            "      cache L3: cpus 0-3, 32 MiB\n"
            "      switch 0000:17:00.0: PCIe 31.51 GB/s\n"
            "        gpu 0 0000:18:00.0 NVIDIA A10: 24 GiB, PCIe 31.51 GB/s\n"
            "        nic eth0 0000:19:00.0: PCIe 31.51 GB/s, port 1 eth0 Ethernet up 100 Gbit/s mtu 9000\n"
            "  socket 1: 4 cores, cpus 4-7\n"
            "    numa 1: 4 cores, cpus 4-7, 64 GiB\n"
            "      cache L3: cpus 4-7, 32 MiB\n"
            "      nic eno1 0000:81:00.0: PCIe 2 GB/s, port 1 eno1 Ethernet down 10 Gbit/s mtu 1500\n"
            "nics\n"
            "  gpu 0 0000:18:00.0 -> nic eth0 (same PCIe switch, 12.5 GB/s)\n"
            "levels for 1 ranks\n"
            "  rank: 1 group, 31.51 GB/s\n")
      << text;
}

// A NIC with two virtual functions, and a GPU. In a pod that was given one function, the others have no interface.
TEST(SysfsProbe, VirtualFunctionsAreLeftOutBesideTheirDevice) {
  for (const bool pod : {false, true}) {
    FakeMachine machine;
    const std::string up = "pci0000:16/", pf = up + "0000:17:00.0";
    machine.pci(pf, 0x0200, 0x15b3, 0);
    if (!pod) machine.interface("ens1", pf, 100000, 9000, "up");
    for (const std::string v : {"0", "1"}) {
      machine.virtual_function(up + "0000:17:01." + v, pf);
      if (!pod || v == "1") machine.interface("ens1v" + v, up + "0000:17:01." + v, 100000, 9000, "up");
    }
    machine.pci(up + "0000:18:00.0", 0x0302, 0x10de, 0);
    machine.script("gpu 0000:18:00.0 NVIDIA_A10 24 4 16");
    const auto found = discover(machine.sources());
    ASSERT_TRUE(found.ok()) << found.status().message();
    const std::string text = to_text(found->graph);
    EXPECT_NE(text.find("virtual function of pci:0000:17:00.0"), std::string::npos) << text;
    EXPECT_NE(text.find(pod ? "-> nic ens1v1 (same PCIe root, 12.5 GB/s)" : "-> nic ens1 (same PCIe root, 12.5 GB/s)"),
              std::string::npos)
        << text;
    EXPECT_EQ(to_synthetic(*level_tree(std::vector<Graph>(2, found->graph))).substr(0, 17), "rank:2(bw=12.5GB/")
        << text;
  }
}

TEST(SysfsProbe, CoresAreToldApartByTheirThreads) {
  FakeMachine machine;  // two clusters in one package, each of which numbers its cores from 0
  for (int cpu = 0; cpu < 8; ++cpu) {
    machine.cpu(cpu, 0, cpu % 4, "0-7");
    machine.write("devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
                  std::to_string(cpu));
  }
  EXPECT_EQ(merge({*probe_sysfs(machine.sources())})->nodes[0].n_cores, 8u);
  for (int cpu = 0; cpu < 8; ++cpu)
    machine.write("devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list",
                  std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  EXPECT_EQ(merge({*probe_sysfs(machine.sources())})->nodes[0].n_cores, 4u);
}

// verbs tells the size of RDMA's packets, at most 4096; the interface may carry more.
TEST(Probes, TheMtuOfRoceIsItsInterfaces) {
  FakeMachine machine;
  machine.infiniband("mlx5_0", "pci0000:16/0000:17:00.0", 0);
  machine.interface("eth0", "pci0000:16/0000:17:00.0", 100000, 9000, "up");
  machine.script(std::string("nic mlx5_0 17; port 4 5 2 32 2; gid ") + kRoceGid);
  const auto found = discover(machine.sources());
  ASSERT_TRUE(found.ok()) << found.status().message();
  ASSERT_EQ(found->graph.of_kind(NodeKind::kNic).size(), 1u);
  EXPECT_EQ(found->graph.of_kind(NodeKind::kNic)[0]->ports.at(0).mtu_bytes, 9000u) << to_text(found->graph);
}

// A machine with a display chip of AMD, and a container that may use two of four GPUs: the bus shows all of them.
TEST(Discover, GpusWithoutAnAnswerAreNoSeats) {
  FakeMachine machine;
  add_processors(machine);
  machine.pci("pci0000:00/0000:0c:00.0", 0x0300, 0x1002, 0);
  machine.script("");
  auto found = discover(machine.sources());
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_TRUE(found->graph.of_kind(NodeKind::kGpu).empty());
  EXPECT_EQ(default_seats(found->graph, 0, 2)[1].node, "cache:3:4") << "a place of its own";
  ASSERT_EQ(found->graph.notes.size(), 1u);
  EXPECT_EQ(found->graph.notes[0].find("1 GPU is on the PCI bus without an answer from NVML or CUDA, left out: "
                                       "pci:0000:0c:00.0. To use"),
            0u)
      << found->graph.notes[0];
  for (const std::string bus : {"1", "2", "3", "4"})
    machine.pci("pci0000:" + bus + "0/0000:" + bus + "1:00.0", 0x0302, 0x10de, 0);
  // Without NVML, a container has the device files of its GPUs.
  machine.write("proc/driver/nvidia/gpus/0000:11:00.0/information", "Model: NVIDIA A10\nDevice Minor: \t 0\n");
  machine.write("proc/driver/nvidia/gpus/0000:21:00.0/information", "Model: NVIDIA A10\nDevice Minor: \t 1\n");
  machine.write("dev/nvidia1", "");
  found = discover(machine.sources());
  ASSERT_TRUE(found.ok()) << found.status().message();
  ASSERT_EQ(found->graph.of_kind(NodeKind::kGpu).size(), 1u);
  EXPECT_EQ(found->graph.of_kind(NodeKind::kGpu)[0]->id, "pci:0000:21:00.0");
  machine.script("gpu 0000:31:00.0 NVIDIA_A10 24 4 16; gpu 0000:41:00.0 NVIDIA_A10 24 4 16");
  found = discover(machine.sources());
  ASSERT_TRUE(found.ok()) << found.status().message();
  const auto gpus = found->graph.of_kind(NodeKind::kGpu);
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[0]->id, "pci:0000:31:00.0");
  EXPECT_EQ(gpus[0]->number, 0);
  EXPECT_NE(found->graph.notes.at(0).find("3 GPUs are"), std::string::npos) << found->graph.notes[0];
  // A file may be of another machine.
  EXPECT_EQ(fixture("pcie_only").of_kind(NodeKind::kGpu).size(), 4u);
}

// All probes of one DGX-like machine: hwloc's file, and the fakes for data that hwloc cannot know.
TEST(Probes, MergeIntoOneDgx) {
  FakeMachine machine;
  std::string script;
  for (int i = 0; i < 8; ++i) {
    char nic[64], bus[32];
    std::snprintf(bus, sizeof(bus), "0000:%x:00.0", 0x1b + 0x10 * i);
    script += std::string("gpu ") + bus + " NVIDIA_H100_80GB_HBM3 80 5 16; ";
    for (int s = 0; s < 4; ++s) {
      std::snprintf(nic, sizeof(nic), "nvlink %d switch 0000:0%d:00.0 %d 6; ", i, 5 + s, s % 3 == 0 ? 5 : 4);
      script += nic;
    }
    for (int j = 0; j < i; ++j) script += "p2p " + std::to_string(i) + " " + std::to_string(j) + "; ";
    std::snprintf(bus, sizeof(bus), "0000:%x:00.0", 0x1a + 0x10 * i);
    machine.infiniband("mlx5_" + std::to_string(i), std::string("pci0000:") + std::to_string(i) + "/" + bus, i / 4);
    machine.interface("ib" + std::to_string(i), std::string("pci0000:") + std::to_string(i) + "/" + bus, 400000, 4092,
                      "up");
    script += "nic mlx5_" + std::to_string(i) + " 1; port 4 5 2 128 1; gid " + kGid + "; ";
  }
  machine.script(script);
  const ProbeSources sources = machine.sources();
  std::vector<Graph> parts = {fixture_part("dgx")};
  for (const auto probe : {probe_verbs, probe_sysfs, probe_nvml, probe_cuda}) {
    const auto part = probe(sources);
    ASSERT_TRUE(part.ok()) << part.status().message();
    parts.push_back(part.value());
  }
  const auto graph = merge(parts);
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  const std::string file = fixture_folder() + "/dgx_all_probes.txt", text = to_text(graph.value());
  if (std::getenv("MOECCL_TEST_UPDATE") != nullptr) std::ofstream(file) << text;
  EXPECT_EQ(text, read_file(file));
  const std::vector<Graph> two = {graph.value(), graph.value()};
  EXPECT_EQ(to_synthetic(level_tree(two).value()), "host:2(bw=0.4TB/s) rank:8(bw=450GB/s)");
}

TEST(Discover, NothingAtAllIsStillAHost) {
  FakeMachine machine;
  ProbeSources sources = machine.sources();
  machine.script("");
  const auto found = discover(sources);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found.value().graph.nodes.size(), 1u);
  EXPECT_EQ(found.value().probes.size(), 5u);
  for (const ProbeReport& probe : found.value().probes)
    EXPECT_FALSE(probe.status.message().empty()) << probe.probe.name;
}

TEST(Discover, ThisHostIsFoundAndHasLevels) {
  const auto& host = discover_host();
  ASSERT_TRUE(host.ok()) << host.status().message();
  EXPECT_TRUE(validate(host.value().graph).ok());
  EXPECT_GE(host.value().graph.nodes[0].cpus.size(), 1u);
  for (const uint32_t n : {1u, 2u, 5u, 16u}) {
    const auto tree = host_tree(n);
    ASSERT_TRUE(tree.ok()) << tree.status().message();
    EXPECT_EQ(tree.value().n_ranks, n);
  }
}

TEST(Discover, HwlocAndSysfsAgreeOnThisHost) {
  ProbeSources sources;
  const auto hwloc = probe_hwloc(sources), sysfs = probe_sysfs(sources);
  if (!hwloc.ok()) GTEST_SKIP() << hwloc.status().message();
  ASSERT_TRUE(sysfs.ok()) << sysfs.status().message();
  const auto a = merge({hwloc.value()}), b = merge({sysfs.value()});
  for (const NodeKind kind : {NodeKind::kSocket, NodeKind::kGpu}) {
    const auto x = a.value().of_kind(kind), y = b.value().of_kind(kind);
    ASSERT_EQ(x.size(), y.size()) << kind_name(kind);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(x[i]->id, y[i]->id);
  }
  sources.hwloc_library = "/nonexistent/libhwloc.so";
  EXPECT_EQ(probe_hwloc(sources).status().code(), moecclUnsupported);
}

// A machine of one core: PACKAGE is an object around the rest, or nothing.
std::string small_xml(const std::string& package) {
  const std::string sets =
      R"( cpuset="0x00000002" complete_cpuset="0x00000002" nodeset="0x00000001" complete_nodeset="0x00000001")";
  const std::string inner = "<object type=\"NUMANode\" os_index=\"0\"" + sets +
                            R"( gp_index="3" local_memory="1073741824"/>)" + "<object type=\"Core\" os_index=\"1\"" +
                            sets + " gp_index=\"4\"><object type=\"PU\" os_index=\"1\"" + sets +
                            " gp_index=\"5\"/></object>";
  return R"(<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0"><object type="Machine" os_index="0" gp_index="1" allowed_cpuset="0x00000002" allowed_nodeset="0x00000001")" +
         sets + ">" +
         (package.empty() ? inner
                          : "<object type=\"Package\" os_index=\"" + package + "\"" + sets + " gp_index=\"2\">" +
                                inner + "</object>") +
         "</object></topology>\n";
}

// hwloc leaves out processors that a cpuset forbids. sysfs has them, and must not bring them back.
TEST(Discover, ProcessorsAreThoseOfHwloc) {
  if (!probe_hwloc({}).ok()) GTEST_SKIP() << "hwloc is not installed";
  const std::string file = testing::TempDir() + "/moeccl_probes_test.xml";
  std::ofstream(file) << small_xml("7");
  setenv("HWLOC_XMLFILE", file.c_str(), 1);
  const auto found = discover();
  unsetenv("HWLOC_XMLFILE");
  std::remove(file.c_str());
  ASSERT_TRUE(found.ok()) << found.status().message();
  const Graph& graph = found->graph;
  ASSERT_EQ(graph.of_kind(NodeKind::kSocket).size(), 1u) << to_text(graph);
  EXPECT_EQ(graph.of_kind(NodeKind::kSocket)[0]->id, "socket:7");
  EXPECT_TRUE(graph.of_kind(NodeKind::kCache).empty()) << to_text(graph);
  EXPECT_EQ(cpus_text(graph.nodes[0].cpus), "1");
  EXPECT_EQ(graph.nodes[0].n_cores, 1u);
}

// As on some virtual machines: each core is one default rank all the same.
TEST(Discover, CoresCountWithoutSockets) {
  const auto part = read_hwloc_xml(small_xml(""), "small");
  ASSERT_TRUE(part.ok()) << part.status().message();
  EXPECT_EQ(merge({*part})->nodes[0].n_cores, 1u);
  FakeMachine machine;
  for (int cpu = 0; cpu < 4; ++cpu) machine.cpu(cpu, -1, cpu, "0-3");
  const auto sysfs = probe_sysfs(machine.sources());
  ASSERT_TRUE(sysfs.ok()) << sysfs.status().message();
  const auto graph = merge({*sysfs});
  EXPECT_EQ(graph->nodes[0].n_cores, 4u);
  EXPECT_EQ(default_seats(*graph, 0, 0).size(), 4u);
}

TEST(Discover, FilesAndTextsGiveLevels) {
  const std::string folder = fixture_folder();
  EXPECT_EQ(to_synthetic(tree_from_text(folder + "/two_islands.xml", 8).value()), "island:2 rank:4(bw=0.3TB/s)");
  EXPECT_EQ(to_synthetic(tree_from_text("node:2 gpu:4(lat=2us)", 8).value()), "node:2 gpu:4(lat=2us)");
  const Status fewer = tree_from_text(folder + "/two_islands.xml", 8, 2).status();
  EXPECT_NE(fewer.message().find("two_islands.xml describes 1 host, the communicator's ranks are on 2: write "
                                 "\"count\": 2 beside"),
            std::string::npos)
      << fewer.message();
  EXPECT_NE(tree_from_text("/nonexistent.json", 2).status().message().find("/nonexistent.json"), std::string::npos);
  EXPECT_NE(read_source("/dev/null", 0).status().message().find("not a file"), std::string::npos);
  EXPECT_NE(read_source(folder + "/dgx.txt", 0).status().message().find("neither XML"), std::string::npos);
  // A text without a colon is a file, and a file may hold a synthetic text.
  EXPECT_NE(tree_from_text("nosuch", 2).status().message().find("nosuch: cannot be opened: No such file"),
            std::string::npos);
  const std::string path = testing::TempDir() + "levels.txt";
  std::ofstream(path) << "node:2 gpu:4(lat=2us)\n";
  EXPECT_EQ(to_synthetic(tree_from_text(path, 8).value()), "node:2 gpu:4(lat=2us)");
  EXPECT_TRUE(read_source(path, 0)->hosts.empty());
  EXPECT_EQ(read_source(folder + "/two_islands.xml", 0)->hosts.size(), 1U);
}

}  // namespace
}  // namespace moeccl::topology
