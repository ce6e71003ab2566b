// SPDX-License-Identifier: Apache-2.0
// Handlers of dispatch and combine. In the shapes, T is the number of tokens, k = top_k, L the number of this rank's
// experts, `room` the rows of the layer's buffers and R those that a routing fills. Rows behind R are zeros.
#include <cstring>

#include "bindings/jax/routings.h"

namespace moeccl::jax {
namespace {

// Numbers of routings travel as two uint32, because JAX has no uint64 by default.
uint64_t number_in(const Buffer& buffer) {
  uint32_t halves[2];
  std::memcpy(halves, buffer.data, sizeof halves);
  return uint64_t{halves[1]} << 32 | halves[0];
}
void put_number(const Buffer& buffer, uint64_t number) {
  const uint32_t halves[2] = {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32)};
  std::memcpy(buffer.data, halves, sizeof halves);
}

size_t bytes_of(const Buffer& buffer) {
  const std::optional<Element> element = element_of(buffer.type);
  return element ? buffer.elements * element->bytes() : 0;
}

Outcome misfit(const char* name, const Buffer& buffer, size_t bytes) {
  if (bytes_of(buffer) == bytes) return {};
  return Failure{XLA_FFI_Error_Code_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(bytes_of(buffer)) +
                                                          " bytes, and this layer's has " + std::to_string(bytes) +
                                                          ": make the program anew with this ExpertParallel"};
}

// A layer whose communicator no other program uses.
class Held {
 public:
  Outcome hold(const Call& call) {
    int64_t number = 0;
    if (Outcome failed = call.attribute("layer", &number)) return failed;
    layer_ = layers().find(number);
    const std::string name = "layer " + std::to_string(number);
    if (layer_ == nullptr) return closed(name, "ExpertParallel");
    lock_ = std::unique_lock(layer_->member->busy);
    return layer_->member->closed ? closed("the communicator of " + name, "communicator") : Outcome{};
  }
  Layer& layer() const { return *layer_; }
  moecclComm_t comm() const { return layer_->member->comm; }

 private:
  std::shared_ptr<Layer> layer_;
  std::unique_lock<std::mutex> lock_;  // ends before the layer, whose member has the mutex
};

Outcome read_choices(const Buffer& index, const Buffer& weight, const LayerShape& shape, Choices* choices) {
  const size_t n_tokens = index.elements / shape.top_k;
  if (Outcome failed = misfit("topk_idx", index, n_tokens * shape.top_k * sizeof(int32_t))) return failed;
  if (Outcome failed = misfit("topk_weights", weight, n_tokens * shape.top_k * sizeof(float))) return failed;
  *choices = {static_cast<const int32_t*>(index.data), static_cast<const float*>(weight.data), n_tokens, 0};
  return {};
}

Outcome info_of(const Held& held, moecclRouting_t routing, moecclRoutingInfo_t* info) {
  *info = {};
  info->size = sizeof *info;
  const moecclResult_t result = moecclRoutingGetInfo(routing, info);
  return result == moecclSuccess ? Outcome{} : failure_of(result, held.comm());
}

// topk_idx s32[T, k], topk_weights f32[T, k] -> number u32[2], rows s32[L] and tokens s32[L] of each local expert (with
// and without padding), dropped choices s32[].
Outcome route(const Call& call) {
  Held held;
  if (Outcome failed = held.hold(call)) return failed;
  Choices choices{};
  if (Outcome failed = read_choices(call.in(0), call.in(1), held.layer().shape, &choices)) return failed;
  moecclRouting_t routing = nullptr;
  if (Outcome failed = held.layer().make(&choices, &routing)) return failed;
  moecclRoutingInfo_t info;
  if (Outcome failed = info_of(held, routing, &info)) return failed;
  const auto n = static_cast<size_t>(info.n_local_experts);
  for (size_t i = 1; i <= 2; ++i)
    if (Outcome failed = misfit("a count of experts", call.out(i), n * sizeof(int32_t))) return failed;
  put_number(call.out(0), choices.number);
  auto *rows = static_cast<int32_t*>(call.out(1).data), *tokens = static_cast<int32_t*>(call.out(2).data);
  for (size_t e = 0; e < n; ++e) {
    rows[e] = static_cast<int32_t>(info.expert_offsets[e + 1] - info.expert_offsets[e]);
    tokens[e] = info.expert_counts[e];
  }
  *static_cast<int32_t*>(call.out(3).data) = static_cast<int32_t>(info.n_dropped);
  return {};
}

// One call on a routing. Its choices are three arguments: topk_idx, topk_weights and the number.
class Step {
 public:
  // choices_at: which argument is topk_idx.
  Outcome begin(const Call& call, size_t choices_at) {
    if (Outcome failed = held_.hold(call)) return failed;
    const LayerShape& shape = held_.layer().shape;
    if (Outcome failed = read_choices(call.in(choices_at), call.in(choices_at + 1), shape, &choices_)) return failed;
    choices_.number = number_in(call.in(choices_at + 2));
    if (Outcome failed = held_.layer().find(choices_, &routing)) return failed;
    moecclRoutingInfo_t info;
    if (Outcome failed = info_of(held_, routing, &info)) return failed;
    filled_ = info.n_rows * shape.row_bytes;
    return filled_ <= shape.room * shape.row_bytes
               ? Outcome{}
               : Failure{XLA_FFI_Error_Code_INTERNAL, "a routing has more rows than its layer's buffers"};
  }
  Outcome is_tokens(const char* name, const Buffer& buffer) const {
    return misfit(name, buffer, choices_.n_tokens * held_.layer().shape.row_bytes);
  }
  Outcome is_rows(const char* name, const Buffer& buffer) const {
    return misfit(name, buffer, held_.layer().shape.room * held_.layer().shape.row_bytes);
  }
  Outcome end(moecclResult_t result) const {
    return result == moecclSuccess ? Outcome{} : failure_of(result, held_.comm());
  }
  // Zeroes the rows behind R, so that products with them are zeros and no NaN.
  Outcome end(moecclResult_t result, const Buffer& rows) const {
    if (result == moecclSuccess) std::memset(static_cast<char*>(rows.data) + filled_, 0, bytes_of(rows) - filled_);
    return end(result);
  }

