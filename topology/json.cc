// SPDX-License-Identifier: Apache-2.0
#include "topology/json.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "topology/xml.h"  // in_quotes()

namespace moeccl::topology {

namespace {

using Json = nlohmann::json;             // for reading: finding a field is fast even among many
using Ordered = nlohmann::ordered_json;  // for writing, in the order that a person would use

constexpr const char* kLine = "@line";  // added to each object while it is parsed
constexpr NodeKind kKinds[] = {NodeKind::kHost,     NodeKind::kSocket, NodeKind::kNuma,
                               NodeKind::kCache,    NodeKind::kRoot,   NodeKind::kSwitch,
                               NodeKind::kNvSwitch, NodeKind::kGpu,    NodeKind::kNic};
constexpr LinkKind kLinkKinds[] = {LinkKind::kNvlink, LinkKind::kSockets, LinkKind::kPeer};
constexpr LinkLayer kLayers[] = {LinkLayer::kUnknown, LinkLayer::kEthernet, LinkLayer::kInfiniband};
constexpr PortState kStates[] = {PortState::kUnknown, PortState::kDown, PortState::kUp};
constexpr std::pair<const char*, const char*> kUnits[] = {
    {"bandwidth", "GB/s"}, {"latency", "ns"}, {"memory", "bytes"}, {"rate", "Gbit/s"}};
constexpr int kMaxJsonDepth = 16;
constexpr size_t kMaxNodesOfAll = size_t{1} << 20;  // of all hosts of a file

// Tracks the line that the parser is on.
class LineIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  LineIterator() = default;
  LineIterator(const char* at, uint32_t* line) : at_(at), line_(line) {}
  reference operator*() const { return *at_; }
  LineIterator& operator++() {
    *line_ += *at_ == '\n';
    ++at_;
    return *this;
  }
  LineIterator operator++(int) {
    LineIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const LineIterator& other) const { return at_ == other.at_; }
  bool operator!=(const LineIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_ = nullptr;
  uint32_t* line_ = nullptr;
};

// A JSON object with its position, for errors and strict reading.
class JsonReader {
 public:
  JsonReader(const Json& json, const std::string& file, std::string where)
      : json_(json), file_(file), where_(std::move(where)) {}

  Status wrong(const std::string& what) const {
    const auto line = json_.find(kLine);
    const std::string at = line == json_.end() ? "" : format(":{}", line->get<uint32_t>());
    return error(moecclInvalidArgument, "{}{}: {}{}{}", file_, at, where_, where_.empty() ? "" : ": ", what);
  }
  Status only(std::initializer_list<const char*> known) const {
    for (const auto& item : json_.items()) {
      const std::string& key = item.key();
      if (key == kLine || std::any_of(known.begin(), known.end(), [&](const char* k) { return key == k; })) continue;
      std::string names;
      for (const char* k : known) names += (names.empty() ? "" : ", ") + std::string(k);
      return wrong(format("unknown field {}; known are {}", in_quotes(key), names));
    }
    return {};
  }
  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() ? nullptr : &*it;
  }

  Status text(const char* key, std::string* out, size_t limit = 256) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_string()) return wrong(format("{} is {}, wanted a text", key, shown(*value)));
    const auto& given = value->get_ref<const std::string&>();
    if (given.size() > limit) return wrong(format("{} has {} characters, at most {}", key, given.size(), limit));
    for (const char c : given)
      if (static_cast<unsigned char>(c) < 0x20) return wrong(format("{} has control characters", key));
    *out = given;
    return {};
  }
  template <class T>
  Status integer(const char* key, T* out, uint64_t limit) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_number_unsigned() || value->get<uint64_t>() > limit)
      return wrong(format("{} is {}, wanted a whole number from 0 to {}", key, shown(*value), limit));
    *out = static_cast<T>(value->get<uint64_t>());
    return {};
  }
  Status figure(const char* key, double* out, const char* unit) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    const double given = value->is_number() ? value->get<double>() : -1;
    if (!(given >= 0 && given <= 1e12))
      return wrong(format("{} is {}, wanted a number of {} from 0 to 1e12", key, shown(*value), unit));
    *out = given;
    return {};
  }
  template <class T, size_t n>
  Status word(const char* key, const T (&values)[n], const char* (*name)(T), T* out) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    std::string names;
    for (const T candidate : values) {
      if (value->is_string() && value->get_ref<const std::string&>() == name(candidate)) {
        *out = candidate;
        return {};
      }
      names += (names.empty() ? "" : ", ") + std::string(name(candidate));
    }
    return wrong(format("{} is {}, wanted one of {}", key, shown(*value), names));
  }
  // Reads a list of objects (or of texts, see texts()). *out is null when the field is absent.
  Status list(const char* key, const Json** out, size_t limit) const {
    *out = find(key);
    if (*out == nullptr) return {};
    if (!(*out)->is_array()) return wrong(format("{} is {}, wanted a list", key, shown(**out)));
    if ((*out)->size() > limit) return wrong(format("{} has {} entries, at most {}", key, (*out)->size(), limit));
    return {};
  }
  Status texts(const char* key, std::vector<std::string>* out) const {
    const Json* all = nullptr;
    MOECCL_TRY(list(key, &all, 256));
    if (all == nullptr) return {};
    for (const Json& one : *all) {
      if (!one.is_string() || one.get_ref<const std::string&>().size() > 1024)
        return wrong(format("{} holds {}, wanted texts of at most 1024 characters", key, shown(one)));
      out->push_back(one.get<std::string>());
    }
    return {};
  }
  Result<JsonReader> object(const Json& value, const std::string& where) const {
    if (!value.is_object()) return wrong(format("{} is {}, wanted an object", where, shown(value)));
    return JsonReader(value, file_, where_.empty() ? where : where_ + "." + where);
  }
  void name(const std::string& more) { where_ += " (" + in_quotes(more) + ")"; }

 private:
  static std::string shown(const Json& value) {
    if (value.is_object()) return "an object";
    if (value.is_array()) return "a list";
    return in_quotes(value.dump(-1, ' ', true, Json::error_handler_t::replace));
  }

  const Json& json_;
  const std::string& file_;
  std::string where_;
};

