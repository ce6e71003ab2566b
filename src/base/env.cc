// SPDX-License-Identifier: Apache-2.0
#include "src/base/env.h"

#include <sys/auxv.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "src/base/log.h"
#include "src/base/name_list.h"
#include "src/base/nccl_files.h"
#include "src/base/text.h"

extern "C" char** environ;  // unistd.h declares it only with _GNU_SOURCE

namespace moeccl {
namespace {

constexpr std::string_view kPrefix = "MOECCL_";
constexpr int64_t kMaxMs = std::numeric_limits<int32_t>::max();  // moecclConfig_t holds milliseconds in 32 bits

bool parse_integer(std::string_view text, int64_t low, int64_t high, int64_t* value) {
  const auto parsed = parse_number<int64_t>(text, high);
  if (!parsed.has_value() || *parsed < low) return false;
  *value = *parsed;
  return true;
}

// Each of these functions reads one field. It leaves the field unchanged when it rejects the text.

bool parse_level(std::string_view text, Env* e) {
  constexpr std::string_view kNames[] = {"ERROR", "WARN", "INFO", "TRACE"};
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), text);
  if (found != std::end(kNames)) e->log_level = static_cast<LogLevel>(found - std::begin(kNames));
  return found != std::end(kNames);
}

template <bool Env::*kField>
bool flag(std::string_view text, Env* e) {
  if (text != "0" && text != "1") return false;
  e->*kField = text == "1";
  return true;
}

template <auto kField, int64_t kLow, int64_t kHigh>
bool integer(std::string_view text, Env* e) {
  int64_t value = 0;
  if (!parse_integer(text, kLow, kHigh, &value)) return false;
  e->*kField = static_cast<std::remove_reference_t<decltype(e->*kField)>>(value);
  return true;
}

template <int64_t Env::*kField, int64_t kLow = 0, int64_t kHigh = std::numeric_limits<int64_t>::max()>
bool bytes(std::string_view text, Env* e) {
  int64_t value = 0;
  if (!parse_bytes(text, &value) || value < kLow || value > kHigh) return false;
  e->*kField = value;
  return true;
}

