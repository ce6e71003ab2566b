// SPDX-License-Identifier: Apache-2.0
#include "topology/doctor.h"

#include <algorithm>
#include <map>

#include "topology/assign.h"
#include "topology/text.h"
#include "topology/tree.h"

namespace moeccl::topology {

namespace {

using driver::HostLimits;
using driver::kUnlimited;

class Findings {
 public:
  explicit Findings(const char* section) : section_(section) {}
  void good(const std::string& what) { all_.push_back({Verdict::kGood, section_, what, ""}); }
  void note(const std::string& what, const std::string& fix) { all_.push_back({Verdict::kNote, section_, what, fix}); }
  void problem(const std::string& what, const std::string& fix) {
    all_.push_back({Verdict::kProblem, section_, what, fix});
  }
  void append_to(std::vector<Finding>& all) const { all.insert(all.end(), all_.begin(), all_.end()); }

 private:
  std::string section_;
  std::vector<Finding> all_;
};

bool told_by(const Node& node, std::string_view source) {
  return std::find(node.sources.begin(), node.sources.end(), source) != node.sources.end();
}

const NetworkFacts* best_of(const std::vector<NetworkFacts>& networks) {
  const auto best = std::find_if(networks.begin(), networks.end(), [](const NetworkFacts& n) { return n.usable; });
  return best == networks.end() ? nullptr : &*best;
}

bool takes_dmabuf(const NetworkFacts& network) {
  return network.usable && network.text.find("dma-buf") != std::string::npos;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

Findings settings(const std::vector<Status>& bad) {
  Findings f("settings");
  for (const Status& s : bad)
    f.problem(s.message(), "correct or unset the variable: no communicator can be made with this value");
  if (bad.empty()) f.good("the MOECCL_ variables are accepted, and the files that they name can be read");
  return f;
}

Findings found(const Discovery& d) {
  Findings f("found");
  const bool gpus = !d.graph.of_kind(NodeKind::kGpu).empty();
  for (const ProbeReport& p : d.probes) {
    if (p.status.ok()) {
      f.good(format("{}: {} ({} things)", p.probe.name, p.probe.gives, p.n_nodes));
      continue;
    }
    const std::string_view name = p.probe.name;
    const std::string what = format("no {}: {}", name, first_line(p.status.message()));
    if (gpus && name == "nvml") {
      f.problem(what + "; CUDA sees GPUs", p.probe.remedy);
    } else {
      f.note(what, p.probe.remedy);
    }
  }
  for (const std::string& note : d.graph.notes) f.note(note, "nothing, unless something below looks wrong");
  return f;
}

std::string size_or_unlimited(uint64_t bytes) { return bytes == kUnlimited ? "unlimited" : bytes_text(bytes); }

Findings limits(const HostLimits& l, const Graph& graph, bool reads_disabled) {
  Findings f("limits");
  if (reads_disabled) {
    f.note("process_vm_readv is switched off by MOECCL_NO_CMA=1: private buffers are copied twice",
           "unset MOECCL_NO_CMA, or take buffers from moecclMemAlloc");
  } else if (l.cma.ok()) {
    f.good("process_vm_readv between processes works: private buffers are copied once");
  } else {
    f.problem(format("{}{}: private buffers are copied twice", l.cma.message(),
                     l.yama_scope > 0 ? format(" (kernel.yama.ptrace_scope is {})", l.yama_scope) : ""),
              l.yama_scope > 0 ? "sysctl kernel.yama.ptrace_scope=0, or take buffers from moecclMemAlloc"
                               : "docker: --cap-add SYS_PTRACE or a seccomp profile that allows process_vm_readv; or "
                                 "take buffers from moecclMemAlloc");
  }
  const bool rdma =
      std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& n) { return told_by(n, "verbs"); });
  if (l.memlock_bytes == kUnlimited || l.memlock_bytes >= l.memory_bytes) {
    f.good("locked memory: " + size_or_unlimited(l.memlock_bytes));
  } else {
    const std::string what = format("locked memory is limited to {}", bytes_text(l.memlock_bytes));
    const char* fix = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1";
    rdma ? f.problem(what + ": RDMA registers all that it sends", fix) : f.note(what + "; only RDMA needs more", fix);
  }
  if (!l.has_shm) {
    f.note("there is no /dev/shm; MoECCL needs none (memfd), other libraries of the job may",
           "mount a tmpfs on /dev/shm");
  } else if (l.shm_bytes < uint64_t{1} << 30) {
    f.note(
        format("/dev/shm has {}; MoECCL needs none (memfd), other libraries of the job may", bytes_text(l.shm_bytes)),
        "docker: --shm-size=8g");
  } else {
    f.good(format("/dev/shm: {} free of {}", bytes_text(l.shm_free_bytes), bytes_text(l.shm_bytes)));
  }
  if (l.cgroup_bytes != kUnlimited && l.cgroup_bytes < l.memory_bytes)
    f.note(format("this control group may use {} of {} memory", bytes_text(l.cgroup_bytes), bytes_text(l.memory_bytes)),
           "raise the container's memory limit if ranks are killed; MOECCL_STAGING_BYTES lowers what each holds");
  const uint64_t files = std::max(l.n_files, std::min(l.n_files_hard, driver::kMostFiles));  // ranks raise it
  if (files < 4096) {
    f.note(format("{} open files are allowed; a rank needs about two for each peer on this host, and each communicator "
                  "up to 16 for each rank of another one, with CUDA memory up to 48",
                  files),
           "raise the hard limit of open files (limits.conf, LimitNOFILE, docker --ulimit nofile)");
  } else {
    f.good(format("open files: {}", files == kUnlimited ? "unlimited" : format("{}", files)));
  }
  if (l.huge_pages_anonymous == "never" || l.huge_pages_anonymous.empty()) {
    f.note(
        "transparent huge pages are off: reads between processes run at about half the rate (8 against 15 GB/s "
        "measured)",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
  } else if (l.huge_page_bytes > driver::kHugePageBytes) {
    f.note(format("a huge page has {} here, MoECCL arranges its memory for {}: buffers below that use small pages",
                  bytes_text(l.huge_page_bytes), bytes_text(driver::kHugePageBytes)),
           "nothing; a kernel with pages of 4 KiB has huge pages of 2 MiB");
  } else {
    f.good(format("transparent huge pages: {} for private memory, {} for shared; {} reserved huge pages",
                  l.huge_pages_anonymous, l.huge_pages_shared.empty() ? "none" : l.huge_pages_shared, l.n_huge_pages));
  }
  return f;
}

void examine_port(Findings& f, const Node& nic, const Port& port) {
  const std::string name = port.interface.empty() ? label(nic) : format("{} {}", label(nic), port.interface);
  const std::string at = nic.ports.size() > 1 ? format("{} port {}", name, port.number) : name;
  if (port.state == PortState::kDown) {
    f.note(at + " is down", "ip link set up, a cable, or the subnet manager (InfiniBand); unused ports may stay so");
    return;
  }
  std::string facts = at + ":";
  if (port.layer != LinkLayer::kUnknown) facts += format(" {}", layer_name(port.layer));
  facts += port.gbit > 0 ? format(" {:g} Gbit/s", port.gbit) : " rate not known";
  if (port.mtu_bytes > 0) facts += format(", mtu {}", port.mtu_bytes);
  if (!port.address.empty()) facts += ", " + port.address;
  const bool fast = port.gbit >= 10 && port.layer == LinkLayer::kEthernet && !port.interface.empty();
  if (nic.uplink.bytes_per_ns > 0 && port.gbit / 8 > nic.uplink.bytes_per_ns * 1.02) {
    f.problem(facts + format("; its PCIe link carries only {}", rate_text(nic.uplink.bytes_per_ns)),
              "put the card into a slot with more lanes, or check its seating (lspci -vv: LnkSta)");
  } else if (fast && port.mtu_bytes > 0 && port.mtu_bytes <= 1500) {
    f.note(facts + ": small for this rate",
           format("ip link set {} mtu 9000, if the switches carry it", port.interface));
  } else if (port.gbit <= 0) {
    f.note(facts + " (virtual machines often do not tell it)",
           "nothing: calibration measures it, or give it in a topology file");
  } else {
    f.good(facts);
  }
}

// Finds what breaks RDMA although the port is active.
void examine_rdma_port(Findings& f, const Node& nic, const Port& port) {
  if (port.state == PortState::kDown) return;
  const std::string at = format("{} port {}", label(nic), port.number);
  const bool ethernet = port.layer == LinkLayer::kEthernet;
  if (port.gid.empty()) {
    f.problem(at + " has no GID: no queue pair can be connected", ethernet
                                                                      ? "give its interface an IP address (ip addr add)"
                                                                      : "look at the subnet manager (sminfo, ibstat)");
  }
  if (ethernet && port.mtu_bytes > 0 && port.mtu_bytes < 4200) {
    f.note(format("{}: an mtu of {} makes RDMA packets smaller than 4096 bytes", at, port.mtu_bytes),
           "ip link set <its interface> mtu 4200 or more on all hosts, if the switches carry it");
  }
  if (port.layer == LinkLayer::kInfiniband) {
    f.note(at + ": adaptive routing may change the order of writes, so signals wait for completions",
           "MOECCL_IB_ADAPTIVE_ROUTING=0 where the fabric routes statically");
  }
}

Findings network(const Graph& graph, const HostLimits& l, const std::vector<NetworkFacts>& networks) {
  Findings f("network");
  const auto nics = graph.of_kind(NodeKind::kNic);
  for (const Node* nic : nics) {
    for (const Port& port : nic->ports) {
      examine_port(f, *nic, port);
      if (told_by(*nic, "verbs")) examine_rdma_port(f, *nic, port);
    }
  }
  const auto best = best_of(networks);
  if (nics.empty() && best != nullptr) {
    f.good(format("no NIC of this machine is visible here; {} runs over {}", best->name, best->text));
  } else if (nics.empty()) {
    f.note("no network interface but loopback: ranks reach this host alone", "attach a network");
  }
  const bool rdma_card = std::any_of(nics.begin(), nics.end(), [](const Node* n) {
    return std::any_of(n->os_devices.begin(), n->os_devices.end(),
                       [](const std::string& d) { return d.starts_with("mlx"); });
  });
  if (rdma_card && !l.infiniband_dev)
    f.problem("there are RDMA devices and no /dev/infiniband",
              "docker: --device /dev/infiniband; host: modprobe ib_uverbs");
  if (!assign_nics(graph).choices.empty() && !graph.of_kind(NodeKind::kGpu).empty()) {
    const NicAssignment a = assign_nics(graph);
    for (size_t i = 0; i < a.choices.size(); ++i) {
      const Distance d = crossing(graph, *a.users[i], *a.nics[a.choices[i].nics[0]]).distance;
      if (d == Distance::kHost)
        f.note(format("{} uses {} across the sockets", label(*a.users[i]), label(*a.nics[a.choices[i].nics[0]])),
               "a NIC on the GPU's own socket would be nearer");
    }
  }
  for (const Node& node : graph.nodes) {
    const bool device = node.kind == NodeKind::kGpu || (node.kind == NodeKind::kNic && node.id.starts_with("pci:"));
    if (device && !place_known(graph, node))
      f.note(format("the kernel does not know the socket of {} (numa_node is -1): NICs are chosen without it",
                    label(node)),
             "update the firmware, or give its place in a topology file (moeccl topo --json)");
  }
  return f;
}

// Reports whether processes that share a GPU take turns on it, as far as files tell.
void multi_process(const driver::Mps& mps, uint32_t n_gpus, uint32_t n_ranks, Findings& f) {
  if (mps.runs()) {
    f.good(
        format("MPS has a control daemon at {}: processes that share a GPU run side by side, and their kernels may "
               "wait for each other",
               mps.directory));
    return;
  }
  if (mps.gone) {
    f.note(format("MPS left pipes at {}, and its daemon is not among the processes here", mps.directory),
           "start nvidia-cuda-mps-control -d again; nothing if it runs outside of this container");
  } else if (mps.named) {
    f.note(format("CUDA_MPS_PIPE_DIRECTORY is {}, and no control daemon has its pipe there", mps.directory),
           "start nvidia-cuda-mps-control -d with the same variable, or unset it");
  } else if (n_ranks > n_gpus) {
    f.note(format("{} ranks on {} GPUs without MPS: processes that share one take turns on it", n_ranks, n_gpus),
           "let ranks that share a GPU be threads of one process, with CUDA_DEVICE_MAX_CONNECTIONS=32, or start "
           "nvidia-cuda-mps-control -d");
  }
}

// takes_dmabuf: the NICs accept dma-buf.
Findings gpus(const Graph& graph, const HostLimits& l, uint32_t n_ranks, bool takes_dmabuf) {
  Findings f("gpus");
  const auto all = graph.of_kind(NodeKind::kGpu);
  if (all.empty()) {
    f.good(l.nvidia_module.empty() ? "no GPU and no NVIDIA driver: the host backend runs, which is complete"
                                   : "no GPU is visible, though the driver is loaded: " + l.nvidia_module);
    if (!l.nvidia_module.empty())
      f.note("the driver sees no GPU for this process", "check CUDA_VISIBLE_DEVICES and --gpus");
    return f;
  }
  for (const Node* gpu : all) f.good(format("{} {}: {}", label(*gpu), gpu->name, bytes_text(gpu->memory_bytes)));
  multi_process(l.mps, static_cast<uint32_t>(all.size()), n_ranks, f);
  const bool rdma =
      std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& n) { return told_by(n, "verbs"); });
  if (rdma && !l.peer_memory && !takes_dmabuf)
    f.note("nvidia_peermem is not loaded and the NICs take no dma-buf: RDMA of CUDA memory goes through host memory",
           "modprobe nvidia_peermem");
  return f;
}