Status read_port(JsonReader& in, Node& node) {
  MOECCL_TRY(in.only({"number", "interface", "layer", "state", "rate", "mtu", "gid", "address"}));
  Port port;
  MOECCL_TRY(in.integer("number", &port.number, 255));
  MOECCL_TRY(in.text("interface", &port.interface));
  MOECCL_TRY(in.word("layer", kLayers, layer_name, &port.layer));
  MOECCL_TRY(in.word("state", kStates, state_name, &port.state));
  MOECCL_TRY(in.figure("rate", &port.gbit, "Gbit/s"));
  MOECCL_TRY(in.integer("mtu", &port.mtu_bytes, 1u << 24));
  MOECCL_TRY(in.text("gid", &port.gid));
  MOECCL_TRY(in.text("address", &port.address));
  for (const Port& before : node.ports)
    if (before.number == port.number) return in.wrong(format("a second port {}", port.number));
  node.ports.push_back(port);
  return {};
}

Status read_node(JsonReader& in, Node& node) {
  MOECCL_TRY(in.text("id", &node.id));
  if (node.id.empty()) return in.wrong("there is no id");
  in.name(node.id);
  MOECCL_TRY(in.only({"id", "kind", "parent", "name", "number", "cpus", "cores", "memory", "bandwidth", "latency",
                      "ports", "os_devices", "physical", "sources"}));
  if (in.find("kind") == nullptr) return in.wrong("there is no kind");
  MOECCL_TRY(in.word("kind", kKinds, kind_name, &node.kind));
  MOECCL_TRY(in.text("parent", &node.parent));
  MOECCL_TRY(in.text("name", &node.name));
  MOECCL_TRY(in.integer("number", &node.number, 1u << 30));
  std::string cpus;
  MOECCL_TRY(in.text("cpus", &cpus, 1u << 20));
  if (!parse_cpus(cpus, &node.cpus)) return in.wrong(format("cpus is {}, wanted such as 0-7,16-23", in_quotes(cpus)));
  MOECCL_TRY(in.integer("cores", &node.n_cores, kMaxCpus));
  MOECCL_TRY(in.integer("memory", &node.memory_bytes, uint64_t{1} << 60));
  MOECCL_TRY(in.figure("bandwidth", &node.uplink.bytes_per_ns, "GB/s"));
  MOECCL_TRY(in.figure("latency", &node.uplink.alpha_ns, "ns"));
  MOECCL_TRY(in.texts("os_devices", &node.os_devices));
  MOECCL_TRY(in.text("physical", &node.physical));
  MOECCL_TRY(in.texts("sources", &node.sources));
  const Json* ports = nullptr;
  MOECCL_TRY(in.list("ports", &ports, kMaxPorts));
  for (size_t i = 0; ports != nullptr && i < ports->size(); ++i) {
    MOECCL_ASSIGN_OR_RETURN(JsonReader port, in.object((*ports)[i], format("ports[{}]", i)));
    MOECCL_TRY(read_port(port, node));
  }
  return {};
}

