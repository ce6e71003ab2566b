// SPDX-License-Identifier: Apache-2.0
// A rank's program in the form that the persistent kernel reads (kernels/cuda/walk_args.h): flat records, with a mark
// where the blocks of a lane must meet because a step uses memory that an earlier step of the lane has used. The result
// is a pure function of the program.
#pragma once

#include <vector>

#include "kernels/cuda/walk_args.h"
#include "src/base/status.h"
#include "src/plan/plan.h"

namespace moeccl::exec {

struct KernelProgram {
  std::vector<moeccl::cuda::WalkLane> lanes;
  std::vector<moeccl::cuda::WalkStep> steps;
  std::vector<moeccl::cuda::WalkRef> refs;
  std::vector<moeccl::cuda::WalkTotal> totals;

  size_t bytes() const;
  // Writes everything as one image of bytes() and returns where each part begins in it.
  struct Offsets {
    size_t lanes, steps, refs, totals;
  };
  Offsets write(std::byte* image) const;
};

// Fails with Unsupported for a program with more lanes than kWalkMostLanes or a reduction of more than kMaxSources
// buffers; the message says which.
Result<KernelProgram> compile_kernel_program(const plan::Program& program);

}  // namespace moeccl::exec
