// SPDX-License-Identifier: Apache-2.0
// Random numbers: the kernel's for keys and nonces, and a small seeded generator for everything that must be
// repeatable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/status.h"

namespace moeccl {

// Fills `to` from getrandom(). Fails only when the kernel cannot supply random bytes.
Status random_bytes(void* to, size_t n_bytes);

// SplitMix64 (Steele, Lea, Flood 2014). Equal seeds give equal sequences on every machine. Must not be used for
// secrets.
class SplitMix64 {
 public:
  using result_type = uint64_t;
  explicit constexpr SplitMix64(uint64_t seed) : state_(seed) {}

  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t{0}; }
  constexpr uint64_t operator()() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Returns a value in 0 .. bound-1; bound must be > 0. The multiplication has a bias of bound / 2^32, which does not
  // matter for tests.
  constexpr uint64_t below(uint64_t bound) {
    return bound > 0xffffffffu ? (*this)() % bound : (((*this)() >> 32) * bound) >> 32;
  }
  // Returns a value in [0, 1).
  constexpr double unit() { return static_cast<double>((*this)() >> 11) * 0x1.0p-53; }

 private:
  uint64_t state_;
};

}  // namespace moeccl
