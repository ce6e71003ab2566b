// SPDX-License-Identifier: Apache-2.0
// A rank's program as the persistent kernel reads it (kernels/cuda/walk_args.h): flat records, with a mark where the
// blocks of a lane must meet because a step uses memory that an earlier one of the lane has used. A pure function of
// the program.
#pragma once

#include <vector>

#include "kernels/cuda/walk_args.h"
#include "src/base/status.h"
#include "src/plan/plan.h"

namespace moeccl::exec {

struct KernelProgram {
  std::vector<cuda::WalkLane> lanes;
  std::vector<cuda::WalkStep> steps;
  std::vector<cuda::WalkRef> refs;
  std::vector<cuda::WalkTotal> totals;

  size_t bytes() const;
  // As one image of bytes(); where each part begins in it.
  struct Offsets {
    size_t lanes, steps, refs, totals;
  };
  Offsets write(std::byte* image) const;
};

// Unsupported for a program with more lanes than kWalkMostLanes or a reduction of more than kMaxSources buffers: the
// sentence says which.
Result<KernelProgram> compile_kernel_program(const plan::Program& program);

}  // namespace moeccl::exec
