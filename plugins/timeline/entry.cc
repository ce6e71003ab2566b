// SPDX-License-Identifier: Apache-2.0
// The profiler plugin that writes a trace: its settings, and its end with the program.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>

#include "plugins/timeline/timeline.h"
#include "src/base/log.h"
#include "src/base/text.h"
#include "src/base/trusted_library.h"
#include "src/driver/fork_page.h"
#include "src/driver/process.h"

namespace moeccl::timeline {
namespace {

namespace abi = profiler::abi;

std::atomic<abi::Logger> logger{nullptr};

void warn(const std::string& why) {
  const abi::Logger log = logger.load();
  if (!why.empty() && log != nullptr)
    log(abi::kLogWarn, abi::kLogInit, __func__, __LINE__, "MoECCL timeline: %s", why.c_str());
}

Timeline make_timeline() {
  constexpr size_t kMost = 10'000'000, kUsual = 65'536;
  const char* const events = trusted_variable("MOECCL_TIMELINE_EVENTS");
  const size_t given = events == nullptr ? 0 : parse_number<size_t>(events, kMost).value_or(0);
  if (events != nullptr && *events != 0 && given == 0)
    warn(format("MOECCL_TIMELINE_EVENTS={} is no number from 1 to {}: {} are kept", events, kMost, kUsual));
  const char* const file = trusted_variable("MOECCL_TIMELINE_FILE");
  std::string path = file == nullptr || *file == 0 ? "moeccl-timeline" : file;
  if (path.find("%p") == std::string::npos) path += path.find("%h") == std::string::npos ? ".%h.%p.json" : ".%p.json";
  std::string host = driver::host_identity().name();
  std::replace(host.begin(), host.end(), '/', '_');  // MOECCL_HOST_ID may be any text
  return {for_process(path, host, getpid()), given > 0 ? given : kUsual};
}

struct Process {
  Timeline timeline = make_timeline();
};
driver::PerProcess<Process> processes;
Timeline& timeline() { return processes.get().timeline; }
std::atomic<bool> used{false};

// At the end of the program. The library stays until then (-z nodelete): NCCL closes it with its last communicator and
// opens it again for the next, and both belong to one trace.
__attribute__((destructor)) void write_at_exit() {
  if (!used.load()) return;
  try {
    warn(timeline().write());
  } catch (const std::exception&) {
  }
}

struct Plugin {
  static constexpr int kMask = abi::kColl | abi::kP2p | abi::kKernelCh;
  using Context = std::shared_ptr<Rank>;

  static void* join(plugins::Member member, abi::Logger log) {
    logger.store(log);
    auto* const context = new Context(timeline().join({std::move(member)}));
    used.store(true);
    return context;
  }
  static void* begin(void* context, const abi::Descriptor& event, uint64_t type) {
    if (type == abi::kColl || type == abi::kP2p)
      return timeline().begin(*static_cast<Context*>(context), type == abi::kP2p, event);
    if (type == abi::kKernelCh && event.parentObj != nullptr)
      return timeline().begin_kernel(event.parentObj, event.kernelCh);
    return nullptr;
  }
  static void record(void* event, int state, const void* args) {
    if (state == abi::kKernelChStop)
      timeline().end_kernel(event, static_cast<int64_t>(static_cast<const abi::KernelChArgs*>(args)->pTimer));
  }
  static void end(void* event) { timeline().end(event); }
  static void leave(void* context) {
    delete static_cast<Context*>(context);
    warn(timeline().leave());
  }
};

}  // namespace
}  // namespace moeccl::timeline

MOECCL_PROFILER_PLUGIN(moeccl::timeline::Plugin, "MoECCL timeline")