// Groups the pairs that have the same answer: "3 of 6 pairs, such as 0 and 1".
std::string pairs_text(const DoctorFacts& facts) {
  const Graph& graph = facts.discovery->graph;
  const std::vector<Seat> seats = default_seats(graph, 0, facts.n_ranks);
  if (seats.size() < 2) return "  one rank: no pairs here\n";
  if (seats.size() > 1024) return "  more than 1024 ranks on one host: not listed\n";
  const auto islands = nvlink_islands(graph);
  const auto all = graph.of_kind(NodeKind::kGpu);
  std::map<std::string, size_t> island_of;
  for (size_t i = 0; i < islands.size(); ++i)
    for (const uint32_t g : islands[i]) island_of[all[g]->id] = i;
  struct Group {
    size_t n = 0;
    std::pair<size_t, size_t> example;
  };
  std::map<std::pair<std::string, std::string>, Group> groups;
  for (size_t a = 0; a < seats.size(); ++a)
    for (size_t b = a + 1; b < seats.size(); ++b) {
      PairFacts pair;
      pair.path.reads_allowed = facts.limits->cma.ok() && !facts.reads_disabled;
      const auto x = island_of.find(seats[a].node), y = island_of.find(seats[b].node);
      pair.gpus = x != island_of.end() && y != island_of.end();
      pair.same_gpu = pair.gpus && seats[a].node == seats[b].node;
      pair.nvlink = pair.gpus && x->second == y->second && !pair.same_gpu;
      for (const Link& link : graph.links)
        if (link.kind == LinkKind::kPeer && ((link.a == seats[a].node && link.b == seats[b].node) ||
                                             (link.a == seats[b].node && link.b == seats[a].node)))
          pair.peer_access = true;
      const TransportChoice choice = choose_transport(pair);
      Group& group = groups[{choice.transport, choice.why_not_better}];
      if (group.n++ == 0) group.example = {a, b};
    }
  const size_t n_pairs = seats.size() * (seats.size() - 1) / 2;
  std::string text;
  for (const auto& [answer, group] : groups) {
    const std::string which = n_pairs == 1         ? "the only pair"
                              : group.n == n_pairs ? format("all {} pairs", n_pairs)
                                                   : format("{} of {} pairs, such as {} and {}", group.n, n_pairs,
                                                            group.example.first, group.example.second);
    text += format("  {}: {}\n", which, answer.first);
    if (!answer.second.empty()) text += format("        not better because {}\n", answer.second);
  }
  return text;
}

}  // namespace

