// SPDX-License-Identifier: Apache-2.0
// The rows of dispatch and combine: their types, shapes and recipes.
#include "shim/nccl_ep/handle.h"

namespace moeccl::shim::ep {
namespace {

bool is_plain(ncclDataType_t type) { return type == ncclBfloat16 || type == ncclFloat16 || type == ncclFloat32; }
bool is_wire(ncclDataType_t type) { return is_plain(type) || type == ncclFloat8e4m3 || type == ncclFloat8e5m2; }

// What a tensor of received rows looks like: dense ones in high throughput, those of places in low latency.
std::vector<size_t> out_shape(const Handle& h, size_t width) {
  const Group& g = *h.group;
  const size_t most = g.config.max_dispatch_tokens_per_rank, n = static_cast<size_t>(g.n_ranks());
  if (!g.low_latency()) return {Tensors::kAny, width};
  if (h.layout == NCCL_EP_LAYOUT_RANK_MAJOR) return {n, most, width};
  return {static_cast<size_t>(g.n_local()), n * most, width};
}

ncclResult_t check_alignment(const Tensors& tensors, const Tensor& t, size_t row_bytes) {
  if (row_bytes == 0 || row_bytes % 16 != 0 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    return tensors.refuse(t, "has rows of " + std::to_string(row_bytes) +
                                 " bytes: rows with scales begin at multiples of 16 bytes, and have as many");
  return ncclSuccess;
}

// Scales that the program has made go beside their rows, both as bytes.
ncclResult_t read_scales(const Tensors& tensors, const Handle& h, const DispatchCall& call, Rows* r) {
  MOECCL_EP_TRY(tensors.need("inputs->scales", call.inputs.scales, &r->in_scales));
  MOECCL_EP_TRY(tensors.need("outputs->scales", call.outputs.scales, &r->out_scales));
  if (call.config.round_scales != 0) return tensors.refuse("config->round_scales must be 0 where scales are forwarded");
  if (!is_wire(r->in.type) && static_cast<int>(r->in.type) != MOECCL_NCCL_FLOAT4X2)
    return tensors.refuse(r->in, "has a type that is not forwarded: give fp32, fp16, bf16, fp8 or pairs of fp4");
  if (!is_wire(r->in_scales.type) && r->in_scales.type != ncclUint8)
    return tensors.refuse(r->in_scales, "has a type that is not forwarded: give fp32, fp16, bf16, fp8 or uint8");
  MOECCL_EP_TRY(tensors.check(r->in_scales, {}, {r->in.rows(), Tensors::kAny}));
  r->scale_bytes = r->in_scales.sizes[1] * type_size(r->in_scales.type);
  MOECCL_EP_TRY(tensors.check(r->out_scales, {r->in_scales.type}, out_shape(h, r->in_scales.sizes[1])));
  for (const Tensor* t : {&r->in, &r->out}) MOECCL_EP_TRY(check_alignment(tensors, *t, r->row_bytes));
  for (const Tensor* t : {&r->in_scales, &r->out_scales}) MOECCL_EP_TRY(check_alignment(tensors, *t, r->scale_bytes));
  if (!h.group->low_latency() && r->out.in_window != r->out_scales.in_window)
    return tensors.refuse("outputs->tokens and outputs->scales must both be in windows, or neither");
  if (!h.group->low_latency() && r->out_scales.rows() != r->out.rows())
    return tensors.refuse(r->out_scales,
                          "has " + std::to_string(r->out_scales.rows()) + " rows: give as many as tokens");
  return ncclSuccess;
}

}  // namespace

ncclResult_t read_rows(const Tensors& tensors, const Handle& h, const DispatchCall& call, Rows* r) {
  const Group& g = *h.group;
  MOECCL_EP_TRY(tensors.need("inputs->tokens", call.inputs.tokens, &r->in));
  MOECCL_EP_TRY(tensors.need("outputs->tokens", call.outputs.tokens, &r->out));
  MOECCL_EP_TRY(tensors.check(r->in, {}, {Tensors::kAny, Tensors::kAny}));
  r->row_bytes = r->in.sizes[1] * type_size(r->in.type);
  switch (call.config.quant_recipe) {
    case NCCL_EP_DISP_QUANT_NONE:
      MOECCL_EP_TRY(tensors.read("inputs->scales", call.inputs.scales, &r->in_scales));
      MOECCL_EP_TRY(tensors.read("outputs->scales", call.outputs.scales, &r->out_scales));
      MOECCL_EP_TRY(tensors.refuse_if_given(r->in_scales, "without a quantization recipe"));
      MOECCL_EP_TRY(tensors.refuse_if_given(r->out_scales, "without a quantization recipe"));
      MOECCL_EP_TRY(tensors.check(r->in, {ncclBfloat16, ncclFloat16, ncclFloat32}, r->in.sizes));
      r->type = static_cast<moecclDataType_t>(r->in.type);
      break;
    case NCCL_EP_DISP_QUANT_FWD:
      MOECCL_EP_TRY(read_scales(tensors, h, call, r));
      break;
    case NCCL_EP_DISP_QUANT_DS_FP8E3M4:
      return tensors.refuse(
          "config->quant_recipe NCCL_EP_DISP_QUANT_DS_FP8E3M4 has the library quantize the rows, which MoECCL's does "
          "not: "
          "quantize them before the call and use NCCL_EP_DISP_QUANT_FWD");
    default:
      return tensors.refuse("config->quant_recipe is " + std::to_string(call.config.quant_recipe) +
                            ": give an ncclEpDispQuant_t");
  }
  MOECCL_EP_TRY(tensors.check(r->out, {}, out_shape(h, r->in.sizes[1])));
  if (r->out.type != r->in.type) return tensors.refuse(r->out, "has another type than inputs->tokens");
  if (r->row_bytes == 0 || r->row_bytes + r->scale_bytes > g.config.max_token_bytes)
    return tensors.refuse(r->in, "has rows of " + std::to_string(r->row_bytes + r->scale_bytes) +
                                     " bytes, scales included: the group's max_token_bytes is " +
                                     std::to_string(g.config.max_token_bytes));
  return ncclSuccess;
}

ncclResult_t move_rows(moecclRouting_t routing, const Rows& rows, void* out, void* out_scales, const Place& at) {
  const moecclStream_t stream = at.moeccl_stream();
  if (rows.scale_bytes == 0) return from_moeccl(moecclDispatch(routing, rows.in.data, out, stream));
  return from_moeccl(moecclDispatchScaled(routing, rows.in.data, rows.in_scales.data, out, out_scales, stream));
}

Handle::Opening opening_of_dispatch(const Handle& h, ncclEpPassDir_t direction) {
  const bool asks_host = h.group->low_latency() || direction == NCCL_EP_FWD_PASS;
  return asks_host ? Handle::Opening::kHost : Handle::Opening::kRows;
}

Handle::Opening opening_of_combine(const Handle& h, ncclEpPassDir_t direction) {
  const bool asks_host =
      h.group->low_latency() ? h.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR : direction == NCCL_EP_BWD_PASS;
  return asks_host ? Handle::Opening::kHost : Handle::Opening::kRows;
}

ncclResult_t read_sums(const Tensors& tensors, const Handle& h, const CombineCall& call, Sums* s) {
  MOECCL_EP_TRY(tensors.need("inputs->tokens", call.inputs.tokens, &s->in));
  if (call.config.quant_recipe == NCCL_EP_COMB_QUANT_NVFP4)
    return fail(ncclInvalidUsage,
                std::string(tensors.function()) +
                    ": config->quant_recipe NCCL_EP_COMB_QUANT_NVFP4 has the library quantize the rows, which MoECCL's "
                    "does not: use NCCL_EP_COMB_QUANT_NONE, which sends them in their own type");
  if (call.config.quant_recipe != NCCL_EP_COMB_QUANT_NONE)
    return tensors.refuse("config->quant_recipe is " + std::to_string(call.config.quant_recipe) +
                          ": give an ncclEpCombQuant_t");
  Tensor scales;
  MOECCL_EP_TRY(tensors.read("inputs->scales", call.inputs.scales, &scales));
  MOECCL_EP_TRY(tensors.refuse_if_given(scales, "without a quantization recipe"));
  MOECCL_EP_TRY(tensors.check(s->in, {ncclBfloat16, ncclFloat16, ncclFloat32}, s->in.sizes));
  const size_t width = s->in.sizes.back();
  MOECCL_EP_TRY(tensors.check(s->in, {}, out_shape(h, width)));
  MOECCL_EP_TRY(tensors.need("outputs->tokens", call.outputs.tokens, &s->out));
  MOECCL_EP_TRY(tensors.check(s->out, {s->in.type}, {h.routed->n_tokens, width}));
  s->row_bytes = width * type_size(s->in.type);
  s->type = static_cast<moecclDataType_t>(s->in.type);
  if (s->row_bytes == 0 || s->row_bytes > h.group->config.max_token_bytes)
    return tensors.refuse(s->in, "has rows of " + std::to_string(s->row_bytes) +
                                     " bytes: the group's max_token_bytes is " +
                                     std::to_string(h.group->config.max_token_bytes));
  return ncclSuccess;
}

}  // namespace moeccl::shim::ep
