// SPDX-License-Identifier: Apache-2.0
// One call of a handler by XLA: its buffers, attributes and stream, and the way back for errors.
#pragma once

#include <array>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "bindings/jax/abi.h"
#include "moeccl/moeccl.h"

namespace moeccl::jax {

struct Failure {
  XLA_FFI_Error_Code code;
  std::string text;
};
// Nothing if the call succeeded.
using Outcome = std::optional<Failure>;

// The failure of a C function, with the communicator's sentence, or the thread's for NULL.
Failure failure_of(moecclResult_t result, moecclComm_t comm);

// How MoECCL moves an element of one of XLA's types.
struct Element {
  moecclDataType_t type;
  size_t parts;  // elements of `type` in one: a complex number has two
  size_t bytes() const { return parts * moecclTypeSize(type); }
};
std::optional<Element> element_of(XLA_FFI_DataType type);

// A buffer of the call, dense and in row-major order.
struct Buffer {
  void* data = nullptr;
  size_t elements = 0;
  XLA_FFI_DataType type{};
};

class Call {
 public:
  static constexpr size_t kMostBuffers = 8;

  // Reads the frame's buffers without the tokens, which only order calls. Fails if they are not n_in and n_out, or if
  // the frame is not one that this library can read.
  Outcome read(const XLA_FFI_CallFrame& frame, bool on_stream, size_t n_in, size_t n_out);

  const Buffer& in(size_t n) const { return in_[n]; }
  const Buffer& out(size_t n) const { return out_[n]; }
  moecclStream_t stream() const { return stream_; }
  // Gets an integer attribute; fails if it is missing.
  Outcome attribute(std::string_view name, int64_t* value) const;

 private:
  const XLA_FFI_CallFrame* frame_ = nullptr;
  std::array<Buffer, kMostBuffers> in_, out_;
  moecclStream_t stream_ = nullptr;
};

// Whether the call asks for the handler's metadata, which this function then fills in.
bool answers_metadata(const XLA_FFI_CallFrame& frame);
XLA_FFI_Error* report(const XLA_FFI_CallFrame& frame, const char* name, const Failure& failure);

// What XLA calls. body: Outcome(const Call&).
template <typename Body>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* frame, const char* name, bool on_stream, size_t n_in, size_t n_out,
                      Body body) noexcept {
  if (answers_metadata(*frame) || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return nullptr;
  try {
    Call call;
    Outcome failed = call.read(*frame, on_stream, n_in, n_out);
    if (!failed) failed = body(call);
    return failed ? report(*frame, name, *failed) : nullptr;
  } catch (const std::exception& e) {
    return report(*frame, name, {XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, e.what()});
  }
}

}  // namespace moeccl::jax

// A handler for the CPU, which blocks, and one for CUDA, in the order of XLA's stream.
#define MOECCL_JAX_CPU_HANDLER(symbol, name, n_in, n_out, body)                      \
  extern "C" MOECCL_API XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {            \
    return moeccl::jax::handle(frame, name, /*on_stream=*/false, n_in, n_out, body); \
  }
#define MOECCL_JAX_HANDLERS(symbol, name, n_in, n_out, body)                        \
  MOECCL_JAX_CPU_HANDLER(symbol, name, n_in, n_out, body)                           \
  extern "C" MOECCL_API XLA_FFI_Error* symbol##OnStream(XLA_FFI_CallFrame* frame) { \
    return moeccl::jax::handle(frame, name, /*on_stream=*/true, n_in, n_out, body); \
  }
