// SPDX-License-Identifier: Apache-2.0
// The core's table: NCCL EP's functions.
#include <utility>

#include "shim/nccl_ep/handle.h"
#include "shim/nccl_ep/table.h"

namespace moeccl::shim::ep {
namespace {

ncclResult_t GetVersion(int* version) {
  if (version == nullptr)
    return fail(ncclInvalidArgument, "ncclEpGetVersion: version is NULL: give the address of an int");
  *version = NCCL_EP_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t TensorAlloc(ncclEpTensor_t** tensor, unsigned ndim, ncclDataType_t type, const size_t* sizes,
                         const ncclEpTensorAllocConfig_t* config) {
  return make_tensor(tensor, ndim, type, sizes, config);
}
ncclResult_t TensorDestroy(ncclEpTensor_t* tensor) { return free_tensor(tensor); }

ncclResult_t CreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config) {
  return make_group(group, comm, config);
}
ncclResult_t GroupDestroy(ncclEpGroup_t group) { return free_group(group); }

ncclResult_t HandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config, size_t* size,
                           int top_k) {
  return memory_size(group, layout, config, size, top_k);
}

ncclResult_t InitHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                        const ncclEpHandleConfig_t* config, int top_k, const ncclEpTensor_t* memory) {
  GroupPtr g;
  MOECCL_EP_TRY(group_of("ncclEpInitHandle", group, &g));
  return make_handle("ncclEpInitHandle", handle, g, layout, config, top_k, memory);
}

ncclResult_t UpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                          cudaStream_t stream) {
  constexpr const char* kName = "ncclEpUpdateHandle";
  Handle* h = nullptr;
  InUse in_use;
  MOECCL_EP_TRY(handle_of(kName, handle, &h, &in_use));
  return update_handle(kName, *h, topk_idx, layout_info, stream);
}

ncclResult_t CreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                          const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                          const ncclEpHandleConfig_t* config, cudaStream_t stream) {
  constexpr const char* kName = "ncclEpCreateHandle";
  GroupPtr g;
  MOECCL_EP_TRY(group_of(kName, group, &g));
  InUse in_use;
  MOECCL_EP_TRY(in_use.begin(kName, *g));
  Tensor topk;
  const Tensors tensors(kName, g->comm);
  MOECCL_EP_TRY(tensors.need("topk_idx", topk_idx, &topk));
  MOECCL_EP_TRY(tensors.check(topk, {}, {Tensors::kAny, Tensors::kAny}));
  MOECCL_EP_TRY(make_handle(kName, handle, g, layout, config, static_cast<int>(topk.sizes[1]), nullptr));
  const ncclResult_t updated = update_handle(kName, handle_in(*handle), topk_idx, layout_info, stream);
  if (updated == ncclSuccess) return updated;
  (void)free_handle(*handle);
  *handle = nullptr;
  return updated;
}

ncclResult_t HandleDestroy(ncclEpHandle_t handle) { return free_handle(handle); }

ncclResult_t check_direction(const char* function, ncclEpPassDir_t direction) {
  if (direction == NCCL_EP_FWD_PASS || direction == NCCL_EP_BWD_PASS) return ncclSuccess;
  return fail(ncclInvalidArgument, std::string(function) + ": config->pass_direction is " + std::to_string(direction) +
                                       ": give NCCL_EP_FWD_PASS or NCCL_EP_BWD_PASS");
}

ncclResult_t Dispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                      const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                      const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
  constexpr const char* kName = "ncclEpDispatch";
  Handle* h = nullptr;
  InUse in_use;
  MOECCL_EP_TRY(handle_of(kName, handle, &h, &in_use));
  DispatchCall call{};
  call.stream = stream;
  const auto read = [&] {
    // First, because the other ranks may be in a call of its pass.
    MOECCL_EP_TRY(take(kName, "config", config, NCCL_EP_DISPATCH_CONFIG_V1_SIZE, true, &call.config));
    MOECCL_EP_TRY(take(kName, "inputs", inputs, NCCL_EP_DISPATCH_INPUTS_V1_SIZE, false, &call.inputs));
    MOECCL_EP_TRY(take(kName, "outputs", outputs, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE, false, &call.outputs));
    MOECCL_EP_TRY(take(kName, "layout_info", layout_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, true, &call.layout_info));
    MOECCL_EP_TRY(check_direction(kName, call.config.pass_direction));
    const ncclEpExpertIdKind_t kind = call.layout_info.recv_topk_idx_kind;
    if (kind >= NCCL_EP_EXPERT_ID_AUTO && kind <= NCCL_EP_EXPERT_ID_GLOBAL) return ncclSuccess;
    return fail(ncclInvalidArgument, std::string(kName) + ": layout_info->recv_topk_idx_kind is " +
                                         std::to_string(kind) + ": give an ncclEpExpertIdKind_t");
  };
  if (const ncclResult_t refused = read(); refused != ncclSuccess)
    return h->refuse(kName, refused, opening_of_dispatch(*h, call.config.pass_direction), stream);
  return h->group->low_latency() ? dispatch_latency(*h, call) : dispatch_throughput(*h, call);
}

