#include "src/base/env.h"

#include <sys/auxv.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

#include "src/base/log.h"

extern "C" char** environ;  // unistd.h declares it only with _GNU_SOURCE

namespace moeccl {
namespace {

constexpr int64_t kMaxMs = std::numeric_limits<int32_t>::max();  // moecclConfig_t holds milliseconds in 32 bits

bool parse_flag(std::string_view text, bool* flag) {
  if (text != "0" && text != "1") return false;
  *flag = text == "1";
  return true;
}

bool parse_integer(std::string_view text, int64_t low, int64_t high, int64_t* value) {
  int64_t parsed = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (code != std::errc() || end != text.data() + text.size() || parsed < low || parsed > high) return false;
  *value = parsed;
  return true;
}

bool parse_level(std::string_view text, LogLevel* level) {
  constexpr std::string_view kNames[] = {"ERROR", "WARN", "INFO", "TRACE"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (text == kNames[i]) {
      *level = static_cast<LogLevel>(i);
      return true;
    }
  }
  return false;
}

// Words that are read later by who uses them; here only what no reader could want.
bool parse_text(std::string_view text, std::string* value) {
  if (text.size() > 4096) return false;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\t' && c != '\n') return false;
  }
  *value = text;
  return true;
}

struct Variable {
  std::string_view name;
  const char* accepted;
  bool (*parse)(std::string_view text, Env* env);
  bool secret = false;
  std::string_view alias = {};  // of NCCL's: counts where the variable itself is not given; nothing is said of bad ones
};

constexpr Variable kVariables[] = {
    {"MOECCL_TIMEOUT_MS", "milliseconds, 1 to 2147483647",
     [](std::string_view t, Env* e) { return parse_integer(t, 1, kMaxMs, &e->timeout_ms); }},
    {"MOECCL_INIT_TIMEOUT_MS", "milliseconds, 1 to 2147483647",
     [](std::string_view t, Env* e) { return parse_integer(t, 1, kMaxMs, &e->init_timeout_ms); }},
    {"MOECCL_STAGING_BYTES", "bytes with an optional K, M or G, 64K to 1024G",
     [](std::string_view t, Env* e) {
       int64_t bytes = 0;
       if (!parse_bytes(t, &bytes) || bytes < (int64_t{64} << 10) || bytes > (int64_t{1} << 40)) return false;
       e->staging_bytes = bytes;
       return true;
     }},
    {"MOECCL_HEAP_BYTES", "bytes with an optional K, M or G, 16M to 1024G; 0 for automatic",
     [](std::string_view t, Env* e) {
       int64_t bytes = 0;
       if (!parse_bytes(t, &bytes) || (bytes > 0 && bytes < (int64_t{16} << 20)) || bytes > (int64_t{1} << 40))
         return false;
       e->heap_bytes = bytes;
       return true;
     }},
    {"MOECCL_MOE_MEMORY_CAP", "bytes with an optional K, M or G; 0 for no cap",
     [](std::string_view t, Env* e) { return parse_bytes(t, &e->moe_memory_cap); }},
    {"MOECCL_DEBUG", "ERROR, WARN, INFO or TRACE",
     [](std::string_view t, Env* e) { return parse_level(t, &e->log_level); }},
    {"MOECCL_PLAN", "algorithm names, at most 4096 printable characters",
     [](std::string_view t, Env* e) { return parse_text(t, &e->plan); }},
    {"MOECCL_PROFILE", "a file name, at most 4096 printable characters",
     [](std::string_view t, Env* e) { return parse_text(t, &e->profile); }},
    {"MOECCL_CALIBRATE", "milliseconds, 0 to 3600000; 0 for never",
     [](std::string_view t, Env* e) { return parse_integer(t, 0, 3'600'000, &e->calibrate_ms); }},
    {"MOECCL_KERNELS", "the name of a kernel table, at most 4096 printable characters",
     [](std::string_view t, Env* e) { return parse_text(t, &e->kernels); }},
    {"MOECCL_TOPOLOGY", "a synthetic topology or a file name, at most 4096 printable characters",
     [](std::string_view t, Env* e) { return parse_text(t, &e->topology); }},
    {"MOECCL_SECRET", "16 to 4096 characters",
     [](std::string_view t, Env* e) {
       if (t.size() < 16 || t.size() > 4096) return false;  // shorter ones can be guessed
       e->secret = t;
       return true;
     },
     true},
    {"MOECCL_SECRET_FILE", "a file name, at most 4096 printable characters",
     [](std::string_view t, Env* e) { return parse_text(t, &e->secret_file); }},
    {"MOECCL_SOCKET_ADDR", "ip or ip:port of an interface of this host, [ip6]:port for IPv6",
     [](std::string_view t, Env* e) { return t.size() <= 64 && parse_text(t, &e->socket_addr); }},
    {"MOECCL_NET", "verbs, tcp, plugin or plugin:NAME",
     [](std::string_view t, Env* e) {
       const bool known = t.empty() || t == "verbs" || t == "tcp" || t == "plugin" ||
                          (t.starts_with("plugin:") && t.size() > 7 && t.size() <= 64);
       return known && parse_text(t, &e->net);
     }},
    {"MOECCL_NET_PLUGIN", "a comma list of net plugins, or none",
     [](std::string_view t, Env* e) { return parse_text(t, &e->net_plugin); }, false, "NCCL_NET_PLUGIN"},
    {"MOECCL_SOCKET_IFNAME", "interface names, eth0,eth1, or ^eth0,eth1 for all others",
     [](std::string_view t, Env* e) { return t.size() <= 1024 && parse_text(t, &e->socket_ifname); }},
    {"MOECCL_SOCKET_STREAMS", "connections per peer and interface, 1 to 8; 0 for automatic",
     [](std::string_view t, Env* e) {
       int64_t n = 0;
       if (!parse_integer(t, 0, 8, &n)) return false;
       e->socket_streams = static_cast<int32_t>(n);
       return true;
     }},
    {"MOECCL_SOCKET_CONGESTION", "a congestion control of net.ipv4.tcp_allowed_congestion_control, or system",
     [](std::string_view t, Env* e) { return t.size() < 16 && parse_text(t, &e->socket_congestion); }},
    {"MOECCL_SPIN_US", "microseconds, 0 to 1000000; -1 for automatic",
     [](std::string_view t, Env* e) {
       int64_t us = 0;
       if (!parse_integer(t, -1, 1'000'000, &us)) return false;
       e->spin_us = static_cast<int32_t>(us);
       return true;
     }},
    {"MOECCL_CUDA_DRIVER", "the absolute path of a CUDA driver library, or none",
     [](std::string_view t, Env* e) { return parse_text(t, &e->cuda_driver); }},
    {"MOECCL_CUDA_SMS", "multiprocessors, 1 to 1024; 0 for automatic",
     [](std::string_view t, Env* e) {
       int64_t sms = 0;
       if (!parse_integer(t, 0, 1024, &sms)) return false;
       e->cuda_sms = static_cast<int32_t>(sms);
       return true;
     }},
    {"MOECCL_CUDA_IPC", "0 or 1", [](std::string_view t, Env* e) { return parse_flag(t, &e->cuda_ipc); }},
    {"MOECCL_CHECK_PLANS", "0 or 1", [](std::string_view t, Env* e) { return parse_flag(t, &e->check_plans); }},
    {"MOECCL_TRIALS", "0 or 1", [](std::string_view t, Env* e) { return parse_flag(t, &e->trials); }},
    {"MOECCL_CUDA_PERSISTENT", "0 or 1", [](std::string_view t, Env* e) { return parse_flag(t, &e->cuda_persistent); }},
    {"MOECCL_CUDA_PERSISTENT_BYTES", "bytes with an optional K, M or G",
     [](std::string_view t, Env* e) { return parse_bytes(t, &e->cuda_persistent_bytes); }},
    {"MOECCL_HOST_ID", "a name of at most 64 printable characters",
     [](std::string_view t, Env* e) { return t.size() <= 64 && parse_text(t, &e->host_id); }},
    {"MOECCL_NO_CMA", "0 or 1", [](std::string_view t, Env* e) { return parse_flag(t, &e->no_cma); }},
};

std::string known_names() {
  std::string names;
  for (const Variable& v : kVariables) {
    if (!names.empty()) names += ", ";
    names += v.name;
  }
  return names;
}

const Variable* find(std::string_view name) {
  for (const Variable& v : kVariables) {
    if (v.name == name) return &v;
  }
  return nullptr;
}

// What names code or files. A program with more rights than its user (setuid, capabilities) must not open what its
// user likes.
bool names_file(std::string_view variable) {
  for (const std::string_view name : {"MOECCL_CUDA_DRIVER=", "MOECCL_PROFILE=", "MOECCL_TOPOLOGY=",
                                      "MOECCL_SECRET_FILE=", "MOECCL_NET_PLUGIN=", "NCCL_NET_PLUGIN="})
    if (variable.starts_with(name)) return true;
  return false;
}

const EnvParse& parsed() {
  // Never destroyed: threads that outlive main() still ask for it.
  static const EnvParse* const parse = [] {
    std::vector<const char*> variables;
    const bool privileged = getauxval(AT_SECURE) != 0;
    for (char** e = environ; e != nullptr && *e != nullptr; ++e)
      if (!privileged || !names_file(*e)) variables.push_back(*e);
    auto* result = new EnvParse(parse_env(variables));
    for (const std::string& warning : result->warnings) {
      if (result->env.log_level >= LogLevel::kWarn) write_log_line(LogLevel::kWarn, warning);
    }
    return result;
  }();
  return *parse;
}

}  // namespace

