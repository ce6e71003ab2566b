// SPDX-License-Identifier: Apache-2.0
// Sample placement (NetMoE, Section 3): the device that each sample goes to when one layer's gather brings it back.
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"
#include "src/solve/arena.h"

namespace moeccl::solve {

inline constexpr int32_t kMostSamples = 1 << 24;

// Fills in numeric defaults and checks everything that can be checked; arrays remain the caller's.
Result<moecclSampleProblem_t> checked(const moecclSampleProblem_t& problem);
// Checks that a placement's devices are in range and that each has as many samples as now.
Status check_placement(const moecclSampleProblem_t& problem, const int32_t* placement);

// These take checked problems.
size_t sample_bytes(const moecclSampleProblem_t& problem);
void solve_samples(const moecclSampleProblem_t& problem, int32_t* placement, moecclSampleAnswer_t* answer,
                   Arena& arena);
void evaluate_samples(const moecclSampleProblem_t& problem, const int32_t* placement, moecclSampleAnswer_t* answer,
                      Arena& arena);

// Returns the group of `i` when n things are laid out contiguously in n_groups, as evenly as possible: the first n %
// n_groups groups have one more.
inline int32_t even_group(int64_t i, int64_t n, int64_t n_groups) {
  const int64_t small = n / n_groups, larger = n % n_groups;
  if (i < larger * (small + 1)) return static_cast<int32_t>(i / (small + 1));
  return static_cast<int32_t>(larger + (i - larger * (small + 1)) / small);
}

}  // namespace moeccl::solve
