// SPDX-License-Identifier: Apache-2.0
// A checksum that many threads can compute together, with the same result on host and device: a sum over 64-bit words,
// each mixed with its position; the last word is padded with zeros. It finds accidental differences, not forgery.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOECCL_ANYWHERE __host__ __device__
#else
#define MOECCL_ANYWHERE
#endif

namespace moeccl::kernels {

// Returns the term of word `place`. The constants are those of splitmix64.
MOECCL_ANYWHERE inline uint64_t checksum_term(uint64_t word, uint64_t place) {
  uint64_t x = word + (place + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  return x ^ x >> 31;
}

}  // namespace moeccl::kernels
