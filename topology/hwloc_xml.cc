// SPDX-License-Identifier: Apache-2.0
#include "topology/hwloc_xml.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "src/base/text.h"
#include "topology/contain.h"
#include "topology/xml.h"

namespace moeccl::topology {

namespace {

constexpr size_t kMaxDistanceObjects = 1024;

bool starts_number(std::string_view text, std::string_view prefix, int32_t* number) {
  if (!text.starts_with(prefix)) return false;
  const auto parsed = parse_number<uint32_t>(text.substr(prefix.size()), std::numeric_limits<int32_t>::max());
  if (parsed.has_value()) *number = static_cast<int32_t>(*parsed);
  return parsed.has_value();
}

class HwlocReader {
 public:
  HwlocReader(const std::string& file, const std::string& source) : file_(file), source_(source) {}

  Result<Graph> read(const XmlElement& root) {
    if (root.name != "topology") return wrong(root, format("found <{}>, wanted <topology>", root.name));
    const std::string* version = root.attribute("version");
    if (version == nullptr || (!version->starts_with("2.") && !version->starts_with("3.")))
      return wrong(root, format("version {} of hwloc's format: versions 2 and 3 are read; lstopo of hwloc 2 converts "
                                "older files",
                                version == nullptr ? "1" : in_quotes(*version)));
    const XmlElement* machine = nullptr;
    for (const XmlElement& child : root.children)
      if (machine == nullptr && child.name == "object") machine = &child;
    if (machine == nullptr) return wrong(root, "there is no <object type=\"Machine\"> in it");
    MOECCL_ASSIGN_OR_RETURN(const std::string type, needed(*machine, "type"));
    if (type != "Machine" && type != "System")
      return wrong(*machine, format("type is {}, wanted \"Machine\"", in_quotes(type)));
    MOECCL_TRY(object(*machine, {"", ""}));
    for (const XmlElement& child : root.children) {
      if (child.name == "info") take_host_info(child);
      if (child.name.starts_with("distances2")) MOECCL_TRY(distances(child));
    }
    contain(graph_.nodes, core_cpus_, attach_);
    if (graph_.nodes.size() > kMaxNodes) return wrong(root, format("more than {} objects", kMaxNodes));
    return std::move(graph_);
  }

 private:
  struct Context {
    std::string io_parent;  // bridge or device, "" outside of PCI
    std::string near_cpus;  // attribute cpuset of the nearest object that has one
  };

  Status wrong(const XmlElement& element, const std::string& what) const {
    return error(moecclInvalidArgument, "{}:{}: {}", file_, element.line, what);
  }
  Result<std::string> needed(const XmlElement& element, std::string_view name) const {
    const std::string* value = element.attribute(name);
    if (value == nullptr) return wrong(element, format("<{}> has no {}", element.name, name));
    return *value;
  }
  Result<uint64_t> number(const XmlElement& element, std::string_view name, uint64_t limit) const {
    MOECCL_ASSIGN_OR_RETURN(const std::string text, needed(element, name));
    const auto value = parse_number(text, limit);
    if (!value.has_value())
      return wrong(element, format("{} is {}, wanted a number from 0 to {}", name, in_quotes(text), limit));
    return *value;
  }

  // Parses "0x00000003,0xffffffff": words of 32 processors, the highest first.
  Result<Cpus> cpuset(const XmlElement& element) const {
    MOECCL_ASSIGN_OR_RETURN(const std::string text, needed(element, "cpuset"));
    std::vector<uint32_t> words;
    for (size_t at = 0; at <= text.size();) {
      const size_t comma = std::min(text.find(',', at), text.size());
      std::string_view word = std::string_view(text).substr(at, comma - at);
      if (word.starts_with("0x")) word.remove_prefix(2);
      const auto value =
          parse_number<uint32_t>(word.empty() ? "0" : word, ~0u, 16);  // words that are zero may be empty
      if (!value.has_value())
        return wrong(element,
                     format("cpuset is {}, wanted words such as 0x000000ff separated by commas", in_quotes(text)));
      words.push_back(*value);
      at = comma + 1;
    }
    if (words.size() > kMaxCpus / 32) return wrong(element, format("cpuset has more than {} processors", kMaxCpus));
    Cpus cpus;
    for (uint32_t w = 0; w < words.size(); ++w)
      for (uint32_t bit = 0; bit < 32; ++bit)
        if (words[words.size() - 1 - w] >> bit & 1) cpus.push_back(32 * w + bit);
    return cpus;
  }

  Node start(NodeKind kind, std::string id) const {
    Node node;
    node.kind = kind;
    node.id = std::move(id);
    node.sources = {source_};
    return node;
  }

