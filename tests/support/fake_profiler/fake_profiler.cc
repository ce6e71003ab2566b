// SPDX-License-Identifier: Apache-2.0
// A profiler plugin for tests, in each version. It appends one line for each call to the file FAKE_PROFILER_LOG, keeps
// the rules of NCCL's interface strictly (a line "ERROR ..." for each breach), and misbehaves as FAKE_PROFILER says:
//   mask=N                                      the events it wants (all)
//   init | start | stop | record | finalize     that function fails; all but init do their work before
//   null=startEvent (or another function)       the structure lacks it
//   throws                                      startEvent throws
//   nothing                                     startEvent gives no handles
//   scribbles                                   startEvent overwrites what it is given
//   slow                                        init takes 300 ms
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "src/profiler/abi.h"

#ifndef FAKE_OLDEST
#define FAKE_OLDEST 2
#endif
#ifndef FAKE_NEWEST
#define FAKE_NEWEST 6
#endif

namespace {

namespace abi = moeccl::profiler::abi;

struct Context {
  int rank;
  const char* name;  // the host's, which must stay
};
struct Event {
  Context* context;
  uint64_t type;
};

std::mutex mutex;
std::map<void*, Event> open_events;
std::map<const char*, std::string> texts;  // names of algorithms, which plugins may keep

std::string script() {
  const char* text = std::getenv("FAKE_PROFILER");
  return text == nullptr ? "" : text;
}
const char* kept(const char* text) {
  const std::lock_guard lock(mutex);
  return texts.emplace(text, text).first->first;
}
// What runs while another runs is an error.
class Alone {
 public:
  explicit Alone(const char* what);
  ~Alone() { busy_ = false; }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  static inline std::atomic<bool> busy_{false};
};
abi::Code code(const char* function) { return script() == function ? 3 : abi::kSuccess; }

__attribute__((format(printf, 1, 2))) void note(const char* format, ...) {
  const char* const path = std::getenv("FAKE_PROFILER_LOG");
  if (path == nullptr) return;
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  const int n = std::vsnprintf(line, sizeof(line) - 1, format, arguments);
  va_end(arguments);
  line[n] = '\n';
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (write(file, line, static_cast<size_t>(n) + 1) < 0) std::abort();
  close(file);
}

Alone::Alone(const char* what) {
  if (busy_.exchange(true)) note("ERROR: %s overlaps with another init or finalize", what);
}

const char* title(uint64_t type) {
  switch (type) {
    case abi::kGroup:
      return "Group";
    case abi::kColl:
      return "Coll";
    case abi::kP2p:
      return "P2p";
    case abi::kKernelCh:
      return "KernelCh";
    case abi::kGroupApi:
      return "GroupApi";
    case abi::kCollApi:
      return "CollApi";
    case abi::kP2pApi:
      return "P2pApi";
    default:
      return "unknown";
  }
}

std::string title_of(void* event) {
  if (event == nullptr) return "none";
  const std::lock_guard lock(mutex);
  const auto at = open_events.find(event);
  return at == open_events.end() ? "ERROR: no event" : title(at->second.type);
}

abi::Code init(void** context, int* mask, const char* name, uint64_t group, int n_hosts, int n_ranks, int rank) {
  const std::string words = script();
  const int wanted = words.starts_with("mask=") ? std::atoi(words.c_str() + 5) : 0x7fff;
  __atomic_store_n(mask, wanted, __ATOMIC_RELAXED);
  note("init rank=%d ranks=%d hosts=%d name=%s group=%lx", rank, n_ranks, n_hosts, name == nullptr ? "(none)" : name,
       group);
  const Alone alone("init");
  if (words == "slow") usleep(300'000);
  if (code("init") == abi::kSuccess) *context = new Context{rank, name};
  return code("init");
}

void log_nothing(int, unsigned long, const char*, int, const char*, ...) {}

[[maybe_unused]] abi::Code init2(void** context, int* mask) { return init(context, mask, nullptr, 0, 0, 0, -1); }
[[maybe_unused]] abi::Code init4(void** context, int* mask, const char* name, uint64_t hash, int n_hosts, int n_ranks,
                                 int rank, abi::Logger log) {
  (log == nullptr ? log_nothing : log)(abi::kLogInfo, abi::kLogInit, "file", 1, "fake profiler of rank %d\n", rank);
  return init(context, mask, name, hash, n_hosts, n_ranks, rank);
}
[[maybe_unused]] abi::Code init5(void** context, uint64_t id, int* mask, const char* name, int n_hosts, int n_ranks,
                                 int rank, abi::Logger log) {
  return init4(context, mask, name, id, n_hosts, n_ranks, rank, log);
}

abi::Code opened(void* context, void** event, uint64_t type, int rank, void* parent, const std::string& rest) {
  auto* const c = static_cast<Context*>(context);
  if (c->rank >= 0 && c->rank != rank) note("ERROR: an event of rank %d in the context of rank %d", rank, c->rank);
  note("%d start %s in=%s %s", rank, title(type), title_of(parent).c_str(), rest.c_str());
  if (script() == "throws") throw std::runtime_error("the profiler's own trouble");
  if (script() == "nothing") return abi::kSuccess;
  *event = new char;
  const std::lock_guard lock(mutex);
  open_events[*event] = {c, type};
  return code("start");
}

template <class... Args>
std::string text(const char* format, Args... args) {
  char made[512];
  std::snprintf(made, sizeof(made), format, args...);
  return made;
}

abi::Code start_old(void* context, void** event, void* descriptor, int version) {
  const auto& d = *static_cast<abi::OldDescriptor*>(descriptor);
  std::string rest;
  if (d.type == abi::kColl) {
    const auto& c = d.coll3;  // its beginning is that of v2
    rest = text("func=%s count=%zu type=%s root=%d sequence=%lu name=%s group=%lx", c.func, c.count, c.datatype, c.root,
                c.seqNumber, c.name == nullptr ? "(none)" : c.name, c.commHash);
    rest += text(" algo=%s channels=%d", kept(version == 2 ? d.coll2.algo : c.algo),
                 version == 2 ? d.coll2.nMaxChannels : c.nMaxChannels);
  } else if (d.type == abi::kP2p) {
    rest = text("func=%s count=%zu type=%s peer=%d", d.p2p.func, d.p2p.count, d.p2p.datatype, d.p2p.peer);
  }
  return opened(context, event, d.type, d.rank, d.parentObj, rest);
}
[[maybe_unused]] abi::Code start2(void* context, void** event, void* d) { return start_old(context, event, d, 2); }
[[maybe_unused]] abi::Code start3(void* context, void** event, void* d) { return start_old(context, event, d, 3); }

[[maybe_unused]] abi::Code start4(void* context, void** event, void* descriptor) {
  auto& d = *static_cast<abi::Descriptor*>(descriptor);
  std::string rest;
  if (d.type == abi::kColl) {
    const auto& c = d.coll;
    rest = text("func=%s count=%zu type=%s root=%d sequence=%lu algo=%s proto=%s channels=%d", c.func, c.count,
                c.datatype, c.root, c.seqNumber, kept(c.algo), c.proto, c.nChannels);
    rest += text(" send=%p recv=%p group=%s", c.sendBuff, c.recvBuff, title_of(c.parentGroup).c_str());
  } else if (d.type == abi::kP2p) {
    rest = text("func=%s count=%zu type=%s peer=%d channels=%d", d.p2p.func, d.p2p.count, d.p2p.datatype, d.p2p.peer,
                d.p2p.nChannels);
  } else if (d.type == abi::kCollApi) {
    rest =
        text("func=%s count=%zu type=%s root=%d", d.collApi.func, d.collApi.count, d.collApi.datatype, d.collApi.root);
  } else if (d.type == abi::kP2pApi) {
    rest = text("func=%s count=%zu type=%s", d.p2pApi.func, d.p2pApi.count, d.p2pApi.datatype);
  } else if (d.type == abi::kGroupApi) {
    rest = text("depth=%d", d.groupApi.groupDepth);
  } else if (d.type == abi::kKernelCh) {
    rest = text("channel=%d at=%lu", d.kernelCh.channelId, d.kernelCh.pTimer);
  }
  const abi::Code result = opened(context, event, d.type, d.rank, d.parentObj, rest);
  if (script() == "scribbles") std::memset(descriptor, 0xff, sizeof(d));
  return result;
}

abi::Code stop(void* event) {
  note("stop %s", title_of(event).c_str());
  const std::lock_guard lock(mutex);
  if (open_events.erase(event) > 0) delete static_cast<char*>(event);
  return code("stop");
}

abi::Code record(void* event, int state, void* args) {
  note("record %s state=%d at=%lu", title_of(event).c_str(), state, static_cast<abi::KernelChArgs*>(args)->pTimer);
  return code("record");
}

abi::Code finalize(void* context) {
  const Alone alone("finalize");
  auto* const c = static_cast<Context*>(context);
  size_t left = 0, changed = 0;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [at, text] : texts) changed += at == text ? 0 : 1;
    for (const auto& [handle, event] : open_events) left += event.context == c ? 1 : 0;
  }
  note("finalize rank=%d name=%s", c->rank, c->name == nullptr ? "(none)" : c->name);
  if (left > 0) note("ERROR: %zu events are open", left);
  if (changed > 0) note("ERROR: %zu texts have changed", changed);
  delete c;
  return code("finalize");
}

