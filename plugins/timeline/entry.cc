// SPDX-License-Identifier: Apache-2.0
// What NCCL and MoECCL load: the structures ncclProfiler_v4 to _v6 (NCCL 2.26 and later). No function returns an error
// or lets an exception escape: what cannot be noted is left out of the trace.
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
  if (events != nullptr && *events != 0 && given == 0) warn("MOECCL_TIMELINE_EVENTS: give a number from 1 to 10000000");
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

using Context = std::shared_ptr<Rank>;

abi::Code init(void** context, int* mask, Rank rank, abi::Logger log) {
  logger.store(log);
  *context = nullptr;
  try {
    *context = new Context(timeline().join(std::move(rank)));
    used.store(true);
    __atomic_store_n(mask, abi::kColl | abi::kP2p | abi::kKernelCh, __ATOMIC_RELAXED);
  } catch (const std::exception&) {
  }
  return abi::kSuccess;
}

abi::Code init4(void** context, int* mask, const char* name, uint64_t hash, int, int n_ranks, int rank,
                abi::Logger log) {
  return init(context, mask, {.group = hash, .name = name == nullptr ? "" : name, .rank = rank, .n_ranks = n_ranks},
              log);
}

abi::Code init5(void** context, uint64_t id, int* mask, const char* name, int, int n_ranks, int rank, abi::Logger log) {
  return init(context, mask, {.group = id, .name = name == nullptr ? "" : name, .rank = rank, .n_ranks = n_ranks}, log);
}

template <int kVersion>
abi::Code start(void* context, void** event, void* descriptor) {
  *event = nullptr;
  if (context == nullptr) return abi::kSuccess;
  const Context& rank = *static_cast<Context*>(context);
  auto& d = *static_cast<abi::Descriptor*>(descriptor);
  const uint64_t type = kVersion == 4 ? d.type & 0xff : d.type;  // v4 leaves the other bytes unset
  try {
    if (type == abi::kColl || type == abi::kP2p) *event = timeline().begin(rank, type == abi::kP2p, d);
    if (type == abi::kKernelCh && d.parentObj != nullptr) *event = timeline().begin_kernel(d.parentObj, d.kernelCh);
  } catch (const std::exception&) {
  }
  return abi::kSuccess;
}

abi::Code stop(void* event) {
  if (event != nullptr) timeline().end(event);
  return abi::kSuccess;
}

abi::Code record(void* event, int state, void* args) {
  if (event != nullptr && args != nullptr && state == abi::kKernelChStop)
    timeline().end_kernel(event, static_cast<int64_t>(static_cast<abi::KernelChArgs*>(args)->pTimer));
  return abi::kSuccess;
}

abi::Code finalize(void* context) {
  if (context == nullptr) return abi::kSuccess;
  delete static_cast<Context*>(context);
  try {
    warn(timeline().leave());
  } catch (const std::exception&) {
  }
  return abi::kSuccess;
}

}  // namespace
}  // namespace moeccl::timeline

#define EXPORT extern "C" __attribute__((visibility("default")))
using namespace moeccl::timeline;
using Init = void (*)();
EXPORT moeccl::profiler::abi::Plugin ncclProfiler_v4, ncclProfiler_v5, ncclProfiler_v6;
moeccl::profiler::abi::Plugin ncclProfiler_v4 = {
    "MoECCL timeline", reinterpret_cast<Init>(init4), start<4>, stop, record, finalize};
moeccl::profiler::abi::Plugin ncclProfiler_v5 = {
    "MoECCL timeline", reinterpret_cast<Init>(init5), start<5>, stop, record, finalize};
moeccl::profiler::abi::Plugin ncclProfiler_v6 = {
    "MoECCL timeline", reinterpret_cast<Init>(init5), start<6>, stop, record, finalize};
