// SPDX-License-Identifier: Apache-2.0
// Entry points: top-k residual coding for the float types of gradients and experts.
#include "kernels/cuda/sparse.cuh"

using namespace moeccl::cuda;

#define MOECCL_SPARSE(number, Type)                                            \
  MOECCL_KERNEL(moeccl_encode_##number, EncodeKernelArgs) { encode<Type>(a); } \
  MOECCL_KERNEL(moeccl_decode_add_##number, DecodeKernelArgs) { decode_add<Type>(a); }
MOECCL_SPARSE(6, Float16)
MOECCL_SPARSE(7, Float32)
MOECCL_SPARSE(9, Bfloat16)
MOECCL_SPARSE(10, Float8e4m3)
MOECCL_SPARSE(11, Float8e5m2)

#define MOECCL_CODEC(number, Type)                                                           \
  MOECCL_KERNEL(moeccl_codec_encode_##number, CodecEncodeArgs) { codec_encode<Type>(a); }    \
  MOECCL_KERNEL(moeccl_codec_decode_##number, CodecDecodeArgs) { codec_decode<Type>(a); }    \
  MOECCL_KERNEL(moeccl_codec_add_##number, CodecAddArgs) { codec_add<Type>(a); }             \
  MOECCL_KERNEL(moeccl_gradient_encode_##number, GradientArgs) { gradient_encode<Type>(a); } \
  MOECCL_KERNEL(moeccl_gradient_keep_##number, GradientArgs) { gradient_keep<Type>(a); }
MOECCL_CODEC(7, Float32)
MOECCL_CODEC(9, Bfloat16)
MOECCL_KERNEL(moeccl_codec_check, CodecCheckArgs) { codec_check(a, whole_grid()); }
MOECCL_KERNEL(moeccl_checksum, ChecksumArgs) { checksum(a, whole_grid()); }
