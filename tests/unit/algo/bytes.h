// SPDX-License-Identifier: Apache-2.0
// Counts the bytes that a rank's program moves, from its steps: the numbers of docs/algorithms.md.
#pragma once

#include "src/plan/binding.h"
#include "tests/unit/algo/shapes.h"

namespace moeccl::algo::testing {

struct Traffic {
  uint64_t put = 0;     // bytes written to other ranks
  uint64_t pulled = 0;  // bytes read from other ranks
  uint64_t local = 0;   // bytes copied or reduced from own memory
  uint32_t signals = 0;
  uint32_t waits = 0;

  friend bool operator==(const Traffic&, const Traffic&) = default;
};

// Returns the traffic of one rank over all chunks, with blocks of shape.count.
inline Traffic traffic(const plan::Plan& plan, uint32_t rank) {
  const plan::Program& program = plan.programs[rank];
  plan::Binding binding;
  binding.chunking = plan.chunking;
  binding.element_bytes = plan.shape.element_bytes;
  binding.count = plan.shape.count;
  binding.slot_elements = plan.chunking.chunk;
  Traffic t;
  for (const plan::Lane& lane : program.lanes) {
    for (const plan::Step& step : lane.steps) {
      t.signals += step.kind == plan::StepKind::kSignal && step.peer != rank;
      t.waits += step.kind == plan::StepKind::kWait && step.peer != rank;
      for (uint32_t i = 0; i < step.n_srcs; ++i) {
        const plan::Ref& src = program.srcs[step.first_src + i];
        for (uint32_t c = 0; c < plan.chunking.n_chunks; ++c) {
          const uint64_t bytes = plan::resolve(binding, program, src, binding.count, c).length * binding.element_bytes;
          (src.rank != rank ? t.pulled : step.dst.rank != rank ? t.put : t.local) += bytes;
        }
      }
    }
  }
  return t;
}

inline plan::Plan plan_of(moecclOp_t op, const char* name, const plan::Shape& shape, const plan::LevelTree& tree) {
  const Algorithm* algorithm = find(op, name);
  return algorithm == nullptr ? plan::Plan{} : build_all(*algorithm, shape, tree);
}

}  // namespace moeccl::algo::testing
