// SPDX-License-Identifier: Apache-2.0
// The kernels that executors call, with pointers and counts but never ranks. kernels/host/reference.cc defines them.
// Overlays (AVX2, AVX-512) replace entries, and tests/unit/kernels/contract_test.cc compares them with the reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moeccl/types.h"

namespace moeccl::kernels {

// The arithmetic of a reduction. Avg is Sum with a divisor, and premulsum is Sum with scales; see ReduceArgs.
enum class ReduceOp : uint8_t { kSum, kProd, kMax, kMin };
inline constexpr int kNumReduceOps = 4;

// One element of the reduction's type, or a float for the 8- and 16-bit float types, in the low bytes.
union Scalar {
  float f32;
  double f64;
  int64_t i64;  // signed integer types, sign-extended
  uint64_t u64;
};

// Returns the element at `element` as a Scalar (a float for the 8- and 16-bit float types).
Scalar scalar_from(const void* element, moecclDataType_t type);

// Computes dst[i] = (srcs[0][i]*scale[0]) op (srcs[1][i]*scale[1]) op ... in this order, then divides by divisor. fp16,
// bf16 and fp8 accumulate in fp32 and round once (to nearest even) at the end; integers wrap; integer division
// truncates. Max and Min of floats return NaN when any input is NaN. dst may equal one of the srcs but must not
// partially overlap any.
struct ReduceArgs {
  void* dst = nullptr;
  const void* const* srcs = nullptr;  // [n_srcs]
  const Scalar* scales = nullptr;     // [n_srcs] or null; only with kSum. Products are rounded to the type
  size_t count = 0;                   // elements
  uint32_t n_srcs = 0;                // >= 1
  uint32_t divisor = 0;               // 0 or 1: none; only with kSum
  bool stream = false;                // dst will not be read soon, so non-temporal stores are allowed
  // The result is stored to each of these as well. Like dst, each may equal dst or one of the srcs. Valid only if the
  // table's reduces_to_many is set.
  void* const* copies = nullptr;  // [n_copies]
  uint32_t n_copies = 0;
};
using ReduceFn = void (*)(const ReduceArgs&);

// For i in [0, count), copies row (src_index ? src_index[i] : src_first + i) of src to row (dst_index ? dst_index[i] :
// dst_first + i) of dst. Rows are row_bytes long, which may be any size >= 1, and need no alignment. Destination rows
// are distinct, and src and dst do not overlap.
struct CopyRowsArgs {
  void* dst = nullptr;
  const void* src = nullptr;
  const uint32_t* dst_index = nullptr;
  const uint32_t* src_index = nullptr;
  size_t dst_first = 0, src_first = 0;
  size_t count = 0;
  size_t row_bytes = 0;
  bool stream = false;  // dst will not be read soon
};

// Same, with dst row = weights[i] * src row, computed in fp32 (fp64 for fp64; integers: through double, truncated; a
// weight of 1 changes nothing). Rows may be scaled in place: then dst is src, and the indices of both are equal.
struct ScaleRowsArgs {
  CopyRowsArgs rows;               // row_bytes must be a multiple of the type's size
  const float* weights = nullptr;  // [count]
};

// One term of a row sum: weight * row `row` of bases[segment].
struct RowTerm {
  uint32_t row = 0;
  uint16_t segment = 0;
  uint16_t close = 0;  // deterministic mode: how many nested groups end after this term (see ReduceRowsArgs)
};

// For i in [0, count), computes row (dst_index ? dst_index[i] : dst_first + i) of dst = sum over terms t in
// [offsets[i], offsets[i+1]) of weights[t] * row, in term order, in fp32 (fp64 for fp64 rows; integers accumulate in
// int64/uint64, with weights other than 1 through double), rounded once to the type. A row without terms is zero. When
// `grouped`, terms form nested groups, like partial sums at the levels of a tree. There are kMaxGroups accumulators,
// and a term is added to the innermost (index kMaxGroups-1). `close` = g means: for the g innermost accumulators, from
// the inside out, round the sum to the type, add it to the next outer accumulator and clear it. After the last term of
// a row, all are closed that way. A group of one term, or of one group, passes its value through unchanged (rounding is
// idempotent).
struct ReduceRowsArgs {
  void* dst = nullptr;
  const void* const* bases = nullptr;  // [number of segments]
  const uint64_t* offsets = nullptr;   // [count + 1]
  const RowTerm* terms = nullptr;      // indexed by offsets
  const float* weights = nullptr;      // same index; null: all ones
  const uint32_t* dst_index = nullptr;
  size_t dst_first = 0;
  size_t count = 0;
  size_t row_elements = 0;
  bool grouped = false;
  bool stream = false;
};
inline constexpr int kMaxGroups = 8;
using ReduceRowsFn = void (*)(const ReduceRowsArgs&);

// Computes out[i] = <row a_index[i] of a, row b_index[i] of b> in fp32 (fp64 sums for fp64 rows), for i in [0, count).
struct DotRowsArgs {
  float* out = nullptr;
  const void *a = nullptr, *b = nullptr;
  const uint32_t *a_index = nullptr, *b_index = nullptr;  // null: identity
  size_t count = 0;
  size_t row_elements = 0;
};

struct KernelTable {
  const char* name;
  void (*copy)(void* dst, const void* src, size_t bytes);         // through the caches
  void (*copy_stream)(void* dst, const void* src, size_t bytes);  // around the caches; a release orders its stores
  void (*scale_copy[MOECCL_NUM_DATA_TYPES])(void* dst, const void* src, size_t count, Scalar scale);  // dst may be src
  ReduceFn reduce[MOECCL_NUM_DATA_TYPES][kNumReduceOps];
  bool reduces_to_many;  // true if `reduce` uses ReduceArgs::copies
  void (*copy_rows)(const CopyRowsArgs&);
  void (*scale_rows[MOECCL_NUM_DATA_TYPES])(const ScaleRowsArgs&);
  ReduceRowsFn reduce_rows[MOECCL_NUM_DATA_TYPES];
  void (*dot_rows[MOECCL_NUM_DATA_TYPES])(const DotRowsArgs&);
};

// Returns the fastest table that this processor runs, chosen once. The caller applies MOECCL_KERNELS through
// select(name), which returns null for an unknown or unsupported name.
const KernelTable& best();
const KernelTable* select(const char* name);
std::span<const char* const> names();  // of this build's tables, fastest first; "reference" is the last

// Copies larger than this use copy_stream. Set from the measurement in perf/bench_kernels, see docs/decisions.md.
size_t stream_threshold_bytes();

}  // namespace moeccl::kernels
