// SPDX-License-Identifier: Apache-2.0
// The residual codec of experts (HybridEP, Section IV-B). An expert is the sum of what all experts share and a
// residual, of which only the largest elements are kept, as values and indices. The reference and the overlays write
// the same bytes.
//
// An encoded expert is a CodecHeader, then for each block of kCodecBlock elements (the last one is shorter) its k
// largest residuals by magnitude, with ties going to the lower index: k values of the type, then k 16-bit indices,
// ascending. With ratio 1, nothing is dropped, and the expert itself follows the header.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>

#include "moeccl/types.h"

namespace moeccl::kernels {

inline constexpr uint32_t kCodecBlock = 1 << 16;
inline constexpr uint32_t kCodecMagic = 0x3152534du;  // "MSR1"
inline constexpr uint32_t kCodecLanes = 32;           // partial sums that fix the order of summation everywhere

struct CodecHeader {
  uint32_t magic = kCodecMagic;
  uint32_t type = 0;
  uint64_t count = 0;
  double ratio = 1;
  uint64_t unused = 0;
};
static_assert(sizeof(CodecHeader) == 32);

// Looks for candidates in a block, with residual = expert - shared in fp32. Writes the index and the residual of each
// element whose magnitude, as the bits of a float without sign, is at least `threshold`, in ascending order. Adds
// squares to the lanes (element i to lane i % kCodecLanes).
struct CodecScan {
  const void *expert = nullptr, *shared = nullptr;
  uint32_t count = 0;  // at most kCodecBlock
  uint32_t threshold = 0;
  uint32_t* index = nullptr;  // [count + kCodecLanes]: whole registers are stored, so the end is scratch
  float* residual = nullptr;  // same shape
  float *residual_squares = nullptr, *expert_squares = nullptr;  // [kCodecLanes]
};
using CodecScanFn = uint32_t (*)(const CodecScan&);  // returns the number of candidates

struct CodecTable {
  const char* name;
  CodecScanFn scan_fp32, scan_bf16;
};
const CodecTable& best_codec();
const CodecTable* select_codec(const char* name);  // null: unsupported on this processor

struct CodecShape {
  moecclDataType_t type = moecclFloat32;  // or moecclBfloat16
  uint64_t count = 0;
  double ratio = 1;  // >= 1: bytes of the expert over bytes of its values and indices
};
bool codec_supports(moecclDataType_t type);
// Returns how many elements of a block of n are kept.
uint32_t codec_kept(const CodecShape& shape, uint32_t n);
CodecHeader codec_header(const CodecShape& shape);
uint64_t codec_bytes(const CodecShape& shape);

struct CodecError {
  double max_dropped = 0;  // the largest residual that was dropped
  double relative = 0;     // |expert - decoded| / |expert|, in the Euclidean norm
};
// Returns CodecError::relative from the sums of squares; NaN if one of them is or if their
// squares overflow, so that bad weights do not look exact.
inline double relative_loss(double lost, double whole) {
  if (std::isinf(whole)) return std::numeric_limits<double>::quiet_NaN();
  return whole == 0 && lost == 0 ? 0 : std::sqrt(lost / whole);
}
// encoded: [codec_bytes()]. The call uses about a megabyte of scratch.
CodecError codec_encode(const CodecTable& table, const CodecShape& shape, const void* expert, const void* shared,
                        void* encoded);

// Sets elements [first, first + count) of an expert to the values to be encoded. False ends the encoding.
using CodecUpdate = std::function<bool(uint32_t expert, uint64_t first, uint64_t count)>;
struct CodecExperts {
  const void *experts = nullptr, *shared = nullptr;  // [n][count], [count]
  void* encoded = nullptr;                           // [n][codec_bytes()]
  CodecError* errors = nullptr;                      // [n], or null
  uint32_t n = 1;
};
// Encodes experts that share one. `update` is called for each piece of each expert, in ascending order, before the
// piece is first read, so that it is still in the cache; empty: the experts already have their values. Experts take
// turns, block by block, so that each block of the shared expert is read from memory once. Returns false if an update
// ended the encoding: `encoded` is then undefined.
bool codec_encode(const CodecTable& table, const CodecShape& shape, const CodecExperts& experts,
                  const CodecUpdate& update);
// Copies expert[count], with elements of element_bytes, to to[]. Each block is copied after its update, which is passed
// the expert's number.
bool codec_copy(const void* expert, void* to, uint64_t count, size_t element_bytes, uint32_t number,
                const CodecUpdate& update);

// Computes out = shared + residual. Returns false, with out undefined, if `encoded` was not encoded for this shape.
// `out` may be `shared` itself: the residual is then added in place, which touches only the elements that were kept.
bool codec_decode(const CodecShape& shape, const void* encoded, uint64_t bytes, const void* shared, void* out);

// Takes values[count] of elements [first, first + count), valid only during the call. False ends the decoding.
using CodecUse = std::function<bool(uint64_t first, uint64_t count, const void* values)>;
// The part of an expert that is decoded for a use: elements [first, first + count) in pieces of whole rows of `row`
// elements; `row` divides count. A piece has about kCodecPiece elements, or one row.
struct CodecRange {
  uint64_t first = 0, count = 0, row = 1;
};
inline constexpr uint32_t kCodecPiece = 1 << 14;
// Passes on codec_decode()'s values of the range, piece by piece and in order, from a buffer that stays in the cache
// (ratio 1: from `encoded`). Returns false, without passing on any piece, if codec_encode() did not write `encoded`.
bool codec_decode(const CodecShape& shape, const void* encoded, uint64_t bytes, const void* shared,
                  const CodecRange& range, const CodecUse& use);
// Does the same for an expert that is not encoded: values[], with elements of element_bytes.
void codec_use(const void* values, size_t element_bytes, const CodecRange& range, const CodecUse& use);
// Returns true if codec_decode() of the whole expert would accept it.
bool codec_valid(const CodecShape& shape, const void* encoded, uint64_t bytes);

// Returns a checksum of the shared expert, which is equal on ranks that hold the same. See checksum.h.
uint64_t checksum(const void* data, uint64_t bytes);

}  // namespace moeccl::kernels