  moecclRouting_t routing = nullptr;

 private:
  Held held_;
  Choices choices_{};
  size_t filled_ = 0;  // bytes of R rows
};

// x[T, row], choices -> rows[room, row]
Outcome dispatch(const Call& call) {
  Step step;
  if (Outcome failed = step.begin(call, 1)) return failed;
  if (Outcome failed = step.is_tokens("x", call.in(0))) return failed;
  if (Outcome failed = step.is_rows("rows", call.out(0))) return failed;
  return step.end(moecclDispatch(step.routing, call.in(0).data, call.out(0).data, call.stream()), call.out(0));
}

// rows[room, row], choices -> y[T, row]
Outcome combine(const Call& call) {
  Step step;
  if (Outcome failed = step.begin(call, 1)) return failed;
  if (Outcome failed = step.is_rows("rows", call.in(0))) return failed;
  if (Outcome failed = step.is_tokens("y", call.out(0))) return failed;
  return step.end(moecclCombine(step.routing, call.in(0).data, call.out(0).data, call.stream()));
}

// gradient of rows[room, row], choices -> of x[T, row]
Outcome dispatch_backward(const Call& call) {
  Step step;
  if (Outcome failed = step.begin(call, 1)) return failed;
  if (Outcome failed = step.is_rows("the gradient of rows", call.in(0))) return failed;
  if (Outcome failed = step.is_tokens("the gradient of x", call.out(0))) return failed;
  return step.end(moecclDispatchBackward(step.routing, call.in(0).data, call.out(0).data, call.stream()));
}

// gradient of y[T, row], choices -> of rows[room, row]
Outcome combine_backward(const Call& call) {
  Step step;
  if (Outcome failed = step.begin(call, 1)) return failed;
  if (Outcome failed = step.is_tokens("the gradient of y", call.in(0))) return failed;
  if (Outcome failed = step.is_rows("the gradient of rows", call.out(0))) return failed;
  return step.end(
      moecclCombineBackward(step.routing, call.in(0).data, call.out(0).data, nullptr, nullptr, call.stream()),
      call.out(0));
}

// gradient of y[T, row], rows[room, row], choices -> of rows[room, row] and of topk_weights f32[T, k]
Outcome combine_backward_weights(const Call& call) {
  Step step;
  if (Outcome failed = step.begin(call, 2)) return failed;
  if (Outcome failed = step.is_tokens("the gradient of y", call.in(0))) return failed;
  if (Outcome failed = step.is_rows("rows", call.in(1))) return failed;
  if (Outcome failed = step.is_rows("the gradient of rows", call.out(0))) return failed;
  if (Outcome failed = misfit("the gradient of topk_weights", call.out(1), bytes_of(call.in(3)))) return failed;
  float none = 0;  // NULL, which a rank without tokens may have, would ask for no gradient
  float* weights = call.out(1).elements > 0 ? static_cast<float*>(call.out(1).data) : &none;
  return step.end(
      moecclCombineBackward(step.routing, call.in(0).data, call.out(0).data, call.in(1).data, weights, call.stream()),
      call.out(0));
}

}  // namespace
}  // namespace moeccl::jax

MOECCL_JAX_CPU_HANDLER(moecclJaxRoute, "route", 2, 4, moeccl::jax::route)
MOECCL_JAX_CPU_HANDLER(moecclJaxDispatch, "dispatch", 4, 1, moeccl::jax::dispatch)
MOECCL_JAX_CPU_HANDLER(moecclJaxCombine, "combine", 4, 1, moeccl::jax::combine)
MOECCL_JAX_CPU_HANDLER(moecclJaxDispatchBackward, "dispatch", 4, 1, moeccl::jax::dispatch_backward)
MOECCL_JAX_CPU_HANDLER(moecclJaxCombineBackward, "combine", 4, 1, moeccl::jax::combine_backward)
MOECCL_JAX_CPU_HANDLER(moecclJaxCombineBackwardWeights, "combine", 5, 2, moeccl::jax::combine_backward_weights)
