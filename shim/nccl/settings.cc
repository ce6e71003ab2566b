// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/settings.h"

#include <strings.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "src/base/nccl_files.h"

extern "C" char** environ;

namespace moeccl::shim {
namespace {

void line(const std::string& text) {
  const std::string all = "moeccl-nccl: " + text + "\n";
  std::fwrite(all.data(), 1, all.size(), stderr);  // one write, so that lines of several ranks stay whole
}

// "2.28.9" or "22809"; 0 when it is neither.
int version_of(const char* text) {
  int major = 0, minor = 0, patch = 0, end = 0;
  if (std::sscanf(text, "%d.%d.%d%n", &major, &minor, &patch, &end) == 3 && text[end] == '\0') {
    const bool sane = major == 2 && minor >= 9 && minor < 100 && patch >= 0 && patch < 100;
    return sane ? major * 10000 + minor * 100 + patch : 0;  // NCCL_VERSION() since 2.9
  }
  const bool number = std::sscanf(text, "%d%n", &major, &end) == 1 && text[end] == '\0';
  return number && major >= 20900 && major < 30000 ? major : 0;
}

void read_one(std::string_view name, const char* value, Settings& s) {
  const std::string_view v = value;
  if (name == "MOECCL_SHIM_MPI") return;  // the other shim's
  if (name == "MOECCL_SHIM_NCCL") {
    s.nccl = v;
  } else if (name == "MOECCL_SHIM_VERSION" && version_of(value) > 0) {
    s.version = s.most_version = version_of(value);
  } else if (name == "MOECCL_SHIM_QUIET" && (v == "0" || v == "1")) {
    s.quiet = v == "1";
  } else if (name == "MOECCL_SHIM_MODE" && (v == "auto" || v == "moeccl" || v == "nccl")) {
    s.mode = v == "auto" ? Mode::kAuto : v == "nccl" ? Mode::kNccl : Mode::kMoeccl;
  } else {
    line(std::string(name) + "=" + value +
         " is not understood and ignored: there are MOECCL_SHIM_MODE=auto|moeccl|nccl, MOECCL_SHIM_NCCL=<file>, "
         "MOECCL_SHIM_VERSION=2.28.9 (or another from 2.9.0 on) and MOECCL_SHIM_QUIET=0|1");
  }
}

Settings read() {
  constexpr std::string_view kPrefix = "MOECCL_SHIM_";
  Settings s;
  for (char** e = environ; e != nullptr && *e != nullptr; ++e) {
    const std::string_view text = *e;
    const size_t equals = text.find('=');
    if (!text.starts_with(kPrefix) || equals == std::string_view::npos) continue;
    read_one(text.substr(0, equals), *e + equals + 1, s);
  }
  // MoECCL itself reports bad values.
  const char* const timeout = std::getenv("MOECCL_TIMEOUT_MS");
  if (timeout != nullptr && std::atoi(timeout) > 0) s.timeout_ms = std::atoi(timeout);
  const auto is_set = [](const char* value) { return value != nullptr && *value != '\0'; };
  s.limits_operations = is_set(timeout);
  s.limits_init = is_set(std::getenv("MOECCL_INIT_TIMEOUT_MS"));
  return s;
}

bool debug_wanted() {
  static const bool wanted = [] {
    const char* level = nccl_variable("NCCL_DEBUG");
    return level != nullptr &&
           (strcasecmp(level, "WARN") == 0 || strcasecmp(level, "INFO") == 0 || strcasecmp(level, "TRACE") == 0);
  }();
  return wanted;
}

// Never destroyed: threads that outlive main() still use them.
std::mutex& error_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::atomic<bool> elsewhere{false};
std::string& error_text() {
  static auto* const text = new std::string;
  return *text;
}

ncclResult_t code_of(moecclResult_t result) {
  switch (result) {
    case moecclSuccess:
      return ncclSuccess;
    case moecclSystemError:
    case moecclOutOfMemory:
      return ncclSystemError;
    case moecclInvalidArgument:
      return ncclInvalidArgument;
    case moecclInvalidUsage:
    case moecclMismatch:
    case moecclAborted:
    case moecclUnsupported:
      return ncclInvalidUsage;
    case moecclRemoteError:
    case moecclTimeout:
      return ncclRemoteError;
    case moecclInProgress:
      return ncclInProgress;
    case moecclInternalError:
      break;
  }
  return ncclInternalError;
}

}  // namespace

const Settings& settings() {
  static const auto* const s = new Settings(read());
  return *s;
}

void notice(const std::string& text) {
  if (!settings().quiet) line(text);
}

ncclResult_t fail(ncclResult_t code, const std::string& text) {
  {
    const std::lock_guard lock(error_mutex());
    error_text() = text;
  }
  elsewhere = false;
  if (debug_wanted()) line(text);
  return code;
}

ncclResult_t from_moeccl(moecclResult_t result, moecclComm_t comm) {
  if (result == moecclSuccess) return ncclSuccess;
  const char* said = moecclGetLastError(comm);
  return fail(code_of(result), std::string(moecclGetErrorString(result)) + ": " + said);
}

ncclResult_t fail_thrown(const std::exception& thrown) noexcept {
  try {
    return fail(ncclSystemError, std::string("the process has no memory or no threads left: ") + thrown.what());
  } catch (const std::exception&) {
    return ncclSystemError;
  }
}

void fail_elsewhere() { elsewhere = true; }
bool failed_elsewhere() { return elsewhere; }

const char* last_error() {
  static thread_local std::string shown;
  const std::lock_guard lock(error_mutex());
  shown = error_text();
  return shown.c_str();
}

}  // namespace moeccl::shim
