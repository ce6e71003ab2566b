// SPDX-License-Identifier: Apache-2.0
// The residual codec of experts (HybridEP, Section IV-B): an expert is what all experts share plus a residual, of which
// only the largest elements are kept, as values and indices. Reference and overlays give the same bytes.
//
// An encoded expert: a CodecHeader, then for each block of kCodecBlock elements (the last one shorter) its k largest
// residuals by magnitude, ties to the lower index: k values of the type, then k 16-bit indices, ascending. With ratio 1
// nothing is dropped: the header is followed by the expert itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moeccl/types.h"

namespace moeccl::kernels {

inline constexpr uint32_t kCodecBlock = 1 << 16;
inline constexpr uint32_t kCodecMagic = 0x3152534du;  // "MSR1"
inline constexpr uint32_t kCodecLanes = 32;  // partial sums, so that the order of summation is the same everywhere

struct CodecHeader {
  uint32_t magic = kCodecMagic;
  uint32_t type = 0;
  uint64_t count = 0;
  double ratio = 1;
  uint64_t unused = 0;
};
static_assert(sizeof(CodecHeader) == 32);

// Looks for candidates in a block: residual = expert - shared in fp32. Writes index and residual of each element whose
// magnitude, as the bits of a float without sign, is at least `threshold`, in ascending order; adds squares to the
// lanes (element i to lane i % kCodecLanes).
struct CodecScan {
  const void *expert = nullptr, *shared = nullptr;
  uint32_t count = 0;  // at most kCodecBlock
  uint32_t threshold = 0;
  uint32_t* index = nullptr;  // [count + kCodecLanes]: whole registers are stored, what follows is scratch
  float* residual = nullptr;  // the same
  float *residual_squares = nullptr, *expert_squares = nullptr;  // [kCodecLanes]
};
using CodecScanFn = uint32_t (*)(const CodecScan&);  // how many candidates

struct CodecTable {
  const char* name;
  CodecScanFn scan_fp32, scan_bf16;
};
const CodecTable& best_codec();
const CodecTable* select_codec(const char* name);  // "reference", "avx2", "avx512"; null: not on this processor

struct CodecShape {
  moecclDataType_t type = moecclFloat32;  // or moecclBfloat16
  uint64_t count = 0;
  double ratio = 1;  // >= 1: bytes of the expert over bytes of values and indices
};
bool codec_supports(moecclDataType_t type);
// Elements of a block of n that are kept.
uint32_t codec_kept(const CodecShape& shape, uint32_t n);
CodecHeader codec_header(const CodecShape& shape);
uint64_t codec_bytes(const CodecShape& shape);

struct CodecError {
  double max_dropped = 0;  // the largest residual that was dropped
  double relative = 0;     // |expert - decoded| / |expert|, in the Euclidean norm
};
// encoded: [codec_bytes()]. Uses about a megabyte of scratch for the time of the call.
CodecError codec_encode(const CodecTable& table, const CodecShape& shape, const void* expert, const void* shared,
                        void* encoded);
// out = shared + residual. False: `encoded` is not what codec_encode() wrote for this shape; out is then undefined.
bool codec_decode(const CodecShape& shape, const void* encoded, uint64_t bytes, const void* shared, void* out);
// Whether codec_decode() would accept it.
bool codec_valid(const CodecShape& shape, const void* encoded, uint64_t bytes);

// Of the shared expert: equal on ranks that hold the same. See checksum.h.
uint64_t checksum(const void* data, uint64_t bytes);

}  // namespace moeccl::kernels