Status read_link(JsonReader& in, Link& link) {
  MOECCL_TRY(in.only({"kind", "a", "b", "count", "bandwidth", "latency", "sources"}));
  if (in.find("kind") == nullptr) return in.wrong("there is no kind");
  MOECCL_TRY(in.word("kind", kLinkKinds, link_name, &link.kind));
  MOECCL_TRY(in.text("a", &link.a));
  MOECCL_TRY(in.text("b", &link.b));
  MOECCL_TRY(in.integer("count", &link.count, 1u << 16));
  MOECCL_TRY(in.figure("bandwidth", &link.cost.bytes_per_ns, "GB/s"));
  MOECCL_TRY(in.figure("latency", &link.cost.alpha_ns, "ns"));
  return in.texts("sources", &link.sources);
}

Status read_host(JsonReader& in, Graph& graph, uint32_t& count) {
  MOECCL_TRY(in.only({"count", "nodes", "links", "notes"}));
  MOECCL_TRY(in.integer("count", &count, kMaxHosts));
  if (count == 0) return in.wrong("count is 0, wanted at least 1");
  const Json* nodes = nullptr;
  const Json* links = nullptr;
  MOECCL_TRY(in.list("nodes", &nodes, kMaxNodes));
  MOECCL_TRY(in.list("links", &links, kMaxNodes));
  if (nodes == nullptr) return in.wrong("there are no nodes");
  for (size_t i = 0; i < nodes->size(); ++i) {
    MOECCL_ASSIGN_OR_RETURN(JsonReader node, in.object((*nodes)[i], format("nodes[{}]", i)));
    graph.nodes.emplace_back();
    MOECCL_TRY(read_node(node, graph.nodes.back()));
  }
  for (size_t i = 0; links != nullptr && i < links->size(); ++i) {
    MOECCL_ASSIGN_OR_RETURN(JsonReader link, in.object((*links)[i], format("links[{}]", i)));
    graph.links.emplace_back();
    MOECCL_TRY(read_link(link, graph.links.back()));
  }
  MOECCL_TRY(in.texts("notes", &graph.notes));
  if (Status s = validate(graph); !s.ok()) return in.wrong(s.message());
  order_by_containment(graph);
  return {};
}

Result<std::vector<Graph>> read_document(const Json& json, const std::string& file) {
  JsonReader in(json, file, "");
  const Json* version = in.find("moeccl_topology");
  if (version == nullptr) return in.wrong("there is no field moeccl_topology: 1; is this a topology of MoECCL?");
  if (!version->is_number_unsigned() || version->get<uint64_t>() != 1)
    return in.wrong("moeccl_topology is not 1: this MoECCL reads version 1");
  MOECCL_TRY(in.only({"moeccl_topology", "units", "hosts"}));
  if (const Json* units = in.find("units"); units != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(const JsonReader fields, in.object(*units, "units"));
    MOECCL_TRY(fields.only({"bandwidth", "latency", "memory", "rate"}));
    for (const auto& [key, unit] : kUnits) {
      std::string given = unit;
      MOECCL_TRY(fields.text(key, &given));
      if (given != unit) return fields.wrong(format("{} is in {}, wanted {}", key, in_quotes(given), unit));
    }
  }
  const Json* hosts = nullptr;
  MOECCL_TRY(in.list("hosts", &hosts, kMaxHosts));
  if (hosts == nullptr || hosts->empty()) return in.wrong("there are no hosts");
  std::vector<Graph> all;
  size_t n_nodes = 0;
  for (size_t i = 0; i < hosts->size(); ++i) {
    MOECCL_ASSIGN_OR_RETURN(JsonReader host, in.object((*hosts)[i], format("hosts[{}]", i)));
    Graph graph;
    uint32_t count = 1;
    MOECCL_TRY(read_host(host, graph, count));
    n_nodes += graph.nodes.size() * count;
    if (all.size() + count > kMaxHosts || n_nodes > kMaxNodesOfAll)
      return host.wrong(format("more than {} hosts or {} nodes", kMaxHosts, kMaxNodesOfAll));
    all.insert(all.end(), count, graph);
  }
  return all;
}

