// SPDX-License-Identifier: Apache-2.0
// A profiler plugin that shows each operation as a range of NVTX, for Nsight Systems and other tools that read NVTX.
// Without such a tool NVTX's functions return at once.
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "plugins/profiler_entry.h"

namespace moeccl::nvtx {
namespace {

namespace abi = profiler::abi;

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("MoECCL");
  return made;
}

// The registered text "Dispatch (hier:2)". The hosts of plugins pass texts that stay, so their addresses are enough.
nvtxStringHandle_t text_of(const char* func, const char* plan) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::pair<const char*, const char*>, nvtxStringHandle_t>;  // until the very end
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = known.try_emplace({func, plan});
  if (is_new) {
    const std::string text = plan == nullptr || *plan == 0 ? func : std::string(func) + " (" + plan + ")";
    at->second = nvtxDomainRegisterStringA(domain(), text.c_str());
  }
  return at->second;
}

struct Plugin {
  static constexpr int kMask = abi::kColl | abi::kP2p;

  // A communicator's rank is a category, whose number is the context.
  static void* join(const plugins::Member& member, abi::Logger) {
    static std::atomic<uint32_t> last{0};
    const uint32_t category = ++last;
    nvtxDomainNameCategoryA(domain(), category, member.title().c_str());
    return reinterpret_cast<void*>(uintptr_t{category});
  }
  static void* begin(void* context, const abi::Descriptor& event, uint64_t type) {
    if (type != abi::kColl && type != abi::kP2p) return nullptr;
    const bool is_message = type == abi::kP2p;
    nvtxEventAttributes_t range = {};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.category = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(context));
    range.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    range.message.registered =
        is_message ? text_of(event.p2p.func, nullptr) : text_of(event.coll.func, event.coll.algo);
    range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    range.payload.ullValue = is_message ? plugins::bytes_of(event.p2p.datatype, event.p2p.count)
                                        : plugins::bytes_of(event.coll.datatype, event.coll.count);
    return reinterpret_cast<void*>(nvtxDomainRangeStartEx(domain(), &range));  // 0 without a tool
  }
  static void record(void*, int, const void*) {}
  static void end(void* event) { nvtxDomainRangeEnd(domain(), reinterpret_cast<nvtxRangeId_t>(event)); }
  static void leave(void*) {}
};

}  // namespace
}  // namespace moeccl::nvtx

MOECCL_PROFILER_PLUGIN(moeccl::nvtx::Plugin, "MoECCL NVTX")
