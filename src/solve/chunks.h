// SPDX-License-Identifier: Apache-2.0
// Chooses how many chunks an AlltoAll under tensor parallelism is cut into, and which of MoNTA's strategies runs it.
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Result<moecclChunkProblem_t> checked(const moecclChunkProblem_t& problem);
// These take checked problems.
double chunk_us(const moecclChunkProblem_t& problem, moecclChunkStrategy_t strategy, int32_t n_chunks);
void solve_chunks(const moecclChunkProblem_t& problem, moecclChunkAnswer_t* answer);

}  // namespace moeccl::solve
