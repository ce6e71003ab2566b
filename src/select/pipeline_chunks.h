// SPDX-License-Identifier: Apache-2.0
// Decides into how many chunks a TensorAllToAll is cut: feeds MoNTA's solver (src/solve/chunks.h) from the tree and the
// profile.
#pragma once

#include <vector>

#include "moeccl/solve.h"
#include "src/plan/plan.h"
#include "src/plan/profile.h"

namespace moeccl::comm {

// The problem of a message of `block_bytes` for each group. Its curves point into this object.
class ChunkProblem {
 public:
  ChunkProblem(const plan::LevelTree& tree, const plan::Profile& profile, uint64_t block_bytes);
  ChunkProblem(const ChunkProblem&) = delete;
  ChunkProblem& operator=(const ChunkProblem&) = delete;
  const moecclChunkProblem_t& problem() const { return problem_; }

 private:
  struct Points {
    std::vector<double> bytes, efficiency;
  };
  // Returns how much of `bytes_per_ns` a level reaches according to calibration's measurements.
  moecclCurve_t curve(const plan::Profile& profile, uint32_t level, double bytes_per_ns, Points& points);

  moecclChunkProblem_t problem_ = MOECCL_CHUNK_PROBLEM_INIT;
  Points inter_, intra_;
};

// Returns all 1 if there is nothing to exchange.
plan::PipelineChunks pipeline_chunks(const plan::LevelTree& tree, const plan::Profile& profile, uint64_t block_bytes);

}  // namespace moeccl::comm
