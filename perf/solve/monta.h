// SPDX-License-Identifier: Apache-2.0
// MoNTA's cluster as its paper describes it: 2 nodes of 8 A800, 25 GB/s between them and 200 GB/s inside, t = 8, e = 2.
#pragma once

#include <moeccl/moeccl.h>

namespace perf::monta {

// r1 is that of Table 8 and Eq. 12, and so are r2 and r3 of O1 and O2. Two quantities that the paper mentions but does
// not print are fitted to its choices: r2 of O3, which the copy beside the AllGather lowers, most where chunks are
// small; and the cost of each chunk of a pipeline while lanes and ranks wait for each other.
struct A800 {
  double inter_bytes[3] = {8e6, 32e6, 256e6}, inter[3] = {0.427, 0.632, 0.741};
  double intra_bytes[3] = {64e6, 256e6, 2048e6}, intra[3] = {0.726, 0.776, 0.803};
  double copy_bytes[1] = {64e6}, copy[1] = {0.8};
  double beside_bytes[3] = {64e6, 1024e6, 2048e6}, beside[3] = {0.60, 0.70, 0.76};
  double chunk_us = 300;

  // Fig. 14: four chunks for O2 and O3. Table 8 has 256 MB at 8K tokens.
  moecclChunkProblem_t problem(double tokens) const {
    moecclChunkProblem_t p = MOECCL_CHUNK_PROBLEM_INIT;
    p.bytes = 256e6 * tokens / 8192;
    p.tensor = 8, p.expert = 2;
    p.inter_bandwidth = 25e9, p.intra_bandwidth = 200e9, p.copy_bandwidth = 1.6e12;
    p.inter = {3, inter_bytes, inter};
    p.intra = {3, intra_bytes, intra};
    p.copy = {1, copy_bytes, copy};
    p.o3.intra = {3, beside_bytes, beside};
    p.o2.chunk_us = p.o3.chunk_us = chunk_us;
    p.max_chunks = 4;
    return p;
  }
};

}  // namespace perf::monta
