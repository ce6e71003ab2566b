// SPDX-License-Identifier: Apache-2.0
// A fast 64-bit hash for agreement and look-up (plan hashes, names, checksums). Not for secrets; see handshake.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace moeccl {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit changes every output bit with probability
// ~1/2.
constexpr uint64_t hash_mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

// The order of the arguments matters: combine(combine(h, a), b) != combine(combine(h, b), a).
constexpr uint64_t hash_combine(uint64_t seed, uint64_t value) {
  return hash_mix((seed ^ value) + 0x9e3779b97f4a7c15u + (seed << 6));
}

// Hashes eight bytes at a time. The result is the same on every (little-endian) machine.
inline uint64_t hash_bytes(const void* data, size_t n_bytes, uint64_t seed = 0) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t hash = hash_combine(seed, n_bytes);
  for (; n_bytes >= 8; at += 8, n_bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    hash = hash_combine(hash, word);
  }
  if (n_bytes > 0) {
    uint64_t word = 0;
    std::memcpy(&word, at, n_bytes);
    hash = hash_combine(hash, word);
  }
  return hash;
}
inline uint64_t hash_bytes(std::span<const std::byte> bytes, uint64_t seed = 0) {
  return hash_bytes(bytes.data(), bytes.size(), seed);
}
inline uint64_t hash_string(std::string_view text, uint64_t seed = 0) {
  return hash_bytes(text.data(), text.size(), seed);
}

}  // namespace moeccl
