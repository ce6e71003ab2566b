// SPDX-License-Identifier: Apache-2.0
#include "src/profiler/session.h"

#include <strings.h>

#include <atomic>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "src/base/log.h"
#include "src/base/plugin_log.h"
#include "src/driver/fork_page.h"
#include "src/driver/nccl_plugin.h"

namespace moeccl::profiler {
namespace {

constexpr driver::NcclPluginKind kKind = {"profiler plugin", "libnccl-profiler", "ncclProfiler_v", abi::kOldest,
                                          abi::kNewest};

// The events that MOECCL delivers, by version. The event of a kernel has no times before v4.
constexpr int kOperations = abi::kGroup | abi::kColl | abi::kP2p;
constexpr int kCalls = abi::kGroupApi | abi::kCollApi | abi::kP2pApi;
int events_of(int version) { return kOperations | (version >= 4 ? abi::kKernelCh : 0) | (version >= 5 ? kCalls : 0); }

struct Host {
  const abi::Plugin* plugin = nullptr;  // null: there is none
  int version = 0;
  std::string text;  // for messages
  // While the plugin is loaded, and in its init and finalize: plugins for NCCL's one rank per process have no lock of
  // their own that waits.
  std::mutex mutex;
  bool is_asked_for = false;
  // One for all communicators, as in NCCL: some plugins set it in their first init only, and others later on.
  int mask = 0;
  std::atomic<bool> failed{false};  // it has returned an error, and gets no more events
};

void plugin_log(int level, unsigned long, const char*, int, const char* text, ...) {
  const LogLevel ours = level_of_plugin(level);
  if (!log_enabled(ours)) return;
  va_list arguments;
  va_start(arguments, text);
  const std::optional<std::string> line = line_of_plugin(text, arguments);
  va_end(arguments);
  if (line) log(ours, "profiler plugin: {}", *line);
}

Status missing_function(const abi::Plugin& p, const std::string& text) {
  const char* missing = p.init == nullptr               ? "init"
                        : p.startEvent == nullptr       ? "startEvent"
                        : p.stopEvent == nullptr        ? "stopEvent"
                        : p.recordEventState == nullptr ? "recordEventState"
                        : p.finalize == nullptr         ? "finalize"
                                                        : nullptr;
  if (missing == nullptr) return {};
  return error(moecclUnsupported, "{} has no {}: it is not used", text, missing);
}

// Plugins have threads that outlive main(), and a forked child has none of its parent's. Another thread of the parent
// may have held the plugin's locks, or the loader's, when it forked.
constinit driver::PerProcess<Host> hosts;
Host& host() { return hosts.get(); }

Status load(Host& host) {
  const std::string& named = env().profiler_plugin;
  if (strcasecmp(named.c_str(), "none") == 0) return {};
  if (hosts.any_inherited([](const Host&) { return true; }))
    return error(moecclUnsupported,
                 "this process was forked from one that had communicators, and threads and locks of plugins do not "
                 "survive a fork; fork before the first communicator is made");
  MOECCL_ASSIGN_OR_RETURN(const driver::NcclPlugin opened,
                          driver::open_plugin(kKind, named.empty() ? "libnccl-profiler.so" : named));
  const auto* const plugin = static_cast<const abi::Plugin*>(opened.structure);
  host.version = opened.version;
  host.text = format("profiler plugin {} (v{} of {})", plugin->name == nullptr ? "unnamed" : plugin->name,
                     opened.version, opened.file);
  MOECCL_TRY(missing_function(*plugin, host.text));
  host.plugin = plugin;
  log(LogLevel::kInfo, "{}: loaded", host.text);
  return {};
}

void load_once(Host& host) {
  if (std::exchange(host.is_asked_for, true)) return;
  const Status loaded = contained([&] { return load(host); });
  if (loaded.ok()) return;
  if (env().profiler_plugin.empty()) {
    log(LogLevel::kInfo, "no profiler plugin: {}", loaded.message());
    return;
  }
  const char* const own = std::getenv("MOECCL_PROFILER_PLUGIN");
  log(LogLevel::kWarn, "{}: {}: this process has no profile; MOECCL_PROFILER_PLUGIN=none avoids this line",
      own != nullptr && *own != 0 ? "MOECCL_PROFILER_PLUGIN" : "NCCL_PROFILER_PLUGIN", loaded.message());
}

// Runs one of the plugin's functions. The first one that fails ends the profile of the process.
template <class Call>
bool run(const char* what, Call&& call) {
  abi::Code code = abi::kSuccess;
  const Status ran = contained([&] { return code = call(), Status(); });
  if (ran.ok() && code == abi::kSuccess) return true;
  if (!host().failed.exchange(true)) {
    const std::string why = ran.ok() ? format("returned {}", code) : "threw: " + ran.message();
    log(LogLevel::kWarn, "{}: {} {}: this process goes on without it; MOECCL_PROFILER_PLUGIN=none avoids this line",
        host().text, what, why);
  }
  return false;
}

abi::Code init(const Host& h, const Member& m, void** context, int* mask) {
  const char* const name = m.name.empty() ? nullptr : m.name.c_str();  // as in NCCL
  if (h.version >= 5) {
    return reinterpret_cast<abi::Init5>(h.plugin->init)(context, m.group, mask, name, m.n_hosts, m.n_ranks, m.rank,
                                                        plugin_log);
  }
  if (h.version == 4) {
    return reinterpret_cast<abi::Init4>(h.plugin->init)(context, mask, name, m.group, m.n_hosts, m.n_ranks, m.rank,
                                                        plugin_log);
  }
  return reinterpret_cast<abi::Init2>(h.plugin->init)(context, mask);
}

template <class Old>
void set_old(Old& to, const abi::Coll& from) {
  to.seqNumber = from.seqNumber;
  to.func = from.func;
  to.sendBuff = from.sendBuff;
  to.recvBuff = from.recvBuff;
  to.count = from.count;
  to.root = from.root;
  to.datatype = from.datatype;
  to.nMaxChannels = from.nChannels;
  to.nWarps = from.nWarps;
  to.algo = from.algo;
  to.proto = from.proto;
}

abi::OldDescriptor old(const abi::Descriptor& event, int version, const Member& member) {
  abi::OldDescriptor d;
  std::memset(&d, 0, sizeof(d));
  d.type = static_cast<uint8_t>(event.type);
  d.parentObj = event.parentObj;
  d.rank = event.rank;
  d.coll3.name = member.name.empty() ? nullptr : member.name.c_str();  // the same places in all members of the union
  d.coll3.commHash = member.group;
  if (event.type == abi::kColl && version == 2) {
    set_old(d.coll2, event.coll);
  } else if (event.type == abi::kColl) {
    set_old(d.coll3, event.coll);
  } else if (event.type == abi::kP2p) {
    const abi::P2p& from = event.p2p;
    d.p2p.func = from.func;
    d.p2p.buff = from.buff;
    d.p2p.datatype = from.datatype;
    d.p2p.count = from.count;
    d.p2p.peer = from.peer;
  }
  return d;
}

}  // namespace

std::shared_ptr<Session> Session::open(const Member& member) {
  Host& h = host();
  std::shared_ptr<Session> made(new Session(member));
  const std::lock_guard lock(h.mutex);
  load_once(h);
  if (h.plugin == nullptr || h.failed.load(std::memory_order_relaxed)) return nullptr;
  void* context = nullptr;
  if (!run("init", [&] { return init(h, made->member_, &context, &h.mask); })) return nullptr;
  made->context_ = context;
  return made;
}

// Like NCCL, this leaves out a context that the plugin left null.
Session::~Session() {
  if (context_ == nullptr) return;
  Host& h = host();
  const std::lock_guard lock(h.mutex);
  run("finalize", [&] { return h.plugin->finalize(context_); });
}

int Session::wanted() const {
  const Host& h = host();
  if (h.failed.load(std::memory_order_relaxed)) return 0;
  return __atomic_load_n(&h.mask, __ATOMIC_RELAXED);
}

bool Session::has_calls() const { return host().version >= 5; }

void* Session::start(abi::Descriptor& event) {
  const Host& h = host();
  if ((events_of(h.version) & static_cast<int>(event.type)) == 0) return nullptr;
  event.rank = member_.rank;
  void* made = nullptr;
  if (h.version >= 4) {
    run("startEvent", [&] { return h.plugin->startEvent(context_, &made, &event); });
  } else {
    abi::OldDescriptor as_old = old(event, h.version, member_);
    run("startEvent", [&] { return h.plugin->startEvent(context_, &made, &as_old); });
  }
  return made;
}

void Session::stop(void* event) {
  if (event != nullptr) run("stopEvent", [&] { return host().plugin->stopEvent(event); });
}

void Session::record(void* event, int state, abi::KernelChArgs& args) {
  if (event != nullptr) run("recordEventState", [&] { return host().plugin->recordEventState(event, state, &args); });
}

}  // namespace moeccl::profiler
