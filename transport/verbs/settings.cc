// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/settings.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace moeccl::transport::verbs {
namespace {

struct Given {
  std::string name, value;
};

// Our variable counts before NCCL's. An empty value means unset, as for all of our variables.
std::optional<Given> given(const Variables& variables, const char* ending) {
  for (const char* prefix : {"MOECCL_IB_", "NCCL_IB_"}) {
    const std::string name = std::string(prefix) + ending;
    const char* const value = variables(name.c_str());
    if (value != nullptr && *value != '\0') return Given{name, value};
  }
  return std::nullopt;
}

Status refused(const Given& g, const char* accepted) {
  return error(moecclInvalidArgument, "{}: \"{}\" is not accepted; give {}", g.name, g.value.substr(0, 64), accepted);
}

struct Range {
  int64_t low, high;
  const char* accepted;
};

template <class T>
Status read_number(const Variables& variables, const char* ending, const Range& range, T* out) {
  const std::optional<Given> g = given(variables, ending);
  if (!g.has_value()) return {};
  int64_t value = 0;
  const char* const last = g->value.data() + g->value.size();
  const auto [end, code] = std::from_chars(g->value.data(), last, value);
  if (code != std::errc() || end != last || value < range.low || value > range.high) return refused(*g, range.accepted);
  *out = static_cast<T>(value);
  return {};
}

}  // namespace

std::optional<HcaFilter> HcaFilter::parse(const std::string& text) {
  HcaFilter filter;
  std::string_view rest = text;
  if (rest.starts_with('^')) {
    filter.excludes_ = true;
    rest.remove_prefix(1);
  }
  if (rest.starts_with('=')) {
    filter.exact_ = true;
    rest.remove_prefix(1);
  }
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    if (item.empty()) continue;
    Name name;
    const size_t colon = item.find(':');
    name.device = item.substr(0, colon);
    if (colon != std::string_view::npos) {
      const std::string_view port = item.substr(colon + 1);
      const auto [end, code] = std::from_chars(port.data(), port.data() + port.size(), name.port);
      if (code != std::errc() || end != port.data() + port.size() || name.port == 0 || name.port > 254) return {};
    }
    if (name.device.empty() || name.device.size() > 63) return {};
    filter.names_.push_back(std::move(name));
  }
  if (filter.names_.empty() && !text.empty()) return {};
  return filter;
}

bool HcaFilter::admits(const std::string& device, uint32_t port) const {
  if (names_.empty()) return true;
  for (const Name& n : names_) {
    const bool named = exact_ ? device == n.device : device.starts_with(n.device);
    if (named && (n.port == 0 || n.port == port)) return !excludes_;
  }
  return excludes_;
}

Result<Settings> read_settings(const Variables& variables) {
  Settings s;
  if (const auto g = given(variables, "LIBRARY"); g.has_value() && g->name.starts_with("MOECCL")) s.library = g->value;
  if (const auto g = given(variables, "HCA"); g.has_value()) {
    const std::optional<HcaFilter> filter = HcaFilter::parse(g->value);
    if (!filter.has_value())
      return refused(*g, "names of RDMA devices: mlx5_0:1,mlx5_1; =name for exact ones, ^name for all others");
    s.hca = *filter;
    s.hca_text = format("{}={}", g->name, g->value);
  }
  MOECCL_TRY(read_number(variables, "GID_INDEX",
                         {-1, 255,
                          "an index of the port's table of GIDs, 0 to 255; -1 for "
                          "automatic"},
                         &s.gid_index));
  MOECCL_TRY(read_number(variables, "TC", {0, 255, "a traffic class, 0 to 255"}, &s.traffic_class));
  MOECCL_TRY(read_number(variables, "SL", {0, 15, "a service level, 0 to 15"}, &s.service_level));
  MOECCL_TRY(read_number(variables, "TIMEOUT", {1, 31, "an acknowledgement timeout, 1 to 31: 4.096 us * 2^value"},
                         &s.timeout));
  MOECCL_TRY(read_number(variables, "RETRY_CNT", {0, 7, "retries, 0 to 7"}, &s.retry_count));
  MOECCL_TRY(
      read_number(variables, "PKEY", {0, 65535, "an index of the port's table of partition keys"}, &s.pkey_index));
  MOECCL_TRY(read_number(variables, "QPS_PER_CONNECTION", {1, kMaxQueuePairs, "queue pairs, 1 to 8"}, &s.queue_pairs));
  MOECCL_TRY(read_number(variables, "ADAPTIVE_ROUTING",
                         {-1, 1, "1 where the network may deliver out of order, 0 where it does not, -1 for automatic"},
                         &s.adaptive_routing));
  return s;
}

Result<Settings> process_settings() {
  return read_settings([](const char* name) -> const char* {
    return std::string_view(name) == "MOECCL_IB_LIBRARY" ? secure_getenv(name) : std::getenv(name);
  });
}

uint8_t timeout_code(const Settings& settings, int64_t operation_timeout_ms) {
  if (settings.timeout >= 0) return static_cast<uint8_t>(settings.timeout);
  constexpr int kShortest = 14, kLongest = 20;  // 67 ms, 4.3 s
  int code = kLongest;
  const auto all_tries_ms = [&](int c) { return 0.004096 * static_cast<double>(1u << c) * (settings.retry_count + 1); };
  while (code > kShortest && all_tries_ms(code) > static_cast<double>(operation_timeout_ms) / 2) --code;
  return static_cast<uint8_t>(code);
}

}  // namespace moeccl::transport::verbs