  Status object(const XmlElement& element, Context context) {
    MOECCL_ASSIGN_OR_RETURN(const std::string type, needed(element, "type"));
    std::string id;
    if (element.attribute("cpuset") != nullptr) context.near_cpus = *element.attribute("cpuset");
    if (type == "Machine" || type == "System") {
      id = "host";
      MOECCL_TRY(host(element));
    } else if (type == "Package" || type == "Socket") {
      MOECCL_TRY(package(element, &id));
    } else if (type == "NUMANode") {
      MOECCL_TRY(numa(element, &id));
    } else if (type == "L3Cache" || type == "L4Cache") {
      MOECCL_TRY(cache(element, type[1] - '0'));
    } else if (type == "Core") {
      MOECCL_ASSIGN_OR_RETURN(const Cpus cpus, cpuset(element));
      if (!cpus.empty()) core_cpus_.push_back(cpus[0]);
    } else if (type == "Bridge") {
      MOECCL_TRY(bridge(element, context, &id));
    } else if (type == "PCIDev") {
      MOECCL_TRY(device(element, context, &id));
    } else if (type == "OSDev") {
      MOECCL_TRY(os_device(element, context, &id));
    }
    if (!id.empty() && element.attribute("gp_index") != nullptr) {
      MOECCL_ASSIGN_OR_RETURN(const uint64_t gp, number(element, "gp_index", ~uint64_t{0}));
      by_gp_.emplace(gp, id);
    }
    if (type == "Bridge" || type == "PCIDev") context.io_parent = id;
    for (const XmlElement& child : element.children)
      if (child.name == "object") MOECCL_TRY(object(child, context));
    return {};
  }

  static const std::string* info(const XmlElement& element, std::string_view name) {
    for (const XmlElement& child : element.children) {
      const std::string* key = child.attribute("name");
      if (child.name == "info" && key != nullptr && *key == name) return child.attribute("value");
    }
    return nullptr;
  }
  void take_host_info(const XmlElement& element) {
    const std::string* key = element.attribute("name");
    const std::string* value = element.attribute("value");
    if (key != nullptr && value != nullptr && *key == "HostName") graph_.nodes[0].name = *value;
  }

  Status host(const XmlElement& element) {
    if (!graph_.nodes.empty()) return wrong(element, "a second Machine");
    Node node = start(NodeKind::kHost, "host");
    MOECCL_ASSIGN_OR_RETURN(node.cpus, cpuset(element));
    if (const std::string* name = info(element, "HostName")) node.name = *name;
    graph_.nodes.push_back(std::move(node));
    return {};
  }

  Status package(const XmlElement& element, std::string* id) {
    uint64_t os = n_packages_++;  // hwloc leaves the number out where the kernel has none
    if (element.attribute("os_index") != nullptr) {
      MOECCL_ASSIGN_OR_RETURN(os, number(element, "os_index", 1u << 20));
    }
    *id = format("socket:{}", os);
    Node node = start(NodeKind::kSocket, *id);
    node.number = static_cast<int32_t>(os);
    MOECCL_ASSIGN_OR_RETURN(node.cpus, cpuset(element));
    if (const std::string* model = info(element, "CPUModel")) node.name = *model;
    graph_.nodes.push_back(std::move(node));
    return {};
  }

  Status numa(const XmlElement& element, std::string* id) {
    MOECCL_ASSIGN_OR_RETURN(const uint64_t os, number(element, "os_index", 1u << 20));
    *id = format("numa:{}", os);
    Node node = start(NodeKind::kNuma, *id);
    node.number = static_cast<int32_t>(os);
    MOECCL_ASSIGN_OR_RETURN(node.cpus, cpuset(element));
    if (element.attribute("local_memory") != nullptr) {
      MOECCL_ASSIGN_OR_RETURN(node.memory_bytes, number(element, "local_memory", uint64_t{1} << 60));
    }
    graph_.nodes.push_back(std::move(node));
    return {};
  }

  Status cache(const XmlElement& element, int level) {
    MOECCL_ASSIGN_OR_RETURN(const Cpus cpus, cpuset(element));
    if (cpus.empty()) return {};
    Node node = start(NodeKind::kCache, format("cache:{}:{}", level, cpus[0]));
    node.number = level;
    node.cpus = cpus;
    if (element.attribute("cache_size") != nullptr) {
      MOECCL_ASSIGN_OR_RETURN(node.memory_bytes, number(element, "cache_size", uint64_t{1} << 50));
    }
    graph_.nodes.push_back(std::move(node));
    return {};
  }

  // hwloc's link speed is in GB/s.
  Status link_speed(const XmlElement& element, Node& node) const {
    const std::string* text = element.attribute("pci_link_speed");
    if (text == nullptr) return {};
    double value = 0;
    const auto [end, code] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (code != std::errc() || end != text->data() + text->size() || !std::isfinite(value) || value < 0 || value > 1e6)
      return wrong(element, format("pci_link_speed is {}, wanted GB/s", in_quotes(*text)));
    node.uplink.bytes_per_ns = std::round(value * 1000) / 1000;
    return {};
  }