std::string printable(std::string text) {
  if (text.size() > 300) text = text.substr(0, 300) + "...";
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

// Reads "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while ..."
Status parse_failure(const std::string& what, const std::string& file) {
  unsigned line = 0, column = 0;
  const size_t at = what.find("at line ");
  const size_t colon = what.find(": ", at == std::string::npos ? 0 : at);
  if (at != std::string::npos && std::sscanf(what.c_str() + at, "at line %u, column %u", &line, &column) == 2 &&
      colon != std::string::npos)
    return error(moecclInvalidArgument, "{}:{}:{}: {}", file, line, column, printable(what.substr(colon + 2)));
  return error(moecclInvalidArgument, "{}:1: {}", file, printable(what));
}

Ordered cost_fields(Ordered json, const plan::LinkCost& cost) {
  if (cost.bytes_per_ns > 0) json["bandwidth"] = cost.bytes_per_ns;
  if (cost.alpha_ns > 0) json["latency"] = cost.alpha_ns;
  return json;
}

Ordered node_json(const Node& node) {
  Ordered json = {{"id", node.id}, {"kind", kind_name(node.kind)}};
  if (!node.parent.empty()) json["parent"] = node.parent;
  if (!node.name.empty()) json["name"] = node.name;
  if (node.number >= 0) json["number"] = node.number;
  if (!node.cpus.empty()) json["cpus"] = cpus_text(node.cpus);
  if (node.n_cores > 0) json["cores"] = node.n_cores;
  if (node.memory_bytes > 0) json["memory"] = node.memory_bytes;
  json = cost_fields(std::move(json), node.uplink);
  for (const Port& port : node.ports) {
    Ordered p = {{"number", port.number}};
    if (!port.interface.empty()) p["interface"] = port.interface;
    if (port.layer != LinkLayer::kUnknown) p["layer"] = layer_name(port.layer);
    if (port.state != PortState::kUnknown) p["state"] = state_name(port.state);
    if (port.gbit > 0) p["rate"] = port.gbit;
    if (port.mtu_bytes > 0) p["mtu"] = port.mtu_bytes;
    if (!port.gid.empty()) p["gid"] = port.gid;
    if (!port.address.empty()) p["address"] = port.address;
    json["ports"].push_back(std::move(p));
  }
  if (!node.os_devices.empty()) json["os_devices"] = node.os_devices;
  if (!node.physical.empty()) json["physical"] = node.physical;
  if (!node.sources.empty()) json["sources"] = node.sources;
  return json;
}

Ordered host_json(const Graph& graph) {
  Ordered json = Ordered::object();
  for (const Node& node : graph.nodes) json["nodes"].push_back(node_json(node));
  for (const Link& link : graph.links) {
    Ordered l = {{"kind", link_name(link.kind)}, {"a", link.a}, {"b", link.b}, {"count", link.count}};
    l = cost_fields(std::move(l), link.cost);
    if (!link.sources.empty()) l["sources"] = link.sources;
    json["links"].push_back(std::move(l));
  }
  if (!graph.notes.empty()) json["notes"] = graph.notes;
  return json;
}

}  // namespace

Result<std::vector<Graph>> read_json(std::string_view text, const std::string& file) {
  if (text.size() > kMaxJsonBytes)
    return error(moecclInvalidArgument, "{}: {} bytes, at most {} are possible", file, text.size(), kMaxJsonBytes);
  uint32_t line = 1;
  struct Object {
    uint32_t line;
    std::set<std::string> fields;
  };
  std::vector<Object> open;
  uint32_t deep_line = 0;  // start of the first value that is nested too deep, which is dropped
  Status twice;            // a field; the library would keep the last
  const auto mark_lines = [&](int depth, Json::parse_event_t event, Json& parsed) {
    const bool begins = event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (begins && depth >= kMaxJsonDepth && deep_line == 0) deep_line = line;
    if (deep_line != 0) return false;
    if (event == Json::parse_event_t::object_start) open.push_back({line, {}});
    if (event == Json::parse_event_t::key && !open.empty()) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!open.back().fields.insert(name).second && twice.ok())
        twice =
            error(moecclInvalidArgument, "{}:{}: the field {} stands twice in one object", file, line, in_quotes(name));
    }
    if (event == Json::parse_event_t::object_end) {
      if (!open.empty()) parsed[kLine] = open.back().line, open.pop_back();
    }
    return true;
  };
  // The library reports malformed text by throwing; the exception goes no further than here.
  try {
    const Json json =
        Json::parse(LineIterator(text.data(), &line), LineIterator(text.data() + text.size(), &line), mark_lines);
    if (deep_line != 0)
      return error(moecclInvalidArgument, "{}:{}: lists and objects are nested more than {} deep", file, deep_line,
                   kMaxJsonDepth);
    MOECCL_TRY(std::move(twice));
    if (!json.is_object())
      return error(moecclInvalidArgument, "{}:1: wanted an object with the field moeccl_topology", file);
    return read_document(json, file);
  } catch (const Json::exception& e) {
    return parse_failure(e.what(), file);
  }
}

std::string to_json(std::span<const Graph> hosts) {
  Ordered units = Ordered::object();
  for (const auto& [key, unit] : kUnits) units[key] = unit;
  Ordered json = {{"moeccl_topology", 1}, {"units", units}, {"hosts", Ordered::array()}};
  for (const Graph& graph : hosts) json["hosts"].push_back(host_json(graph));
  return json.dump(1, ' ', false, Ordered::error_handler_t::replace) + "\n";
}

}  // namespace moeccl::topology
