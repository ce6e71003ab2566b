// SPDX-License-Identifier: Apache-2.0
#include "bindings/jax/call.h"

#include <algorithm>

namespace moeccl::jax {
namespace {

XLA_FFI_Error_Code code_of(moecclResult_t result) {
  switch (result) {
    case moecclInvalidArgument:
    case moecclMismatch:
      return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case moecclInvalidUsage:
      return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case moecclRemoteError:
      return XLA_FFI_Error_Code_UNAVAILABLE;
    case moecclTimeout:
      return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case moecclAborted:
      return XLA_FFI_Error_Code_ABORTED;
    case moecclOutOfMemory:
      return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case moecclUnsupported:
      return XLA_FFI_Error_Code_UNIMPLEMENTED;
    default:
      return XLA_FFI_Error_Code_INTERNAL;
  }
}

// Collects the buffers of one direction; `things` are XLA_FFI_Buffer, as all `kinds` say. Returns how many there are,
// or more than there is room for if any is something else.
template <typename Kind>
size_t collect(int64_t size, const Kind* kinds, void** things, std::array<Buffer, Call::kMostBuffers>& into) {
  size_t n = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (kinds[i] != Kind{1}) return Call::kMostBuffers + 1;
    const XLA_FFI_Buffer& given = *static_cast<const XLA_FFI_Buffer*>(things[i]);
    if (given.dtype == XLA_FFI_DataType_TOKEN) continue;
    if (n == Call::kMostBuffers) return n + 1;
    size_t elements = 1;
    for (int64_t d = 0; d < given.rank; ++d) elements *= static_cast<size_t>(given.dims[d]);
    into[n++] = {given.data, elements, given.dtype};
  }
  return n;
}

// Reads an error that XLA gave to this library, which then owns it, and destroys it.
std::string text_of(const XLA_FFI_Api& api, XLA_FFI_Error* error) {
  XLA_FFI_Error_GetMessage_Args get{sizeof get, nullptr, error, nullptr};
  api.XLA_FFI_Error_GetMessage(&get);
  std::string text = get.message == nullptr ? "" : get.message;
  XLA_FFI_Error_Destroy_Args destroy{sizeof destroy, nullptr, error};
  api.XLA_FFI_Error_Destroy(&destroy);
  return text;
}

}  // namespace

Failure failure_of(moecclResult_t result, moecclComm_t comm) {
  return {code_of(result), std::string(moecclGetErrorString(result)) + ": " + moecclGetLastError(comm)};
}

std::optional<Element> element_of(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_U8:
      return Element{moecclUint8, 1};
    case XLA_FFI_DataType_S8:
      return Element{moecclInt8, 1};
    case XLA_FFI_DataType_S16:  // only moved: moeccl.jax sums no 16-bit integers
    case XLA_FFI_DataType_U16:
      return Element{moecclUint8, 2};
    case XLA_FFI_DataType_S32:
      return Element{moecclInt32, 1};
    case XLA_FFI_DataType_U32:
      return Element{moecclUint32, 1};
    case XLA_FFI_DataType_S64:
      return Element{moecclInt64, 1};
    case XLA_FFI_DataType_U64:
      return Element{moecclUint64, 1};
    case XLA_FFI_DataType_F16:
      return Element{moecclFloat16, 1};
    case XLA_FFI_DataType_F32:
      return Element{moecclFloat32, 1};
    case XLA_FFI_DataType_F64:
      return Element{moecclFloat64, 1};
    case XLA_FFI_DataType_BF16:
      return Element{moecclBfloat16, 1};
    case XLA_FFI_DataType_C64:  // sums of complex numbers are sums of their parts
      return Element{moecclFloat32, 2};
    case XLA_FFI_DataType_C128:
      return Element{moecclFloat64, 2};
    case XLA_FFI_DataType_F8E4M3FN:
      return Element{moecclFloat8e4m3, 1};
    case XLA_FFI_DataType_F8E5M2:
      return Element{moecclFloat8e5m2, 1};
    case XLA_FFI_DataType_TOKEN:
      break;
  }
  return std::nullopt;
}

Outcome Call::read(const XLA_FFI_CallFrame& frame, bool on_stream, size_t n_in, size_t n_out) {
  frame_ = &frame;
  if (frame.struct_size < sizeof(XLA_FFI_CallFrame) || frame.api->api_version.major_version != XLA_FFI_API_MAJOR)
    return Failure{XLA_FFI_Error_Code_UNIMPLEMENTED,
                   "this jaxlib's XLA FFI is version " + std::to_string(frame.api->api_version.major_version) + "." +
                       std::to_string(frame.api->api_version.minor_version) +
                       ", and MoECCL knows version 0.1 to 0.3: use a MoECCL and a jaxlib of one time"};
  const size_t in = collect(frame.args.size, frame.args.types, frame.args.args, in_),
               out = collect(frame.rets.size, frame.rets.types, frame.rets.rets, out_);
  if (in != n_in || out != n_out)
    return Failure{XLA_FFI_Error_Code_INVALID_ARGUMENT, "the call has " + std::to_string(in) + " arguments and " +
                                                            std::to_string(out) + " results, and the handler takes " +
                                                            std::to_string(n_in) + " and " + std::to_string(n_out) +
                                                            ": use moeccl.jax and libmoeccl-jax.so of one version"};
  if (!on_stream) return {};
  XLA_FFI_Stream_Get_Args get{sizeof get, nullptr, frame.ctx, nullptr};
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&get); error != nullptr)
    return Failure{XLA_FFI_Error_Code_INTERNAL, "XLA has no stream for this call: " + text_of(*frame.api, error)};
  stream_ = static_cast<moecclStream_t>(get.stream);
  return {};
}

Outcome Call::attribute(std::string_view name, int64_t* value) const {
  const XLA_FFI_Attrs& attrs = frame_->attrs;
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) != name) continue;
    if (attrs.types[i] != XLA_FFI_AttrType_SCALAR) break;
    const XLA_FFI_Scalar& scalar = *static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i]);
    if (scalar.dtype != XLA_FFI_DataType_S64) break;
    *value = *static_cast<const int64_t*>(scalar.value);
    return {};
  }
  return Failure{XLA_FFI_Error_Code_INVALID_ARGUMENT, "the call has no int64 attribute '" + std::string(name) +
                                                          "': use moeccl.jax and libmoeccl-jax.so of one version"};
}

bool answers_metadata(const XLA_FFI_CallFrame& frame) {
  for (auto* extension = frame.extension_start; extension != nullptr; extension = extension->next) {
    if (extension->type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    // XLA accepts handlers of its own version and of some older ones. All that this library reads is in each version,
    // so it names XLA's own as far as it knows it. XLA 0.1 (jaxlib 0.6) passes no interface in this query.
    metadata.api_version.major_version = XLA_FFI_API_MAJOR;
    metadata.api_version.minor_version =
        frame.api == nullptr ? 1 : std::min<int>(XLA_FFI_API_MINOR, frame.api->api_version.minor_version);
    // No trait: XLA does not capture the call in a CUDA graph, where a collective could block.
    metadata.traits = 0;
    return true;
  }
  return false;
}

XLA_FFI_Error* report(const XLA_FFI_CallFrame& frame, const char* name, const Failure& failure) {
  std::string text;
  try {
    text = "moeccl." + std::string(name) + ": " + failure.text;
  } catch (const std::exception&) {  // no memory for the sentence
  }
  XLA_FFI_Error_Create_Args create{sizeof create, nullptr, text.c_str(), failure.code};
  return frame.api->XLA_FFI_Error_Create(&create);
}

}  // namespace moeccl::jax
