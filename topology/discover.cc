// SPDX-License-Identifier: Apache-2.0
#include "topology/discover.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "src/driver/file.h"
#include "src/driver/sysfs.h"
#include "topology/hwloc_xml.h"
#include "topology/json.h"
#include "topology/merge.h"
#include "topology/synthetic.h"
#include "topology/tree.h"

namespace moeccl::topology {

namespace {

// In order of trust. hwloc knows containment best, and sysfs the rates of interfaces. verbs precedes sysfs, because an
// RDMA port's rate is that of the link, while IPoIB's is made up.
constexpr Probe kProbes[] = {
    {"hwloc", probe_hwloc, "sockets, NUMA, caches, PCI tree", "install libhwloc15; sysfs stands in for it"},
    {"verbs", probe_verbs, "RDMA ports, rates, GIDs", "install libibverbs1 and ibverbs-providers, load ib_uverbs"},
    {"sysfs", probe_sysfs, "interfaces, rates, MTU", "mount /sys in the container"},
    {"nvml", probe_nvml, "GPUs, NVLink, peer access",
     "for NVIDIA GPUs: install their driver; in a container use NVIDIA's runtime (--gpus all)"},
    {"cuda", probe_cuda, "GPUs as CUDA sees them", "for NVIDIA GPUs: install their driver"},
};

bool told_by_bus(const Node& node) {
  return std::any_of(node.sources.begin(), node.sources.end(),
                     [](const std::string& source) { return source == "hwloc" || source == "sysfs"; });
}

// hwloc lists what this process may run on; sysfs lists all processors of the machine.
void forget_processors(Graph& part) {
  std::erase_if(part.nodes, [](const Node& node) {
    return node.kind == NodeKind::kHost || node.kind == NodeKind::kSocket || node.kind == NodeKind::kNuma ||
           node.kind == NodeKind::kCache;
  });
}

// Returns whether NVIDIA's driver has the GPU and this process its device file. A container without NVML has no other
// sign of its GPUs.
bool has_device_file(const ProbeSources& sources, const std::string& id) {
  const std::string told =
      driver::Sysfs(sources.proc_root).read("driver/nvidia/gpus/" + id.substr(id.find(':') + 1) + "/information");
  const std::string mark = "Device Minor:";
  const size_t at = told.find(mark);
  if (at == std::string::npos) return false;
  const int minor = std::atoi(told.c_str() + at + mark.size());
  return driver::Sysfs(sources.dev_root).exists(format("nvidia{}", minor));
}

// The bus also shows GPUs that ranks cannot use: those of makers whose driver no probe asks, and those that a container
// hides. They must not become seats of ranks.
void forget_silent_gpus(const ProbeSources& sources, std::vector<Graph>& parts) {
  const auto is_gpu = [](const Node& node) { return node.kind == NodeKind::kGpu; };
  std::set<std::string> answered, silent;
  for (const Graph& part : parts)
    for (const Node& node : part.nodes)
      if (is_gpu(node)) (told_by_bus(node) ? silent : answered).insert(node.id);
  std::erase_if(silent, [&](const std::string& id) {
    return answered.contains(id) || (answered.empty() && has_device_file(sources, id));
  });
  if (silent.empty()) return;
  std::string ids;
  for (const std::string& id : silent) ids += (ids.empty() ? "" : ", ") + id;
  for (Graph& part : parts)
    std::erase_if(part.nodes, [&](const Node& node) { return is_gpu(node) && silent.contains(node.id); });
  parts.emplace_back().notes.push_back(
      format("{} on the PCI bus without an answer from NVML or CUDA, left out: {}. To use an NVIDIA GPU, install its "
             "driver, in a container give --gpus all, and otherwise look for Xid in dmesg",
             silent.size() == 1 ? "1 GPU is" : format("{} GPUs are", silent.size()), ids));
}

}  // namespace

Result<Discovery> discover(const ProbeSources& sources) {
  Discovery found;
  std::vector<Graph> parts;
  bool hwloc = false;
  for (const Probe& probe : kProbes) {
    Result<Graph> part = probe.run(sources);
    if (part.ok() && probe.run == probe_hwloc) hwloc = true;
    if (part.ok() && hwloc && probe.run == probe_sysfs) forget_processors(*part);
    found.probes.push_back({probe, part.ok() ? Status() : part.status(), part.ok() ? part.value().nodes.size() : 0});
    if (part.ok()) parts.push_back(std::move(part.value()));
  }
  forget_silent_gpus(sources, parts);
  MOECCL_ASSIGN_OR_RETURN(found.graph, merge(parts));
  return found;
}

const Result<Discovery>& discover_host() {
  static const Result<Discovery>* const host = new Result<Discovery>(discover());  // outlives threads at exit
  return *host;
}

Result<Source> read_source(const std::string& given, uint32_t n_ranks) {
  if (given == "auto") {
    const Result<Discovery>& host = discover_host();
    if (!host.ok()) return host.status();
    return Source{{host.value().graph}, {}};
  }
  if (!names_file(given)) {
    MOECCL_ASSIGN_OR_RETURN(plan::LevelTree tree, parse_synthetic(given, n_ranks));
    return Source{{}, std::move(tree)};
  }
  struct stat info = {};
  if (::stat(given.c_str(), &info) == 0 && !S_ISREG(info.st_mode))  // reading a pipe might never end
    return error(moecclInvalidArgument, "the topology {} is not a file", given);
  MOECCL_ASSIGN_OR_RETURN(const std::string text, driver::read_file(given));
  constexpr const char* kBlanks = " \t\r\n";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string::npos) return error(moecclInvalidArgument, "{}:1: the topology is empty", given);
  if (text[first] == '{') {
    MOECCL_ASSIGN_OR_RETURN(std::vector<Graph> hosts, read_json(text, given));
    return Source{std::move(hosts), {}};
  }
  if (text[first] == '<') {
    MOECCL_ASSIGN_OR_RETURN(const Graph part, read_hwloc_xml(text, given));
    MOECCL_ASSIGN_OR_RETURN(Graph graph, merge({part}));
    return Source{{std::move(graph)}, {}};
  }
  const size_t end = text.find_last_not_of(kBlanks) + 1;
  Result<plan::LevelTree> tree = parse_synthetic(text.substr(first, end - first), n_ranks);
  if (tree.ok()) return Source{{}, std::move(*tree)};
  return std::move(tree).status().with_context(format(
      "{}:1: neither XML of hwloc (lstopo --of xml) nor JSON (moeccl topo --json), and as a synthetic text", given));
}

