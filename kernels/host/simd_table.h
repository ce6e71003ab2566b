// SPDX-License-Identifier: Apache-2.0
// The table of an overlay: the reference's, with every entry replaced that vectors make faster.
#pragma once

#include "kernels/host/simd_copy.h"
#include "kernels/host/simd_reduce.h"
#include "kernels/host/simd_rows.h"

namespace moeccl::kernels::simd {

template <class B>
void add_reductions(KernelTable& t) {
  t.scale_copy[B::kType] = scale_copy<B>;
  t.reduce[B::kType][static_cast<int>(ReduceOp::kSum)] = reduce<B, ReduceOp::kSum>;
  t.reduce[B::kType][static_cast<int>(ReduceOp::kProd)] = reduce<B, ReduceOp::kProd>;
  t.reduce[B::kType][static_cast<int>(ReduceOp::kMax)] = reduce<B, ReduceOp::kMax>;
  t.reduce[B::kType][static_cast<int>(ReduceOp::kMin)] = reduce<B, ReduceOp::kMin>;
}

template <class B>
void add_float(KernelTable& t) {
  add_reductions<B>(t);
  t.scale_rows[B::kType] = scale_rows<B>;
  t.reduce_rows[B::kType] = reduce_rows<B>;
  t.dot_rows[B::kType] = dot_rows<B>;
}

template <class Isa>
KernelTable make_table(const char* name) {
  KernelTable t = reference_table();
  t.name = name;
  t.copy = copy<Isa>;
  t.copy_stream = copy_stream<Isa>;
  t.copy_rows = copy_rows<Isa>;
  add_reductions<Integer<Isa, uint8_t, int8_t, moecclInt8>>(t);
  add_reductions<Integer<Isa, uint8_t, uint8_t, moecclUint8>>(t);
  add_reductions<Integer<Isa, uint32_t, int32_t, moecclInt32>>(t);
  add_reductions<Integer<Isa, uint32_t, uint32_t, moecclUint32>>(t);
  add_reductions<Integer<Isa, uint64_t, int64_t, moecclInt64>>(t);
  add_reductions<Integer<Isa, uint64_t, uint64_t, moecclUint64>>(t);
  add_float<Fp16<Isa>>(t);
  add_float<Fp32<Isa>>(t);
  add_float<Fp64<Isa>>(t);
  add_float<Bf16<Isa>>(t);
  add_float<Fp8e4m3<Isa>>(t);
  add_float<Fp8e5m2<Isa>>(t);
  return t;
}

}  // namespace moeccl::kernels::simd