// Accepts a string that the code which uses it interprets later; rejects only what no such code could accept.
template <std::string Env::*kField, size_t kMost = 4096>
bool words(std::string_view text, Env* e) {
  const auto bad = [](char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\n'; };
  if (text.size() > kMost || std::any_of(text.begin(), text.end(), bad)) return false;
  e->*kField = text;
  return true;
}

// Also accepts 0, which is the field's default and leaves it unchanged.
template <int64_t Env::*kField, int64_t kLow, int64_t kHigh = int64_t{1} << 40>
bool bytes_or_automatic(std::string_view text, Env* e) {
  int64_t value = 0;
  if (parse_bytes(text, &value) && value == 0) return true;
  return bytes<kField, kLow, kHigh>(text, e);
}

bool parse_net(std::string_view text, Env* e) {
  const bool known = text == "verbs" || text == "tcp" || text == "plugin" ||
                     (text.starts_with("plugin:") && text.size() > 7 && text.size() <= 64);
  return known && words<&Env::net>(text, e);
}

bool parse_ports(std::string_view text, Env* e) {
  const size_t dash = std::min(text.find('-'), text.size());
  int64_t first = 0, last = 0;
  if (!parse_integer(text.substr(0, dash), 1, 65535, &first)) return false;
  if (!parse_integer(text.substr(std::min(dash + 1, text.size())), first, 65535, &last)) return false;
  e->port_range = {static_cast<uint16_t>(first), static_cast<uint16_t>(last)};
  return true;
}

bool parse_secret(std::string_view text, Env* e) {
  if (text.size() < 16 || text.size() > 4096) return false;  // shorter ones can be guessed
  e->secret = text;
  return true;
}

bool parse_hca(std::string_view text, Env* e) {
  const NameList list(text);
  for (const NameList::Name& n : list.names) {
    const size_t colon = std::min(n.text.find(':'), n.text.size());
    if (colon == 0 || colon > 63) return false;
    const std::string_view port = std::string_view(n.text).substr(colon);
    if (!port.empty() && parse_number<uint32_t>(port.substr(1), 254).value_or(0) == 0) return false;
  }
  return !list.names.empty() && words<&Env::ib_hca>(text, e);
}

bool parse_ib_timeout(std::string_view text, Env* e) {
  if (text == "-1") return true;
  return integer<&Env::ib_timeout, 1, 31>(text, e);
}

// The following functions turn NCCL's values for RDMA into ours. Values that NCCL accepts and that are out of our range
// count as the nearest one, a timeout as the NIC would take it: they are meant for NCCL, and no reason to go without
// RDMA.

std::string as_it_is(std::string_view text) { return std::string(text); }

// NCCL reads 0x6a as a number, too, and ignores what follows a number.
template <int64_t (*kOurs)(int64_t)>
std::string number(std::string_view text) {
  const std::string given(text);
  char* end = nullptr;
  errno = 0;
  const int64_t value = std::strtoll(given.c_str(), &end, 0);
  return errno != 0 || end == given.c_str() ? given : format("{}", kOurs(value));
}

int64_t same(int64_t value) { return value; }
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

struct Variable {
  std::string_view name;
  const char* accepted;
  bool (*parse)(std::string_view text, Env* env);
  enum Kind : uint8_t { kPlain, kSecret, kFile } kind = kPlain;  // kFile: it names code or a file
  // NCCL's variable (nccl_files.h), used where this one is not set; bad values of it are not reported.
  std::string_view alias = {};
  // For RDMA: turns NCCL's value into one of ours. With a bad one RDMA is not used.
  std::string (*ours)(std::string_view nccls) = nullptr;
};

constexpr Variable kVariables[] = {
    {"MOECCL_TIMEOUT_MS", "milliseconds, 1 to 2147483647", integer<&Env::timeout_ms, 1, kMaxMs>},
    {"MOECCL_INIT_TIMEOUT_MS", "milliseconds, 1 to 2147483647", integer<&Env::init_timeout_ms, 1, kMaxMs>},
    {"MOECCL_STAGING_BYTES", "bytes with an optional K, M or G, 64K to 64G; 0 for automatic",
     bytes_or_automatic<&Env::staging_bytes, int64_t{64} << 10, int64_t{64} << 30>},
    {"MOECCL_HEAP_BYTES", "bytes with an optional K, M or G, 16M to 1024G; 0 for automatic",
     bytes_or_automatic<&Env::heap_bytes, int64_t{16} << 20>},
    {"MOECCL_MOE_MEMORY_CAP", "bytes with an optional K, M or G; 0 for no cap", bytes<&Env::moe_memory_cap>},
    {"MOECCL_DEBUG", "ERROR, WARN, INFO or TRACE", parse_level},
    {"MOECCL_DEBUG_FILE", "a file name, at most 4096 printable characters", words<&Env::log_file>, Variable::kFile},
    {"MOECCL_PLAN", "algorithm names, at most 4096 printable characters", words<&Env::plan>},
    {"MOECCL_PROFILE", "a file name, at most 4096 printable characters", words<&Env::profile>, Variable::kFile},
    {"MOECCL_CALIBRATE", "milliseconds, 0 to 3600000; 0 for never", integer<&Env::calibrate_ms, 0, 3'600'000>},
    {"MOECCL_KERNELS", "avx512, avx2, neon or reference, if the processor runs it", words<&Env::kernels>},
    {"MOECCL_TOPOLOGY", "a synthetic topology or a file name, at most 4096 printable characters", words<&Env::topology>,
     Variable::kFile},
    {"MOECCL_SECRET", "16 to 4096 characters", parse_secret, Variable::kSecret},
    {"MOECCL_SECRET_FILE", "a file name, at most 4096 printable characters", words<&Env::secret_file>, Variable::kFile},
    {"MOECCL_SOCKET_ADDR", "ip or ip:port of an interface of this host, [ip6]:port for IPv6",
     words<&Env::socket_addr, 64>},
    {"MOECCL_PORT_RANGE", "FIRST-LAST, ports from 1 to 65535", parse_ports},
    {"MOECCL_NET", "verbs, tcp, plugin or plugin:NAME", parse_net},
    {"MOECCL_NET_PLUGIN", "a comma list of net plugins, or none", words<&Env::net_plugin>, Variable::kFile,
     "NCCL_NET_PLUGIN"},
    {"MOECCL_PROFILER_PLUGIN", "a file, the middle of libnccl-profiler-<name>.so, or none",
     words<&Env::profiler_plugin>, Variable::kFile, "NCCL_PROFILER_PLUGIN"},
    {"MOECCL_SOCKET_IFNAME", "beginnings of interface names, eth,ib0; = before them for whole names, ^ for all others",
     words<&Env::socket_ifname, 1024>, Variable::kPlain, "NCCL_SOCKET_IFNAME"},
    {"MOECCL_SOCKET_STREAMS", "connections per peer and interface, 1 to 8; 0 for automatic",
     integer<&Env::socket_streams, 0, 8>},
    {"MOECCL_SOCKET_CONGESTION", "a congestion control of net.ipv4.tcp_allowed_congestion_control, or system",
     words<&Env::socket_congestion, 15>},
    {"MOECCL_ENCRYPT", "0 or 1", flag<&Env::encrypt>},
    {"MOECCL_SPIN_US", "microseconds, 0 to 1000000; -1 for automatic", integer<&Env::spin_us, -1, 1'000'000>},
    {"MOECCL_CUDA_DRIVER", "the absolute path of a CUDA driver library, or none", words<&Env::cuda_driver>,
     Variable::kFile},
    {"MOECCL_CUDA_SMS", "multiprocessors, 1 to 1024; 0 for automatic", integer<&Env::cuda_sms, 0, 1024>},
    {"MOECCL_CUDA_IPC", "0 or 1", flag<&Env::cuda_ipc>},
    {"MOECCL_CHECK_PLANS", "0 or 1", flag<&Env::check_plans>},
    {"MOECCL_TRIALS", "0 or 1", flag<&Env::trials>},
    {"MOECCL_CUDA_MESSAGE_BYTES", "bytes with an optional K, M or G, at most 64M; 0 for host memory",
     bytes<&Env::cuda_message_bytes, 0, int64_t{64} << 20>},
    {"MOECCL_CUDA_STAGING_BYTES", "bytes with an optional K, M or G, 64K to 1024G; 0 for automatic",
     bytes_or_automatic<&Env::cuda_staging_bytes, int64_t{64} << 10>},
    {"MOECCL_CUDA_PERSISTENT", "0 or 1", flag<&Env::cuda_persistent>},
    {"MOECCL_CUDA_PERSISTENT_BYTES", "bytes with an optional K, M or G", bytes<&Env::cuda_persistent_bytes>},
    {"MOECCL_CUDA_GRAPH_MIXING", "0 or 1", flag<&Env::cuda_graph_mixing>, Variable::kPlain,
     "NCCL_GRAPH_MIXING_SUPPORT"},
    {"MOECCL_HOST_ID", "a name of at most 64 printable characters", words<&Env::host_id, 64>},
    {"MOECCL_DUMP", "a file name, at most 4096 printable characters", words<&Env::dump>, Variable::kFile},
    {"MOECCL_NO_CMA", "0 or 1", flag<&Env::no_cma>},
    {"MOECCL_IB_HCA", "names of RDMA devices: mlx5_0:1,mlx5_1; =name for exact ones, ^name for all others", parse_hca,
     Variable::kPlain, "NCCL_IB_HCA", as_it_is},
    {"MOECCL_IB_GID_INDEX", "an index of the port's table of GIDs, 0 to 255; -1 for automatic",
     integer<&Env::ib_gid_index, -1, 255>, Variable::kPlain, "NCCL_IB_GID_INDEX", number<automatic_if_negative>},
    {"MOECCL_IB_TC", "a traffic class, 0 to 255", integer<&Env::ib_traffic_class, 0, 255>, Variable::kPlain,
     "NCCL_IB_TC", number<zero_if_unset>},
    {"MOECCL_IB_SL", "a service level, 0 to 15", integer<&Env::ib_service_level, 0, 15>, Variable::kPlain, "NCCL_IB_SL",
     number<zero_if_unset>},
    {"MOECCL_IB_TIMEOUT", "an acknowledgement timeout, 1 to 31: 4.096 us * 2^value; -1 for automatic", parse_ib_timeout,
     Variable::kPlain, "NCCL_IB_TIMEOUT", number<timeout_of>},
    {"MOECCL_IB_RETRY_CNT", "retries, 0 to 7", integer<&Env::ib_retry_count, 0, 7>, Variable::kPlain,
     "NCCL_IB_RETRY_CNT", number<retries_of>},
    {"MOECCL_IB_PKEY", "an index of the port's table of partition keys, 0 to 65535",
     integer<&Env::ib_pkey_index, 0, 65535>, Variable::kPlain, "NCCL_IB_PKEY", number<same>},
    {"MOECCL_IB_QPS_PER_CONNECTION", "queue pairs, 1 to 8", integer<&Env::ib_queue_pairs, 1, kMaxQueuePairs>,
     Variable::kPlain, "NCCL_IB_QPS_PER_CONNECTION", number<queue_pairs_of>},
    {"MOECCL_IB_ADAPTIVE_ROUTING",
     "1 where the network may deliver out of order, 0 where it does not, -1 for automatic",
     integer<&Env::ib_adaptive_routing, -1, 1>, Variable::kPlain, "NCCL_IB_ADAPTIVE_ROUTING", number<adaptive_of>},
    {"MOECCL_IB_LIBRARY", "a path, at most 4096 printable characters, or none", words<&Env::ib_library>,
     Variable::kFile},
};

// Read elsewhere: the tests' own variables, and those that shim/ and plugins/tuner read and check themselves. Rows for
// docs/variables.md: variable | its reader | what it accepts | its default | what it does.
//   MOECCL_SHIM_MODE | shims for NCCL and MPI programs | auto, moeccl or nccl | auto | Which library serves an NCCL
//     program. auto uses MoECCL, and NCCL for jobs whose memory MoECCL cannot serve.
//   MOECCL_SHIM_NCCL | shims for NCCL and MPI programs | an absolute path | empty | The real NCCL. Empty: the one on
//     the program's own search path.
//   MOECCL_SHIM_VERSION | shims for NCCL and MPI programs | 2.28.9 or 22809, from 2.9.0 on | 23203 | The version that
//     ncclGetVersion returns, for programs that use it to decide which functions they call.
//   MOECCL_SHIM_QUIET | shims for NCCL and MPI programs | 0 or 1 | 0 | With 1, rank 0 does not report what was taken
//     over.
//   MOECCL_SHIM_MPI | shims for NCCL and MPI programs | on, always or off | on | When the MPI shim takes over a
//     communicator: at its ninth collective, at its first, or never.
//   MOECCL_TUNER_RAILS | the tuner for NCCL | 1 to 64 | 1 | How many links of the measured kind a host uses at once.
//   MOECCL_TIMELINE_FILE | the timeline plugin | a path | moeccl-timeline | The trace, to which ".HOST.PID.json" is
//     appended, or in which %h and %p are replaced.
//   MOECCL_TIMELINE_EVENTS | the timeline plugin | 1 to 10000000 | 65536 | How many operations of a process are kept,
//     the newest ones, in about 100 bytes each.

// The variables of the comment above, which tools/check-docs compares with it.
constexpr std::string_view kElsewhere[] = {"MOECCL_SHIM_MODE",     "MOECCL_SHIM_NCCL",      "MOECCL_SHIM_VERSION",
                                           "MOECCL_SHIM_QUIET",    "MOECCL_SHIM_MPI",       "MOECCL_TUNER_RAILS",
                                           "MOECCL_TIMELINE_FILE", "MOECCL_TIMELINE_EVENTS"};

// How many letters must be added, removed or replaced to turn one name into the other (Levenshtein).
size_t letters_apart(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// Returns " (did you mean MOECCL_NET?)", or nothing when every name differs in more than a third of its own letters.
std::string suggestion(std::string_view name) {
  std::string_view best;
  size_t least = name.size();
  const auto consider = [&](std::string_view known) {
    const size_t apart = letters_apart(name, known), own = std::max(name.size(), known.size()) - kPrefix.size();
    if (apart <= own / 3 && apart < least) best = known, least = apart;
  };
  for (const Variable& v : kVariables) consider(v.name);
  for (const std::string_view known : kElsewhere) consider(known);
  return best.empty() ? "" : format(" (did you mean {}?)", best);
}

const Variable* find(std::string_view name) {
  for (const Variable& v : kVariables) {
    if (v.name == name) return &v;
  }
  return nullptr;
}

// Returns whether "NAME=value" names code or a file. A program with more privileges than its user (setuid,
// capabilities) must not open files that the user chooses.
bool names_file(std::string_view entry) {
  const std::string_view name = entry.substr(0, entry.find('='));
  return std::any_of(std::begin(kVariables), std::end(kVariables), [&](const Variable& v) {
    return v.kind == Variable::kFile && (v.name == name || v.alias == name);
  });
}

std::string not_accepted(std::string_view name, const std::string& shown, const Variable& v) {
  return format("{}: {} is not accepted; give {}", name, shown, v.accepted);
}

const EnvParse& parsed() {
  // Never destroyed, because threads that outlive main() still read it.
  static const EnvParse* const parse = [] {
    std::vector<const char*> variables;
    for (char** e = environ; e != nullptr && *e != nullptr; ++e) variables.push_back(*e);
    for (const std::string& line : nccl_file_lines()) variables.push_back(line.c_str());
    return new EnvParse(parse_env(variables, getauxval(AT_SECURE) != 0));
  }();
  static std::atomic<bool> said{false};  // after the parse is there, because a line of the log asks it for its file
  if (!said.exchange(true, std::memory_order_relaxed)) {
    for (const std::string& warning : parse->warnings) {
      if (parse->env.log_level >= LogLevel::kWarn) write_log_line(LogLevel::kWarn, warning);
    }
    for (const std::string& note : parse->notes) {
      if (parse->env.log_level >= LogLevel::kInfo) write_log_line(LogLevel::kInfo, note);
    }
  }
  return *parse;
}

}  // namespace

bool parse_bytes(std::string_view text, int64_t* bytes) {
  constexpr std::string_view kUnits = "kKmMgG";
  const size_t unit = text.empty() ? std::string_view::npos : kUnits.find(text.back());
  const int shift = unit == std::string_view::npos ? 0 : 10 * static_cast<int>(1 + unit / 2);
  if (shift > 0) text.remove_suffix(1);
  int64_t value = 0;
  if (!parse_integer(text, 0, std::numeric_limits<int64_t>::max() >> shift, &value)) return false;
  *bytes = value << shift;
  return true;
}

std::vector<std::string_view> variable_names() {
  std::vector<std::string_view> names;
  for (const Variable& v : kVariables) names.push_back(v.name);
  return names;
}

EnvParse parse_env(std::span<const char* const> given, bool privileged) {
  EnvParse result;
  std::vector<const char*> variables(given.begin(), given.end());
  if (privileged) std::erase_if(variables, names_file);
  const auto is_set = [&](std::string_view name) {
    return std::any_of(variables.begin(), variables.end(), [&](std::string_view entry) {
      return entry.size() > name.size() + 1 && entry.starts_with(name) && entry[name.size()] == '=';
    });
  };
  for (const char* entry : variables) {
    const std::string_view text = entry, name = text.substr(0, text.find('='));
    if (!name.starts_with("NCCL_") || name.size() == text.size()) continue;
    std::string_view value = text.substr(name.size() + 1);
    // For NCCL an empty list names no plugin. An empty value of its other variables means unset.
    if (value.empty() && name == "NCCL_NET_PLUGIN") value = "none";
    if (name == "NCCL_IB_DISABLE" && value == "1") result.env.ib_library = "none";
    for (const Variable& v : kVariables) {
      if (v.alias != name || value.empty() || is_set(v.name)) continue;
      const std::string ours = v.ours != nullptr ? v.ours(value) : std::string(value);
      const bool good = v.parse(ours, &result.env);
      if (good && ours != value) result.notes.push_back(format("{}={} counts as {}", name, value.substr(0, 64), ours));
      if (!good && v.ours != nullptr && result.env.ib_refused.empty())
        result.env.ib_refused = not_accepted(name, format("\"{}\"", value.substr(0, 64)), v);
    }
  }
  std::string unknown;
  for (const char* entry : variables) {
    const std::string_view text = entry;
    if (!text.starts_with(kPrefix)) continue;
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name = text.substr(0, equals);
    const std::string_view value = text.substr(equals + 1);
    const Variable* variable = find(name);
    if (variable == nullptr) {
      const bool others = std::find(std::begin(kElsewhere), std::end(kElsewhere), name) != std::end(kElsewhere);
      if (others || name.starts_with("MOECCL_TEST_")) continue;
      if (!unknown.empty()) unknown += ", ";
      unknown += name.substr(0, 64);
      unknown += suggestion(name.substr(0, 64));
      continue;
    }
    // An empty value means unset: shells cannot unset a variable for one command.
    if (value.empty() || variable->parse(value, &result.env)) continue;
    const std::string shown = variable->kind == Variable::kSecret ? "its value" : format("\"{}\"", value.substr(0, 64));
    const std::string sentence = not_accepted(name, shown, *variable);
    if (result.status.ok()) result.status = Status(moecclInvalidArgument, sentence);
    result.warnings.push_back(sentence + "; until then no communicator can be made");
  }
  if (!unknown.empty()) {
    result.warnings.push_back(format("unknown variables are ignored: {}; docs/variables.md lists all", unknown));
  }
  return result;
}

const Env& env() { return parsed().env; }
const Status& env_status() { return parsed().status; }

}  // namespace moeccl
