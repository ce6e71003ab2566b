// SPDX-License-Identifier: Apache-2.0
// Compares bindings/jax/abi.h with XLA's own header; abi_test.py compiles it with the header of the installed jaxlib.
#include <cstddef>
#include <cstdint>

namespace ours {
#include "bindings/jax/abi.h"  // first: XLA's header has macros of the same names
}

#include "xla/ffi/api/c_api.h"

#define SAME(type, field)                                                                                           \
  static_assert(                                                                                                    \
      offsetof(ours::type, field) == offsetof(::type, field) && sizeof(ours::type::field) == sizeof(::type::field), \
      #type "." #field)
#define SAME_VALUE(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name), #name)

SAME(XLA_FFI_Extension_Base, struct_size);
SAME(XLA_FFI_Extension_Base, type);
SAME(XLA_FFI_Extension_Base, next);
SAME(XLA_FFI_Api_Version, major_version);
SAME(XLA_FFI_Api_Version, minor_version);
static_assert(sizeof(ours::XLA_FFI_Api_Version) == sizeof(::XLA_FFI_Api_Version));
SAME(XLA_FFI_Error_Create_Args, message);
SAME(XLA_FFI_Error_Create_Args, errc);
SAME(XLA_FFI_Error_GetMessage_Args, error);
SAME(XLA_FFI_Error_GetMessage_Args, message);
SAME(XLA_FFI_Error_Destroy_Args, error);
SAME(XLA_FFI_Buffer, dtype);
SAME(XLA_FFI_Buffer, data);
SAME(XLA_FFI_Buffer, rank);
SAME(XLA_FFI_Buffer, dims);
SAME(XLA_FFI_ByteSpan, ptr);
SAME(XLA_FFI_ByteSpan, len);
SAME(XLA_FFI_Scalar, dtype);
SAME(XLA_FFI_Scalar, value);
SAME(XLA_FFI_Args, size);
SAME(XLA_FFI_Args, types);
SAME(XLA_FFI_Args, args);
SAME(XLA_FFI_Rets, size);
SAME(XLA_FFI_Rets, types);
SAME(XLA_FFI_Rets, rets);
SAME(XLA_FFI_Attrs, size);
SAME(XLA_FFI_Attrs, types);
SAME(XLA_FFI_Attrs, names);
SAME(XLA_FFI_Attrs, attrs);
SAME(XLA_FFI_CallFrame, extension_start);
SAME(XLA_FFI_CallFrame, api);
SAME(XLA_FFI_CallFrame, ctx);
SAME(XLA_FFI_CallFrame, stage);
SAME(XLA_FFI_CallFrame, args);
SAME(XLA_FFI_CallFrame, rets);
SAME(XLA_FFI_CallFrame, attrs);
SAME(XLA_FFI_Stream_Get_Args, ctx);
SAME(XLA_FFI_Stream_Get_Args, stream);
SAME(XLA_FFI_Metadata, api_version);
SAME(XLA_FFI_Metadata, traits);
SAME(XLA_FFI_Metadata_Extension, metadata);
SAME(XLA_FFI_Api, api_version);
SAME(XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(XLA_FFI_Api, XLA_FFI_Error_GetMessage);
SAME(XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME(XLA_FFI_Api, XLA_FFI_Stream_Get);

SAME_VALUE(XLA_FFI_Extension_Metadata);
SAME_VALUE(XLA_FFI_Error_Code_CANCELLED);
SAME_VALUE(XLA_FFI_Error_Code_INVALID_ARGUMENT);
SAME_VALUE(XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
SAME_VALUE(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
SAME_VALUE(XLA_FFI_Error_Code_FAILED_PRECONDITION);
SAME_VALUE(XLA_FFI_Error_Code_ABORTED);
SAME_VALUE(XLA_FFI_Error_Code_UNIMPLEMENTED);
SAME_VALUE(XLA_FFI_Error_Code_INTERNAL);
SAME_VALUE(XLA_FFI_Error_Code_UNAVAILABLE);
SAME_VALUE(XLA_FFI_DataType_PRED);
SAME_VALUE(XLA_FFI_DataType_S8);
SAME_VALUE(XLA_FFI_DataType_S16);
SAME_VALUE(XLA_FFI_DataType_S32);
SAME_VALUE(XLA_FFI_DataType_S64);
SAME_VALUE(XLA_FFI_DataType_U8);
SAME_VALUE(XLA_FFI_DataType_U16);
SAME_VALUE(XLA_FFI_DataType_U32);
SAME_VALUE(XLA_FFI_DataType_U64);
SAME_VALUE(XLA_FFI_DataType_F16);
SAME_VALUE(XLA_FFI_DataType_F32);
SAME_VALUE(XLA_FFI_DataType_F64);
SAME_VALUE(XLA_FFI_DataType_C64);
SAME_VALUE(XLA_FFI_DataType_BF16);
SAME_VALUE(XLA_FFI_DataType_TOKEN);
SAME_VALUE(XLA_FFI_DataType_C128);
SAME_VALUE(XLA_FFI_DataType_F8E5M2);
SAME_VALUE(XLA_FFI_DataType_F8E4M3FN);
SAME_VALUE(XLA_FFI_ArgType_BUFFER);
SAME_VALUE(XLA_FFI_RetType_BUFFER);
SAME_VALUE(XLA_FFI_AttrType_SCALAR);
SAME_VALUE(XLA_FFI_ExecutionStage_EXECUTE);
static_assert(XLA_FFI_API_MAJOR == 0, "layouts of another major version");
