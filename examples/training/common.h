// SPDX-License-Identifier: Apache-2.0
// Helpers of both training examples: random numbers that are the same everywhere, and the check of a call's result.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <moeccl/moeccl.h>

namespace training {

// A small generator that gives the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  float unit() { return static_cast<float>(next() >> 40) / 16777216.0f; }
  float normal() {  // a sum of uniforms, because library functions may differ in the last bit
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += unit();
    return sum;
  }

 private:
  uint64_t state_;
};

using Floats = std::vector<float>;
inline Floats random_matrix(size_t n, float scale, uint64_t seed) {
  Random random(seed);
  Floats m(n);
  for (float& v : m) v = scale * random.normal();
  return m;
}

inline void check(moecclResult_t result, const char* call, moecclComm_t comm = nullptr) {
  if (result == moecclSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, moecclGetLastError(comm));
  std::exit(1);  // the library tells the other ranks that this one is gone
}

}  // namespace training