  Result<std::string> bus_id(const XmlElement& element) const {
    MOECCL_ASSIGN_OR_RETURN(const std::string text, needed(element, "pci_busid"));
    const std::string pci = normal_pci(text);
    if (pci.empty()) return wrong(element, format("pci_busid is {}, wanted such as 0000:3b:00.0", in_quotes(text)));
    return pci;
  }

  void hang(Node node, const Context& context) {
    node.parent = context.io_parent;
    if (context.io_parent.empty()) attach_[node.id] = context_cpus(context);
    graph_.nodes.push_back(std::move(node));
  }
  // The text was checked when the object that has it was read.
  Cpus context_cpus(const Context& context) const {
    XmlElement holder;
    holder.attributes = {{"cpuset", context.near_cpus}};
    Result<Cpus> cpus = cpuset(holder);
    return cpus.ok() ? *cpus : Cpus{};
  }

  Status bridge(const XmlElement& element, const Context& context, std::string* id) {
    MOECCL_ASSIGN_OR_RETURN(const std::string type, needed(element, "bridge_type"));
    if (type.starts_with("0-")) {
      MOECCL_ASSIGN_OR_RETURN(const std::string buses, needed(element, "bridge_pci"));
      // For example "0000:[16-1f]".
      const size_t open = buses.find('[');
      const std::string pci = open == std::string::npos || open + 3 > buses.size()
                                  ? ""
                                  : normal_pci(buses.substr(0, open) + buses.substr(open + 1, 2) + ":00.0");
      if (pci.empty()) return wrong(element, format("bridge_pci is {}, wanted such as 0000:[16-1f]", in_quotes(buses)));
      *id = "root:" + pci.substr(0, pci.size() - 5);
      hang(start(NodeKind::kRoot, *id), context);
      return {};
    }
    MOECCL_ASSIGN_OR_RETURN(const std::string pci, bus_id(element));
    *id = "pci:" + pci;
    Node node = start(NodeKind::kSwitch, *id);
    MOECCL_TRY(link_speed(element, node));
    hang(std::move(node), context);
    return {};
  }

  // pci_type is, for example, "0302 [10de:2330] [10de:16c1] a1": class, vendor and device.
  Status device(const XmlElement& element, const Context& context, std::string* id) {
    MOECCL_ASSIGN_OR_RETURN(const std::string pci, bus_id(element));
    MOECCL_ASSIGN_OR_RETURN(const std::string type, needed(element, "pci_type"));
    uint32_t device_class = 0, vendor = 0;
    const bool good = type.size() >= 10 && type[4] == ' ' && type[5] == '[' &&
                      std::from_chars(type.data(), type.data() + 4, device_class, 16).ptr == type.data() + 4 &&
                      std::from_chars(type.data() + 6, type.data() + 10, vendor, 16).ptr == type.data() + 10;
    if (!good) return wrong(element, format("pci_type is {}, wanted such as 0302 [10de:2330]", in_quotes(type)));
    const std::string* subtype = element.attribute("subtype");
    NodeKind kind;
    if (is_gpu(device_class, vendor)) {
      kind = NodeKind::kGpu;
    } else if (device_class == 0x0200 || device_class == 0x0207 || device_class == 0x0280) {
      kind = NodeKind::kNic;
    } else if ((device_class == 0x0680 && vendor == kNvidia) || (subtype != nullptr && *subtype == "NVSwitch")) {
      kind = NodeKind::kNvSwitch;
    } else {
      return {};
    }
    *id = "pci:" + pci;
    Node node = start(kind, *id);
    const std::string* model = info(element, "PCIDevice");
    if (model != nullptr) node.name = *model;
    MOECCL_TRY(link_speed(element, node));
    hang(std::move(node), context);
    return {};
  }