bool names_file(const std::string& text) {
  return text.find(':') == std::string::npos || text.starts_with('/') || text.starts_with("./") ||
         text.starts_with("../") || text.ends_with(".xml") || text.ends_with(".json");
}

Result<plan::LevelTree> tree_from_text(const std::string& text, uint32_t n_ranks, uint32_t n_hosts) {
  if (text == "auto") return host_tree(n_ranks);
  MOECCL_ASSIGN_OR_RETURN(Source source, read_source(text, n_ranks));
  const std::vector<Graph>& hosts = source.hosts;
  if (hosts.empty()) return std::move(source.tree);
  if (hosts.size() < n_hosts)
    return error(moecclInvalidArgument,
                 "the topology {} describes {} host{}, the communicator's ranks are on {}: write \"count\": {} beside "
                 "the host's nodes, or describe each host (moeccl topo --json turns XML into such a file)",
                 text, hosts.size(), hosts.size() == 1 ? "" : "s", n_hosts, n_hosts);
  return level_tree(hosts, n_ranks);
}

Result<plan::LevelTree> host_tree(uint32_t n_ranks) {
  const Result<Discovery>& host = discover_host();
  if (!host.ok()) return host.status();
  return level_tree({&host.value().graph, 1}, n_ranks);
}

}  // namespace moeccl::topology