bool parse_bytes(std::string_view text, int64_t* bytes) {
  int shift = 0;
  if (!text.empty()) {
    switch (text.back()) {
      case 'k':
      case 'K':
        shift = 10;
        break;
      case 'm':
      case 'M':
        shift = 20;
        break;
      case 'g':
      case 'G':
        shift = 30;
        break;
      default:
        break;
    }
  }
  if (shift > 0) text.remove_suffix(1);
  int64_t value = 0;
  if (!parse_integer(text, 0, std::numeric_limits<int64_t>::max() >> shift, &value)) return false;
  *bytes = value << shift;
  return true;
}

EnvParse parse_env(std::span<const char* const> variables) {
  constexpr std::string_view kPrefix = "MOECCL_";
  // The tests' own, and what shim/, plugins/tuner and transport/verbs read and check themselves.
  constexpr std::string_view kOthers[] = {"MOECCL_TEST_", "MOECCL_SHIM_", "MOECCL_TUNER_", "MOECCL_IB_"};
  EnvParse result;
  for (const char* entry : variables) {
    const std::string_view text = entry, name = text.substr(0, text.find('='));
    if (!name.starts_with("NCCL_") || name.size() + 1 >= text.size()) continue;
    for (const Variable& v : kVariables) {
      if (v.alias == name) (void)v.parse(text.substr(name.size() + 1), &result.env);
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
      const bool others =
          std::any_of(std::begin(kOthers), std::end(kOthers), [&](std::string_view p) { return name.starts_with(p); });
      if (others) continue;
      if (!unknown.empty()) unknown += ", ";
      unknown += name.substr(0, 64);
      continue;
    }
    // An empty value means unset: shells cannot unset a variable for one command.
    if (value.empty() || variable->parse(value, &result.env)) continue;
    const std::string shown = variable->secret ? "its value" : format("\"{}\"", value.substr(0, 64));
    const std::string sentence = format("{}: {} is not accepted; give {}", name, shown, variable->accepted);
    if (result.status.ok()) result.status = Status(moecclInvalidArgument, sentence);
    result.warnings.push_back(sentence + "; the default is used");
  }
  if (!unknown.empty()) {
    result.warnings.push_back(format("unknown variables are ignored: {}; known are: {}", unknown, known_names()));
  }
  return result;
}

const Env& env() { return parsed().env; }
const Status& env_status() { return parsed().status; }

}  // namespace moeccl
