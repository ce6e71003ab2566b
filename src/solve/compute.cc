// SPDX-License-Identifier: Apache-2.0
#include "src/solve/compute.h"

#include "src/solve/checks.h"

namespace moeccl::solve {

Result<moecclComputeShape_t> checked_shape(const moecclComputeShape_t& given) {
  moecclComputeShape_t s = given;
  constexpr int64_t kMost = int64_t{1} << 40;
  MOECCL_TRY(above_0({{"shape.throughput", s.throughput}}));
  MOECCL_TRY(between("shape.tokens", s.tokens, 0, kMost));
  MOECCL_TRY(between("shape.sequence", s.sequence, 0, kMost));
  MOECCL_TRY(between("shape.hidden", s.hidden, 1, kMost));
  MOECCL_TRY(between("shape.n_dense", s.n_dense, 0, 1 << 20));
  MOECCL_TRY(between("shape.matrices", s.matrices, 0, 16));
  MOECCL_TRY(between("shape.ffn", s.ffn, 0, kMost));
  MOECCL_TRY(between("shape.expert_ffn", s.expert_ffn, 0, kMost));
  MOECCL_TRY(between("shape.top_k", s.top_k, 0, 65535));
  if (s.matrices == 0) s.matrices = 2;
  if (s.top_k == 0) s.top_k = 1;
  return s;
}

ComputeTime compute_time(const moecclComputeShape_t& s) {
  const auto rows = static_cast<double>(s.tokens), h = static_cast<double>(s.hidden);
  const auto gemm = [&s](double l, double m, double n) { return l * m * n / s.throughput; };  // Eq. 1
  // Query, key, value and output of all heads, then scores and the values that they weigh.
  const double attention = 4 * gemm(rows, h, h) + 2 * gemm(rows, static_cast<double>(s.sequence), h);
  const double ffn = s.matrices * gemm(rows, static_cast<double>(s.ffn), h);
  ComputeTime t;
  t.pre_expert_s = (s.n_dense + 1.0) * attention + s.n_dense * ffn;  // Eq. 2
  t.expert_s = s.matrices * gemm(rows * s.top_k, static_cast<double>(s.expert_ffn), h);
  return t;
}

}  // namespace moeccl::solve
