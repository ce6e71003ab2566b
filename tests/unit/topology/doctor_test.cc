// SPDX-License-Identifier: Apache-2.0
#include "topology/doctor.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/unit/topology/fixture.h"
#include "topology/svg.h"
#include "topology/xml.h"

namespace moeccl::topology {
namespace {

driver::HostLimits good_limits() {
  driver::HostLimits l;
  l.kernel = "6.1.0";
  l.n_usable_cpus = 8;
  l.memory_bytes = uint64_t{64} << 30;
  l.has_shm = true;
  l.shm_bytes = l.shm_free_bytes = uint64_t{32} << 30;
  l.memlock_bytes = driver::kUnlimited;
  l.n_files = l.n_files_hard = 1 << 20;
  l.huge_pages_anonymous = "madvise";
  l.nvidia_module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54";
  l.peer_memory = l.infiniband_dev = true;
  return l;
}

const Finding* find(const std::vector<Finding>& all, const std::string& what) {
  for (const Finding& f : all)
    if (f.what.find(what) != std::string::npos) return &f;
  return nullptr;
}

TEST(Doctor, SettingsWithWhichNoCommunicatorCanBeMadeAreProblems) {
  Discovery d;
  d.graph = fixture("this_machine");
  const driver::HostLimits l = good_limits();
  DoctorFacts facts{&d, &l, 8, false};
  EXPECT_EQ(find(examine(facts), "MOECCL_ variables are accepted")->verdict, Verdict::kGood);
  facts.bad_settings = {error(moecclInvalidArgument, "MOECCL_DEBUG: \"foo\" is not accepted")};
  const std::vector<Finding> all = examine(facts);
  const Finding* const bad = find(all, "MOECCL_DEBUG");
  ASSERT_NE(bad, nullptr);
  EXPECT_EQ(bad->verdict, Verdict::kProblem);
  EXPECT_EQ(bad->section, "settings");
  EXPECT_NE(doctor_page(facts).find("settings\n  BAD   MOECCL_DEBUG: \"foo\" is not accepted"), std::string::npos);
}

TEST(Doctor, EachProblemHasItsFix) {
  Discovery d;
  d.graph = fixture("shared_nics");
  d.graph.nodes[0].sources = {"hwloc"};
  for (Node& node : d.graph.nodes)
    if (node.kind == NodeKind::kNic) node.sources.push_back("verbs");
  driver::HostLimits l = good_limits();
  l.cma = system_error("process_vm_readv between sibling processes", EPERM);
  l.yama_scope = 1;
  l.memlock_bytes = 64 << 10;
  l.shm_bytes = 64 << 20;
  l.n_files = 256;
  l.n_files_hard = 1024;
  l.cgroup_bytes = 4 << 20;
  l.huge_pages_anonymous = "never";
  l.infiniband_dev = l.peer_memory = false;
  l.nvidia_module.clear();
  const DoctorFacts facts{&d, &l, 8, false};
  const std::vector<Finding> all = examine(facts);
  const std::pair<const char*, const char*> expected[] = {
      {"kernel.yama.ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"},
      {"locked memory is limited to 64 KiB", "ulimit -l unlimited"},
      {"/dev/shm has 64 MiB", "--shm-size"},
      {"1024 open files", "hard limit"},
      {"control group may use 4 MiB", "memory limit"},
      {"huge pages are off", "transparent_hugepage/enabled"},
      {"no /dev/infiniband", "modprobe ib_uverbs"},
      {"nvidia_peermem is not loaded", "modprobe nvidia_peermem"},
      {"across the sockets", "nearer"},
  };
  for (const auto& [what, fix] : expected) {
    const Finding* f = find(all, what);
    ASSERT_NE(f, nullptr) << what;
    EXPECT_NE(f->verdict, Verdict::kGood) << what;
    EXPECT_NE(f->fix.find(fix), std::string::npos) << f->fix;
  }
  for (const Finding& f : all) EXPECT_EQ(f.fix.empty(), f.verdict == Verdict::kGood) << f.what;
  const std::string page = doctor_page(facts);
  EXPECT_NE(page.find("  BAD   "), std::string::npos);
  EXPECT_NE(
      page.find("28 pairs: shared memory with staging (two copies); CUDA memory: staged in page-locked host memory"),
      std::string::npos)
      << page;
}

TEST(Doctor, SaysWhetherProcessesShareAGpu) {
  Discovery d;
  d.graph = fixture("shared_nics");
  driver::HostLimits l = good_limits();
  const auto n_gpus = static_cast<uint32_t>(d.graph.of_kind(NodeKind::kGpu).size());
  const auto says = [&](uint32_t n_ranks, const char* what, Verdict verdict) {
    const auto all = examine({&d, &l, n_ranks, false});
    const Finding* f = find(all, what);
    ASSERT_NE(f, nullptr) << what;
    EXPECT_EQ(f->verdict, verdict) << what;
  };
  EXPECT_EQ(find(examine({&d, &l, n_gpus, false}), "MPS"), nullptr);
  says(2 * n_gpus, "take turns on it", Verdict::kNote);
  l.mps = {"/tmp/mine", true, false, false};
  says(n_gpus, "CUDA_MPS_PIPE_DIRECTORY is /tmp/mine, and no control daemon", Verdict::kNote);
  l.mps = {"/tmp/mine", true, true, true};
  says(n_gpus, "its daemon is not among the processes here", Verdict::kNote);
  l.mps = {"/tmp/mine", true, true, false};
  says(2 * n_gpus, "MPS has a control daemon at /tmp/mine", Verdict::kGood);
}

TEST(Doctor, FindsTheMpsDaemonByItsPipe) {
  const std::string root = ::testing::TempDir() + "moeccl-mps-" + std::to_string(getpid());
  std::filesystem::create_directories(root + "/pipes");
  setenv("CUDA_MPS_PIPE_DIRECTORY", "/pipes", 1);
  driver::Mps mps = driver::find_mps(root);
  EXPECT_TRUE(mps.named);
  EXPECT_FALSE(mps.runs());
  ASSERT_EQ(mkfifo((root + "/pipes/control").c_str(), 0600), 0);
  EXPECT_TRUE(driver::find_mps(root).runs());
  std::ofstream(root + "/pipes/nvidia-cuda-mps-control.pid") << "4711\n";
  mps = driver::find_mps(root);
  EXPECT_TRUE(mps.gone);
  EXPECT_FALSE(mps.runs());
  std::filesystem::create_directories(root + "/proc/4711");
  EXPECT_TRUE(driver::find_mps(root).runs());
  unsetenv("CUDA_MPS_PIPE_DIRECTORY");
  EXPECT_EQ(driver::find_mps(root).directory, "/tmp/nvidia-mps");
  EXPECT_FALSE(driver::find_mps(root).runs());
  std::filesystem::remove_all(root);
}

TEST(Doctor, PairsGetWhatTheyCan) {
  const auto choose = [](const PathFacts& path) { return choose_transport({.path = path}); };
  EXPECT_EQ(choose({.same_process = true}).transport, "direct access: threads of one process");
  EXPECT_TRUE(choose({.same_process = true}).why_not_better.empty());
  EXPECT_NE(choose({.reads_allowed = true}).transport.find("one copy"), std::string::npos);
  EXPECT_NE(choose({}).transport.find("two copies"), std::string::npos);
  EXPECT_EQ(choose({.same_host = false, .reads_allowed = true}).transport, "no network");
  const auto on_gpus = [](PairFacts facts) {
    facts.gpus = true;
    return choose_transport(facts);
  };
  EXPECT_NE(on_gpus({.path = {}, .nvlink = true}).transport.find("device memory, over NVLink"), std::string::npos);
  EXPECT_NE(on_gpus({.path = {}, .same_gpu = true}).transport.find("device memory, on one GPU"), std::string::npos);
  EXPECT_NE(on_gpus({}).transport.find("staged in page-locked host memory"), std::string::npos);
  EXPECT_NE(on_gpus({}).why_not_better.find("no peer access"), std::string::npos);
  const TransportChoice away = on_gpus({.path = {.same_host = false}, .network = "tcp over eth0"});
  EXPECT_EQ(away.transport, "tcp over eth0 (CUDA memory through page-locked memory of both hosts)");
  EXPECT_NE(away.why_not_better.find("no NIC of this network reaches it"), std::string::npos);
  const TransportChoice direct =
      on_gpus({.path = {.same_host = false}, .network = "verbs over mlx5_0", .gpudirect = "dma-buf"});
  EXPECT_EQ(direct.transport, "verbs over mlx5_0 (CUDA memory directly, by dma-buf, where the GPU allows it)");
  EXPECT_TRUE(direct.why_not_better.empty());
}

TEST(Doctor, NicsThatReachCudaMemoryAreTold) {
  Discovery d;
  d.graph = fixture("shared_nics");
  driver::HostLimits l = good_limits();
  l.peer_memory = false;
  const auto away = [&](const NetworkFacts& network) {
    const std::string page = doctor_page({&d, &l, 8, false, {network}});
    const size_t at = page.find("ranks of other hosts:");
    return page.substr(at, page.find('\n', at) - at);
  };
  const NetworkFacts dmabuf = {"verbs", true, "mlx5_0:1 RoCE v2 10.0.0.1, dma-buf", true};
  const NetworkFacts plain = {"verbs", true, "mlx5_0:1 RoCE v2 10.0.0.1", true}, tcp = {"tcp", true, "eth0"};
  EXPECT_NE(away(dmabuf).find("directly, by dma-buf"), std::string::npos) << away(dmabuf);
  EXPECT_NE(away(plain).find("page-locked memory"), std::string::npos) << away(plain);
  l.peer_memory = true;
  EXPECT_NE(away(plain).find("directly, by nvidia-peermem"), std::string::npos) << away(plain);
  EXPECT_NE(away(tcp).find("page-locked memory"), std::string::npos) << away(tcp);
}

// A container has one end of a veth pair: no device, but a network.
TEST(Doctor, ANetworkWithoutANicIsANetwork) {
  Discovery d;
  d.graph.nodes.emplace_back().id = "host";
  const driver::HostLimits l = good_limits();
  const auto with = examine({&d, &l, 2, false, {{"tcp", true, "eth0 (10 Gbit/s)"}}});
  EXPECT_EQ(find(with, "no network interface"), nullptr);
  ASSERT_NE(find(with, "tcp runs over eth0"), nullptr);
  EXPECT_EQ(find(with, "tcp runs over eth0")->verdict, Verdict::kGood);
  EXPECT_NE(find(examine({&d, &l, 2, false, {{"tcp", false, "only loopback is up"}}}), "no network interface"),
            nullptr);
}

TEST(Doctor, DevicesOfUnknownPlacesAreNoted) {
  Discovery d;
  d.graph = fixture("shared_nics");
  const driver::HostLimits l = good_limits();
  EXPECT_EQ(find(examine({&d, &l, 8, false}), "numa_node is -1"), nullptr);
  const Node* gpu = d.graph.of_kind(NodeKind::kGpu)[0];
  d.graph.find(gpu->id)->parent = "host";
  const auto all = examine({&d, &l, 8, false});
  ASSERT_NE(find(all, "does not know the socket of gpu 0"), nullptr);
  EXPECT_EQ(find(all, "gpu 0 " + gpu->id.substr(4) + " uses"), nullptr) << "nobody knows that it is far";
}

TEST(Doctor, HugePagesOfKernelsWithLargePagesAreNoted) {
  Discovery d;
  d.graph = fixture("sub_numa");
  driver::HostLimits l = good_limits();
  l.huge_page_bytes = 2 << 20;
  EXPECT_EQ(find(examine({&d, &l, 2, false}), "a huge page has"), nullptr);
  l.huge_page_bytes = 512 << 20;
  ASSERT_NE(find(examine({&d, &l, 2, false}), "a huge page has 512 MiB here"), nullptr);
}

TEST(Doctor, SaysHowOtherHostsAreReached) {
  Discovery d;
  d.graph = fixture("sub_numa");
  const driver::HostLimits l = good_limits();
  const std::vector<NetworkFacts> both = {{"verbs", false, "no device"},
                                          {"tcp", true, "eth0 (25 Gbit/s)", false, "can encrypt"}};
  const std::string page = doctor_page({&d, &l, 2, false, both});
  EXPECT_NE(
      page.find(
          "ranks of other hosts: tcp over eth0 (25 Gbit/s)\n        tcp: can encrypt\n        not verbs: no device\n"),
      std::string::npos)
      << page;
  const std::string alone = doctor_page({&d, &l, 2, false, {{"tcp", false, "only loopback is up"}}});
  EXPECT_NE(alone.find("ranks of other hosts: no network\n        not tcp: only loopback is up\n"), std::string::npos)
      << alone;
}

TEST(Doctor, PortsThatCannotRunAtTheirRate) {
  Discovery d;
  d.graph = fixture("sub_numa");
  Node* nic = d.graph.find("pci:0000:19:00.0");
  ASSERT_NE(nic, nullptr);
  nic->ports[0].gbit = 100;  // on a PCIe link of 7.88 GB/s
  nic->ports[0].layer = LinkLayer::kEthernet;
  nic->ports[0].mtu_bytes = 1500;
  const driver::HostLimits l = good_limits();
  const auto slow = examine({&d, &l, 2, false});
  ASSERT_NE(find(slow, "PCIe link carries only 7.88 GB/s"), nullptr);
  EXPECT_EQ(find(slow, "PCIe link carries only")->verdict, Verdict::kProblem);
  nic->ports[0].gbit = 25;
  const auto small = examine({&d, &l, 2, false});
  ASSERT_NE(find(small, "small for this rate"), nullptr);
  EXPECT_NE(find(small, "small for this rate")->fix.find("ip link set eth0 mtu 9000"), std::string::npos);
}

TEST(Doctor, WhatBreaksRdmaOnAnActivePort) {
  Discovery d;
  d.graph = fixture("sub_numa");
  Node* nic = d.graph.find("pci:0000:19:00.0");
  ASSERT_NE(nic, nullptr);
  Port& port = nic->ports[0];
  port.state = PortState::kUp;
  port.layer = LinkLayer::kEthernet;
  port.mtu_bytes = 1500;
  port.gid = "";
  const driver::HostLimits l = good_limits();
  EXPECT_EQ(find(examine({&d, &l, 2, false}), "no GID"), nullptr) << "no RDMA device";
  nic->sources.push_back("verbs");
  const auto broken = examine({&d, &l, 2, false});
  ASSERT_NE(find(broken, "no GID"), nullptr);
  EXPECT_EQ(find(broken, "no GID")->verdict, Verdict::kProblem);
  EXPECT_NE(find(broken, "smaller than 4096 bytes"), nullptr);
  port.gid = "fe80::1";
  port.mtu_bytes = 9000;
  const auto good = examine({&d, &l, 2, false});
  EXPECT_EQ(find(good, "no GID"), nullptr);
  EXPECT_EQ(find(good, "smaller than 4096 bytes"), nullptr);
  EXPECT_EQ(find(good, "adaptive routing"), nullptr);
  port.layer = LinkLayer::kInfiniband;
  const auto infiniband = examine({&d, &l, 2, false});
  ASSERT_NE(find(infiniband, "adaptive routing"), nullptr);
  EXPECT_NE(find(infiniband, "adaptive routing")->fix.find("MOECCL_IB_ADAPTIVE_ROUTING=0"), std::string::npos);
}

// On this machine, whatever it is, the page is complete and the trial of process_vm_readv gives an answer.
TEST(Doctor, ThisHost) {
  const auto& host = discover_host();
  ASSERT_TRUE(host.ok());
  const driver::HostLimits limits = driver::host_limits();
  EXPECT_GT(limits.memory_bytes, 0u);
  EXPECT_GT(limits.n_usable_cpus, 0u);
  EXPECT_GT(limits.n_files, 0u);
  const std::string page = doctor_page({&host.value(), &limits, 4, false});
  for (const char* part :
       {"MoECCL doctor: ", "found\n", "limits\n", "network\n", "gpus\n", "transports of 4 ranks", "notes"})
    EXPECT_NE(page.find(part), std::string::npos) << page;
  EXPECT_NE(page.find(limits.cma.ok() ? "process_vm_readv between processes works" : "process_vm_readv"),
            std::string::npos);
}

TEST(Doctor, LimitsFromAnotherRoot) {
  const driver::HostLimits l = driver::host_limits("/nonexistent");
  EXPECT_EQ(l.yama_scope, -1);
  EXPECT_FALSE(l.has_shm);
  EXPECT_EQ(l.cgroup_bytes, driver::kUnlimited);
}

TEST(Svg, PicturesAreWholeAndSafe) {
  for (const char* name : {"dgx", "two_islands", "this_machine", "sub_numa"}) {
    Graph graph = fixture(name);
    graph.nodes[0].name = "<script>\"&\x01";
    const std::string svg = to_svg({&graph, 1});
    const auto read = parse_xml(svg, "picture.svg");
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_EQ(read.value().name, "svg");
    EXPECT_EQ(svg.find("<script"), std::string::npos);
    size_t n_boxes = 0;
    for (const XmlElement& child : read.value().children) n_boxes += child.name == "rect";
    EXPECT_EQ(n_boxes, graph.nodes.size() + 1) << name;
  }
}

TEST(Svg, ALineLeadsToANicElsewhereOnly) {
  Graph graph = fixture("this_machine");  // one NUMA domain, which holds the NIC
  const auto nic =
      std::find_if(graph.nodes.begin(), graph.nodes.end(), [](const Node& n) { return n.kind == NodeKind::kNic; });
  ASSERT_NE(nic, graph.nodes.end());
  EXPECT_EQ(to_svg({&graph, 1}).find(" uses "), std::string::npos);
  nic->parent = graph.nodes[0].id;
  EXPECT_NE(to_svg({&graph, 1}).find(" uses nic "), std::string::npos);
}

}  // namespace
}  // namespace moeccl::topology
