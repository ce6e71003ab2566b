// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/settings.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "src/base/log.h"
#include "src/base/nccl_files.h"

namespace moeccl::transport::verbs {
namespace {

struct Given {
  std::string name, value;
  bool nccls() const { return name.starts_with("NCCL_"); }
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
  int64_t (*of_nccl)(int64_t) = nullptr;  // turns a value that NCCL accepts into one of ours
};

std::optional<int64_t> number_of(const Given& g) {
  if (g.nccls()) {  // as NCCL reads it: 0x6a is a number, too, and what follows a number does not count
    char* end = nullptr;
    errno = 0;
    const int64_t value = std::strtoll(g.value.c_str(), &end, 0);
    if (errno != 0 || end == g.value.c_str()) return {};
    return value;
  }
  int64_t value = 0;
  const char* const last = g.value.data() + g.value.size();
  const auto [end, code] = std::from_chars(g.value.data(), last, value);
  if (code != std::errc() || end != last) return {};
  return value;
}

template <class T>
Status read_number(const Variables& variables, const char* ending, const Range& range, Settings* settings, T* out) {
  const std::optional<Given> g = given(variables, ending);
  if (!g.has_value()) return {};
  std::optional<int64_t> value = number_of(*g);
  if (value.has_value() && g->nccls() && range.of_nccl != nullptr) {
    const int64_t ours = range.of_nccl(*value);
    if (ours != *value) settings->adapted.push_back(format("{}={} counts as {}", g->name, *value, ours));
    value = ours;
  }
  if (!value.has_value() || *value < range.low || *value > range.high) return refused(*g, range.accepted);
  *out = static_cast<T>(*value);
  return {};
}

// NCCL's default of several variables is -1, which says nothing.
int64_t zero_if_unset(int64_t value) { return value == -1 ? 0 : value; }
int64_t automatic_if_negative(int64_t value) { return std::max<int64_t>(value, -1); }
int64_t queue_pairs_of(int64_t value) { return std::clamp<int64_t>(value, 1, kMaxQueuePairs); }
// NCCL leaves it to the NIC, which has a field of 5 bits. 0 there means no limit; our longest is 2.4 hours.
int64_t timeout_of(int64_t value) { return (value & 31) == 0 ? 31 : value & 31; }
// The field has 3 bits, but a user who asks for 13 retries wants many.
int64_t retries_of(int64_t value) { return value < 0 ? 7 : std::min<int64_t>(value, 7); }
// NCCL's default is -2, and each other value but 0 is yes.
int64_t adaptive_of(int64_t value) { return value < 0 ? -1 : value > 0 ? 1 : 0; }

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
  if (const auto g = given(variables, "LIBRARY"); g.has_value() && g->name.starts_with("MOECCL")) {
    s.library = g->value;
    if (g->value == "none") s.why_off = "MOECCL_IB_LIBRARY is none";
  } else if (const char* off = variables("NCCL_IB_DISABLE"); off != nullptr && std::string_view(off) == "1") {
    s.why_off = "NCCL_IB_DISABLE is 1";
  }
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
                          "automatic",
                          automatic_if_negative},
                         &s, &s.gid_index));
  MOECCL_TRY(read_number(variables, "TC", {0, 255, "a traffic class, 0 to 255", zero_if_unset}, &s, &s.traffic_class));
  MOECCL_TRY(read_number(variables, "SL", {0, 15, "a service level, 0 to 15", zero_if_unset}, &s, &s.service_level));
  MOECCL_TRY(read_number(variables, "TIMEOUT",
                         {1, 31, "an acknowledgement timeout, 1 to 31: 4.096 us * 2^value", timeout_of}, &s,
                         &s.timeout));
  MOECCL_TRY(read_number(variables, "RETRY_CNT", {0, 7, "retries, 0 to 7", retries_of}, &s, &s.retry_count));
  MOECCL_TRY(
      read_number(variables, "PKEY", {0, 65535, "an index of the port's table of partition keys"}, &s, &s.pkey_index));
  MOECCL_TRY(read_number(variables, "QPS_PER_CONNECTION", {1, kMaxQueuePairs, "queue pairs, 1 to 8", queue_pairs_of},
                         &s, &s.queue_pairs));
  MOECCL_TRY(read_number(
      variables, "ADAPTIVE_ROUTING",
      {-1, 1, "1 where the network may deliver out of order, 0 where it does not, -1 for automatic", adaptive_of}, &s,
      &s.adaptive_routing));
  return s;
}

Result<Settings> process_settings() {
  Result<Settings> settings = read_settings([](const char* name) -> const char* {
    return std::string_view(name) == "MOECCL_IB_LIBRARY" ? secure_getenv(name) : nccl_variable(name);
  });
  if (settings.ok())
    for (const std::string& s : settings->adapted) log(LogLevel::kInfo, "{}", s);
  return settings;
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
