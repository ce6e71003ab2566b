// SPDX-License-Identifier: Apache-2.0
// A tool that NVTX loads, as Nsight Systems is one: a line for each call into the file that MOECCL_TEST_NVTX_LOG names.
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace {

std::FILE* const out = std::fopen(std::getenv("MOECCL_TEST_NVTX_LOG"), "a");
std::mutex mutex;
std::vector<std::string> texts;
std::atomic<nvtxRangeId_t> last{0};

nvtxDomainHandle_t domain_create(const char* name) {
  std::fprintf(out, "domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(&last);
}
void name_category(nvtxDomainHandle_t, uint32_t category, const char* name) {
  std::fprintf(out, "category %u %s\n", category, name);
}
nvtxStringHandle_t register_string(nvtxDomainHandle_t, const char* text) {
  const std::lock_guard lock(mutex);
  texts.emplace_back(text);
  return reinterpret_cast<nvtxStringHandle_t>(texts.size());
}
nvtxRangeId_t start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* range) {
  const nvtxRangeId_t id = ++last;
  const std::lock_guard lock(mutex);
  if (domain != reinterpret_cast<nvtxDomainHandle_t>(&last) || range->size != NVTX_EVENT_ATTRIB_STRUCT_SIZE ||
      range->messageType != NVTX_MESSAGE_TYPE_REGISTERED || range->payloadType != NVTX_PAYLOAD_TYPE_UNSIGNED_INT64)
    std::fprintf(out, "wrong\n");
  std::fprintf(out, "start %lu category %u bytes %lu %s\n", id, range->category, range->payload.ullValue,
               texts.at(reinterpret_cast<size_t>(range->message.registered) - 1).c_str());
  return id;
}
void end(nvtxDomainHandle_t, nvtxRangeId_t id) { std::fprintf(out, "end %lu\n", id); }

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (out == nullptr || callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0)
    return 0;
  std::setvbuf(out, nullptr, _IOLBF, 0);
  const auto set = [&](NvtxCallbackIdCore2 id, auto* function) {
    if (id < static_cast<int>(size)) *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, domain_create);
  set(NVTX_CBID_CORE2_DomainNameCategoryA, name_category);
  set(NVTX_CBID_CORE2_DomainRegisterStringA, register_string);
  set(NVTX_CBID_CORE2_DomainRangeStartEx, start);
  set(NVTX_CBID_CORE2_DomainRangeEnd, end);
  return 1;
}
