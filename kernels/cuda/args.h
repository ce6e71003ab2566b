// SPDX-License-Identifier: Apache-2.0
// Arguments of the CUDA kernels, one packed struct each, shared by host and device. The host table's entry of the same
// name defines what a kernel computes (kernels/table.h). Pointers are addresses that the device can use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::cuda {

struct CopyArgs {
  void* dst;
  const void* src;
  size_t bytes;
};

// The same as kernels::Scalar.
union ScalarBits {
  float f32;
  double f64;
  uint64_t u64;
};

// The most sources of a reduction that the launch itself can carry. More take several launches: see
// src/exec/cuda/stream_engine.cc.
inline constexpr uint32_t kMaxSources = 64;
struct ReduceKernelArgs {
  void* dst;
  size_t count;
  uint32_t n_srcs;
  uint32_t divisor;
  uint32_t op;  // kernels::ReduceOp
  uint32_t scaled;
  const void* srcs[kMaxSources];
  ScalarBits scales[kMaxSources];
};

struct RowsKernelArgs {
  void* dst;
  const void* src;
  const uint32_t *dst_index, *src_index;
  size_t dst_first, src_first;
  size_t count, row_bytes;
  const float* weights;  // scale_rows
};

struct RowTermBits {
  uint32_t row;
  uint16_t segment, close;
};
struct ReduceRowsKernelArgs {
  void* dst;
  const uint64_t* offsets;
  const RowTermBits* terms;
  const float* weights;
  const uint32_t* dst_index;
  size_t dst_first, count, row_elements;
  uint32_t n_bases, grouped;
  const void* const* bases;  // [n_bases]: a list like the others, as there may be a segment for each rank
};

struct DotRowsKernelArgs {
  float* out;
  const void *a, *b;
  const uint32_t *a_index, *b_index;
  size_t count, row_elements;
};

// Top-k residual coding (HybridEP's shared-residual compression). For each of n_segments segments of `length` elements,
// r = value - base (+ carry), in fp32. The `keep` elements with the largest |r| (NaN precedes all, and the lower index
// wins a tie) are written in ascending index order: index[s * keep + i], value[s * keep + i] = r rounded to the type.
// With a carry, carry = r - what was sent (error feedback); an element that was not sent keeps all of r. Decode
// computes out = base, then out[index] = round(base[index] + value) for what was sent. out may equal base.
struct EncodeKernelArgs {
  const void* in;
  const void* base;  // null: zeros
  float* carry;      // null: no carry
  uint32_t* index;
  void* value;
  size_t length;
  uint32_t n_segments, keep;
};
struct DecodeKernelArgs {
  void* out;
  const void* base;
  const uint32_t* index;
  const void* value;
  size_t length;
  uint32_t n_segments, keep;
};

// The residual codec of experts, byte for byte as kernels/codec.h describes it (except NaNs). One block of the launch
// handles each kCodecBlock elements.
struct CodecHeaderBits {
  uint64_t word[4];
};
struct CodecError {
  double lost, whole;   // sums of squares: of what was dropped, of the expert
  uint32_t dropped, _;  // the largest residual that was dropped, as the bits of a float
};
struct CodecEncodeArgs {
  const void *expert, *shared;
  void* encoded;
  CodecError* error;  // of each block
  size_t count;
  uint32_t keep, keep_last;  // of a whole block, of the last block
  CodecHeaderBits header;
};
struct CodecDecodeArgs {
  void* out;  // must not equal shared
  const void *shared, *encoded;
  size_t count;
  uint32_t keep, keep_last;
};
// The compressed return of gradients (moeccl/gradient.h): n gradients, each encoded to zeros as round(gradient +
// remainder). The same arguments serve the encoding and, after it, the update of the remainders.
struct GradientArgs {
  const void* gradients;              // [][count]
  float* remainders;                  // [n][count]
  const uint32_t *which, *remainder;  // [n]: the index among the gradients, and among the remainders
  void* encoded;                      // [n][expert_bytes]
  size_t count, expert_bytes;
  uint32_t n, keep, keep_last;
  CodecHeaderBits header;  // all 0: the encoded gradients have theirs
};
// out[n][count] += the decoded gradients.
struct CodecAddArgs {
  void* out;
  const void* encoded;  // [n][expert_bytes]
  size_t count, expert_bytes;
  uint32_t n, keep, keep_last;
};
// Sets *bad = 1 when an expert has another header, or its last block (only there can it be) has too large an index.
struct CodecCheckArgs {
  const void* encoded;
  uint32_t* bad;
  size_t n_experts, expert_bytes;
  uint32_t keep_last, n_last;  // n_last 0: the last block is whole
  CodecHeaderBits header;
};
// Sets sum[block of the launch] to its part of kernels::checksum().
struct ChecksumArgs {
  const void* data;
  uint64_t* sum;
  size_t bytes;
};

}  // namespace moeccl::cuda
