// SPDX-License-Identifier: Apache-2.0
#include "topology/discover.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "src/base/fd.h"
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
     "install NVIDIA's driver; in a container use NVIDIA's runtime (--gpus all)"},
    {"cuda", probe_cuda, "GPUs as CUDA sees them", "install NVIDIA's driver"},
};

Result<std::string> read_whole(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return system_error("cannot open the topology " + path, errno);
  struct stat info = {};
  if (fstat(fd.get(), &info) != 0) return system_error("cannot read the topology " + path, errno);
  if (!S_ISREG(info.st_mode)) return error(moecclInvalidArgument, "the topology {} is not a file", path);
  if (static_cast<uint64_t>(info.st_size) > kMaxJsonBytes)
    return error(moecclInvalidArgument, "the topology {} has {} bytes, at most {} are read", path, info.st_size,
                 kMaxJsonBytes);
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t have = 0;
  while (have < text.size()) {
    const ssize_t n = ::read(fd.get(), text.data() + have, text.size() - have);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return system_error("cannot read the topology " + path, errno);
    if (n == 0) break;
    have += static_cast<size_t>(n);
  }
  text.resize(have);
  return text;
}

// hwloc lists what this process may run on; sysfs lists all processors of the machine.
void forget_processors(Graph& part) {
  std::erase_if(part.nodes, [](const Node& node) {
    return node.kind == NodeKind::kHost || node.kind == NodeKind::kSocket || node.kind == NodeKind::kNuma ||
           node.kind == NodeKind::kCache;
  });
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
  MOECCL_ASSIGN_OR_RETURN(found.graph, merge(parts));
  return found;
}

const Result<Discovery>& discover_host() {
  static const Result<Discovery>* const host = new Result<Discovery>(discover());  // outlives threads at exit
  return *host;
}

Result<std::vector<Graph>> load_topology(const std::string& path) {
  MOECCL_ASSIGN_OR_RETURN(const std::string text, read_whole(path));
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return error(moecclInvalidArgument, "{}:1: the topology is empty", path);
  if (text[first] == '{') return read_json(text, path);
  if (text[first] != '<')
    return error(moecclInvalidArgument, "{}:1: neither XML of hwloc (lstopo --of xml) nor JSON (moeccl topo --json)",
                 path);
  MOECCL_ASSIGN_OR_RETURN(const Graph part, read_hwloc_xml(text, path));
  MOECCL_ASSIGN_OR_RETURN(Graph graph, merge({part}));
  return std::vector<Graph>{std::move(graph)};
}

bool names_file(const std::string& text) {
  return text.starts_with('/') || text.starts_with("./") || text.starts_with("../") || text.ends_with(".xml") ||
         text.ends_with(".json");
}

bool is_private_text(const std::string& text) { return text == "auto" || names_file(text); }

Result<plan::LevelTree> tree_from_text(const std::string& text, uint32_t n_ranks) {
  if (text == "auto") return host_tree(n_ranks);
  if (!names_file(text)) return parse_synthetic(text, n_ranks);
  MOECCL_ASSIGN_OR_RETURN(const std::vector<Graph> hosts, load_topology(text));
  return level_tree(hosts, n_ranks);
}

Result<plan::LevelTree> host_tree(uint32_t n_ranks) {
  const Result<Discovery>& host = discover_host();
  if (!host.ok()) return host.status();
  return level_tree({&host.value().graph, 1}, n_ranks);
}

}  // namespace moeccl::topology