ncclResult_t Combine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
                     const ncclEpCombineConfig_t* config, cudaStream_t stream) {
  constexpr const char* kName = "ncclEpCombine";
  Handle* h = nullptr;
  InUse in_use;
  MOECCL_EP_TRY(handle_of(kName, handle, &h, &in_use));
  CombineCall call{};
  call.stream = stream;
  const auto read = [&] {
    // First, because the other ranks may be in a call of its pass.
    MOECCL_EP_TRY(take(kName, "config", config, NCCL_EP_COMBINE_CONFIG_V1_SIZE, true, &call.config));
    MOECCL_EP_TRY(take(kName, "inputs", inputs, NCCL_EP_COMBINE_INPUTS_V1_SIZE, false, &call.inputs));
    MOECCL_EP_TRY(take(kName, "outputs", outputs, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE, false, &call.outputs));
    return check_direction(kName, call.config.pass_direction);
  };
  if (const ncclResult_t refused = read(); refused != ncclSuccess)
    return h->refuse(kName, refused, opening_of_combine(*h, call.config.pass_direction), stream);
  return h->group->low_latency() ? combine_latency(*h, call) : combine_throughput(*h, call);
}

ncclResult_t Complete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, cudaStream_t stream) {
  constexpr const char* kName = "ncclEpComplete";
  ncclEpCompleteConfig_t known;
  MOECCL_EP_TRY(take(kName, "config", config, NCCL_EP_COMPLETE_CONFIG_V1_SIZE, true, &known));
  Handle* h = nullptr;
  InUse in_use;
  MOECCL_EP_TRY(handle_of(kName, handle, &h, &in_use));
  if (!h->rest) return ncclSuccess;
  const auto rest = std::exchange(h->rest, nullptr);
  return rest(stream);
}

// The group, if it was made to mask ranks. As in NCCL EP, a high-throughput group may be made so, and has no masks.
ncclResult_t masking_group(const char* function, ncclEpGroup_t group, const void* argument, GroupPtr* out) {
  MOECCL_EP_TRY(group_of(function, group, out));
  if ((*out)->config.enable_mask == 0)
    return fail(ncclInvalidUsage,
                std::string(function) + ": the group was made without masks: set config->enable_mask");
  if (!(*out)->low_latency())
    return fail(ncclInvalidUsage,
                std::string(function) + ": high-throughput groups have no masks: use NCCL_EP_ALGO_LOW_LATENCY");
  if (argument == nullptr)
    return fail(ncclInvalidArgument, std::string(function) + ": the second argument is NULL: give an address");
  return ncclSuccess;
}

ncclResult_t MaskQuery(ncclEpGroup_t group, int* status, cudaStream_t stream) {
  GroupPtr g;
  MOECCL_EP_TRY(masking_group("ncclEpMaskQuery", group, status, &g));
  InUse in_use;
  MOECCL_EP_TRY(in_use.begin("ncclEpMaskQuery", *g));
  Tensor to;
  to.given = true;
  to.data = status;
  const Place at("ncclEpMaskQuery", g->member.shares_device != 0, stream, {&to});
  if (!at.on_device()) MOECCL_EP_TRY(at.wait());
  return at.put(status, g->active.data(), g->active.size() * sizeof(int));
}

ncclResult_t MaskUpdate(ncclEpGroup_t group, const int* mask, cudaStream_t) {
  GroupPtr g;
  MOECCL_EP_TRY(masking_group("ncclEpMaskUpdate", group, mask, &g));
  for (size_t r = 0; r < g->active.size(); ++r) g->active[r] = mask[r] != 0 ? 1 : 0;
  return ncclSuccess;
}

ncclResult_t MaskClean(ncclEpGroup_t group, cudaStream_t) {
  GroupPtr g;
  MOECCL_EP_TRY(masking_group("ncclEpMaskClean", group, group, &g));
  std::fill(g->active.begin(), g->active.end(), 1);
  return ncclSuccess;
}

ncclResult_t GetAsyncError(ncclEpGroup_t group, int* error) {
  GroupPtr g;
  MOECCL_EP_TRY(masking_group("ncclEpGetAsyncError", group, error, &g));
  *error = g->lost_a_rank() && !g->loss_is_cleared ? 1 : 0;
  return ncclSuccess;
}

ncclResult_t ErrorClear(ncclEpGroup_t group) {
  GroupPtr g;
  MOECCL_EP_TRY(masking_group("ncclEpErrorClear", group, group, &g));
  g->loss_is_cleared = g->lost_a_rank();
  return ncclSuccess;
}

namespace entry {
#define NCCL_EP_FUNCTION(name, parameters, arguments)     \
  ncclResult_t name parameters {                          \
    return contained([&] { return ep::name arguments; }); \
  }
#include "shim/nccl_ep/functions.def"
#undef NCCL_EP_FUNCTION
}  // namespace entry

constexpr moecclNcclEpTable kTable = {
#define NCCL_EP_FUNCTION(name, parameters, arguments) entry::name,
#include "shim/nccl_ep/functions.def"
#undef NCCL_EP_FUNCTION
};

}  // namespace
}  // namespace moeccl::shim::ep

extern "C" __attribute__((visibility("default"))) const moecclNcclEpTable* moecclNcclEpCore(void) {
  return &moeccl::shim::ep::kTable;
}
