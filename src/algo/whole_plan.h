// SPDX-License-Identifier: Apache-2.0
// Makes the plan of all ranks with a builder that makes one rank's program at a time.
#pragma once

#include "src/plan/plan.h"

namespace moeccl::algo {

// `builder` must have name(), chunking(), hash() and build(rank).
template <class Builder>
plan::Plan whole_plan(const Builder& builder, const plan::Shape& shape) {
  plan::Plan plan;
  plan.algorithm = builder.name();
  plan.shape = shape;
  plan.chunking = builder.chunking();
  plan.hash = builder.hash();
  for (uint32_t r = 0; r < shape.n_ranks; ++r) plan.programs.push_back(builder.build(r));
  return plan;
}

}  // namespace moeccl::algo