TransportChoice choose_transport(const PairFacts& facts) {
  TransportChoice choice;
  switch (path_between(facts.path)) {
    case PairPath::kThreads:
      choice.transport = "direct access: threads of one process";
      break;
    case PairPath::kReads:
      choice.transport = "shared memory, and process_vm_readv for private buffers (one copy)";
      choice.why_not_better = "only ranks that are threads of one process, or buffers of moecclMemAlloc, need no copy";
      break;
    case PairPath::kStaging:
      choice.transport = "shared memory with staging (two copies)";
      choice.why_not_better =
          "process_vm_readv is not allowed, see limits; buffers of moecclMemAlloc are reached without it";
      break;
    case PairPath::kNetwork:
      choice.transport = facts.network.empty() ? "no network" : facts.network;
      break;
  }
  if (!facts.gpus) return choice;
  const auto also = [&choice](const char* why) {
    choice.why_not_better += (choice.why_not_better.empty() ? "" : "; ") + std::string("CUDA memory: ") + why;
  };
  if (!facts.path.same_host) {
    if (facts.network.empty()) return choice;
    if (!facts.gpudirect.empty()) {
      choice.transport += format(" (CUDA memory directly, by {}, where the GPU allows it)", facts.gpudirect);
    } else {
      choice.transport += " (CUDA memory through page-locked memory of both hosts)";
      also("no NIC of this network reaches it by dma-buf or nvidia-peermem");
    }
  } else if (facts.same_gpu || facts.nvlink || facts.peer_access) {
    choice.transport += format("; CUDA memory: each other's device memory, {}", facts.same_gpu ? "on one GPU"
                                                                                : facts.nvlink ? "over NVLink"
                                                                                               : "over PCIe");
  } else {
    choice.transport += "; CUDA memory: staged in page-locked host memory";
    also("the driver allows no peer access between them");
  }
  return choice;
}