abi::Plugin made(void (*init)(), abi::Code (*start)(void*, void**, void*)) {
  abi::Plugin p = {"fake", init, start, stop, record, finalize};
  const std::string words = script();
  if (words == "null=init") p.init = nullptr;
  if (words == "null=startEvent") p.startEvent = nullptr;
  if (words == "null=stopEvent") p.stopEvent = nullptr;
  if (words == "null=recordEventState") p.recordEventState = nullptr;
  if (words == "null=finalize") p.finalize = nullptr;
  return p;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INIT(f) reinterpret_cast<void (*)()>(f)
#define VERSION(v, init, start)         \
  EXPORT abi::Plugin ncclProfiler_v##v; \
  abi::Plugin ncclProfiler_v##v = made(INIT(init), start);
#if FAKE_OLDEST <= 2
VERSION(2, init2, start2)
#endif
#if FAKE_OLDEST <= 3 && FAKE_NEWEST >= 3
VERSION(3, init2, start3)
#endif
#if FAKE_OLDEST <= 4 && FAKE_NEWEST >= 4
VERSION(4, init4, start4)
#endif
#if FAKE_OLDEST <= 5 && FAKE_NEWEST >= 5
VERSION(5, init5, start4)
#endif
#if FAKE_NEWEST >= 6
VERSION(6, init5, start4)
#endif