  Status os_device(const XmlElement& element, const Context& context, std::string* id) {
    MOECCL_ASSIGN_OR_RETURN(const std::string name, needed(element, "name"));
    if (context.io_parent.empty() || graph_.nodes.empty()) return {};
    Node* node = graph_.find(context.io_parent);
    if (node == nullptr || (node->kind != NodeKind::kGpu && node->kind != NodeKind::kNic)) return {};
    *id = node->id;
    // The first of several interfaces that share a port (representors of virtual functions) stands for it.
    if (node->kind == NodeKind::kNic && info(element, "Address") != nullptr && !interface(*node, name, element))
      return {};
    if (node->os_devices.size() < 64) node->os_devices.push_back(name);
    if (node->kind == NodeKind::kGpu) {
      (void)starts_number(name, "nvml", &node->number);
      if (const std::string* model = info(element, "GPUModel")) node->name = *model;
      if (const std::string* kib = info(element, "CUDAGlobalMemorySize")) {
        uint64_t value = 0;
        const auto [end, code] = std::from_chars(kib->data(), kib->data() + kib->size(), value);
        if (code == std::errc() && value < uint64_t{1} << 50) node->memory_bytes = value << 10;
        (void)end;
      }
      return {};
    }
    for (uint32_t p = 1; p <= 8; ++p) {  // verbs devices: "Port1State" is "4: ACTIVE" or "4"
      const std::string* state = info(element, format("Port{}State", p));
      if (state == nullptr) continue;
      Port port;
      port.number = p;
      port.state = state->starts_with("4") ? PortState::kUp : PortState::kDown;
      const std::string* gid = info(element, format("Port{}GID0", p));
      if (gid != nullptr && gid->size() < 64) port.gid = *gid;
      // The interface of the same device may have come earlier, as the port with this number.
      const auto same =
          std::find_if(node->ports.begin(), node->ports.end(), [&](const Port& q) { return q.number == p; });
      if (same == node->ports.end()) {
        node->ports.push_back(port);
      } else {
        same->state = port.state;
        same->gid = port.gid;
      }
    }
    return {};
  }

  // Returns false if the interface's port has one already.
  static bool interface(Node& node, const std::string& name, const XmlElement& element) {
    uint32_t number = 1;
    if (const std::string* text = info(element, "Port")) {
      (void)std::from_chars(text->data(), text->data() + text->size(), number);
      if (number == 0 || number > 8) number = 1;
    }
    for (Port& port : node.ports) {
      if (port.number != number) continue;
      if (!port.interface.empty()) return false;
      port.interface = name;
      return true;
    }
    Port port;
    port.number = number;
    port.interface = name;
    node.ports.push_back(port);
    return true;
  }

  // Reads <distances2 type="OSDev" indexing="gp"> or <distances2hetero>: <indexes> and <u64values> of one matrix.
  Status distances(const XmlElement& element) {
    const std::string* name = element.attribute("name");
    if (name == nullptr || *name != "NVLinkBandwidth") return {};
    MOECCL_ASSIGN_OR_RETURN(const uint64_t n, number(element, "nbobjs", kMaxDistanceObjects));
    std::vector<std::string> ids;  // "" for objects that the graph leaves out
    std::vector<uint64_t> values;
    for (const XmlElement& child : element.children) {
      std::string_view rest = child.text;
      while (true) {
        const size_t from = rest.find_first_not_of(" \t\r\n");
        if (from == std::string_view::npos) break;
        const size_t to = std::min(rest.find_first_of(" \t\r\n", from), rest.size());
        std::string_view word = rest.substr(from, to - from);
        rest.remove_prefix(to);
        if (child.name == "indexes")
          word = word.substr(word.find(':') == std::string_view::npos ? 0 : word.find(':') + 1);
        const auto value = parse_number<uint64_t>(word);
        if (!value.has_value()) return wrong(child, format("found {}, wanted a number", in_quotes(word)));
        if (child.name == "indexes") {
          const auto it = by_gp_.find(*value);
          ids.push_back(it == by_gp_.end() ? "" : it->second);
        } else if (child.name == "u64values") {
          values.push_back(*value);
        }
        if (ids.size() > n || values.size() > n * n) return wrong(child, format("more than {} objects", n));
      }
    }
    if (ids.size() != n || values.size() != n * n)
      return wrong(element, format("{} indexes and {} values, wanted {} and {}", ids.size(), values.size(), n, n * n));
    for (size_t i = 0; i < n; ++i)
      for (size_t j = i + 1; j < n; ++j) nvlink(ids[i], ids[j], std::max(values[i * n + j], values[j * n + i]));
    return {};
  }

  void nvlink(const std::string& a, const std::string& b, uint64_t mb_per_s) {
    if (a.empty() || b.empty() || a == b || mb_per_s == 0 || mb_per_s > 100'000'000) return;
    Link link;
    link.a = std::min(a, b);
    link.b = std::max(a, b);
    link.cost.bytes_per_ns = static_cast<double>(mb_per_s) / 1000;
    link.sources = {source_};
    graph_.links.push_back(link);
  }

  const std::string& file_;
  const std::string& source_;
  Graph graph_;
  std::vector<uint32_t> core_cpus_;  // the first processor of each core
  Attachments attach_;
  uint64_t n_packages_ = 0;
  std::map<uint64_t, std::string> by_gp_;
};

}  // namespace

Result<Graph> read_hwloc_xml(std::string_view text, const std::string& file, const std::string& source) {
  MOECCL_ASSIGN_OR_RETURN(const XmlElement root, parse_xml(text, file));
  return HwlocReader(file, source).read(root);
}

}  // namespace moeccl::topology