std::vector<Finding> examine(const DoctorFacts& facts) {
  std::vector<Finding> all;
  const Graph& graph = facts.discovery->graph;
  settings(facts.bad_settings).append_to(all);
  found(*facts.discovery).append_to(all);
  limits(*facts.limits, graph, facts.reads_disabled).append_to(all);
  network(graph, *facts.limits, facts.networks).append_to(all);
  gpus(graph, *facts.limits, facts.n_ranks, std::any_of(facts.networks.begin(), facts.networks.end(), takes_dmabuf))
      .append_to(all);
  return all;
}

std::string doctor_page(const DoctorFacts& facts) {
  const Graph& graph = facts.discovery->graph;
  const Node& host = graph.nodes[0];
  std::string text =
      format("MoECCL doctor: {}, {} core{} ({} usable processors), {} memory, Linux {}\n",
             host.name.empty() ? "this host" : "host " + host.name, host.n_cores, host.n_cores == 1 ? "" : "s",
             facts.limits->n_usable_cpus, bytes_text(facts.limits->memory_bytes), facts.limits->kernel);
  std::string section;
  size_t n_problems = 0, n_notes = 0;
  for (const Finding& f : examine(facts)) {
    if (f.section != section) text += (section = f.section) + "\n";
    n_problems += f.verdict == Verdict::kProblem;
    n_notes += f.verdict == Verdict::kNote;
    text += format("  {:5} {}\n",
                   f.verdict == Verdict::kGood   ? "ok"
                   : f.verdict == Verdict::kNote ? "note"
                                                 : "BAD",
                   f.what);
    if (!f.fix.empty()) text += format("        fix: {}\n", f.fix);
  }
  text += format("transports of {} ranks, a process each\n", default_seats(graph, 0, facts.n_ranks).size());
  text += pairs_text(facts);
  const bool has_gpus = !graph.of_kind(NodeKind::kGpu).empty();
  const NetworkFacts* best = best_of(facts.networks);
  PairFacts pair;
  pair.path.same_host = false;
  pair.gpus = has_gpus;
  if (best != nullptr) {
    pair.network = format("{} over {}", best->name, best->text);
    if (takes_dmabuf(*best)) {
      pair.gpudirect = "dma-buf";
    } else if (best->device_memory && facts.limits->peer_memory) {
      pair.gpudirect = "nvidia-peermem";
    }
  }
  const TransportChoice away = choose_transport(pair);
  text += format("  ranks of other hosts: {}\n", away.transport);
  if (!away.why_not_better.empty()) text += format("        not better because {}\n", away.why_not_better);
  if (best != nullptr && !best->can.empty()) text += format("        {}: {}\n", best->name, best->can);
  for (const NetworkFacts& n : facts.networks)
    if (!n.usable) text += format("        not {}: {}\n", n.name, n.text);
  text += format("{} problem{}, {} note{}\n", n_problems, n_problems == 1 ? "" : "s", n_notes, n_notes == 1 ? "" : "s");
  return text;
}

}  // namespace moeccl::topology
