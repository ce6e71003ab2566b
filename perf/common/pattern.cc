// SPDX-License-Identifier: Apache-2.0
#include "perf/common/pattern.h"

#include <algorithm>
#include <cstring>

namespace perf {
namespace {

// Returns a uniform integer in lo..hi.
int64_t pick(uint64_t random, int64_t lo, int64_t hi) {
  return lo + static_cast<int64_t>(random % static_cast<uint64_t>(hi - lo + 1));
}

// Returns a contribution to a sum. Any order of addition stays within the exact integers of the type.
int64_t sum_value(const DataType& type, const Reduction& r, uint64_t random, int rank, size_t index) {
  const int scale = r.op == RedOp::kMulSum ? 2 : 1;
  const int64_t each = std::min<int64_t>(type.exact / scale / r.n_ranks, 1000);
  if (each >= 1) return pick(random, type.is_signed ? -each : 0, each);
  // There are more ranks than exact integers, so only as many ranks as fit contribute a one.
  const int64_t stride = (r.n_ranks * scale + type.exact - 1) / type.exact;
  return (rank + static_cast<int64_t>(index)) % stride == 0 ? 1 : 0;
}

// One rank contributes 3, two contribute 2, one contributes -1: the product has two significant bits in any order.
int64_t prod_value(const DataType& type, const Reduction& r, int rank, size_t index) {
  switch ((static_cast<size_t>(rank) + index) % static_cast<size_t>(std::max(r.n_ranks, 4))) {
    case 0:
      return 3;
    case 1:
      return type.is_signed ? -1 : 1;
    case 2:
    case 3:
      return 2;
    default:
      return 1;
  }
}

// All ranks contribute a common value, but one contributes one more and its neighbour one less, so that the mean is the
// common value.
int64_t avg_value(const DataType& type, const Reduction& r, int rank, size_t index) {
  const int64_t limit = type.exact / r.n_ranks - 2;
  const int64_t high = std::clamp<int64_t>(limit, type.is_signed ? 0 : 1, 1000);
  const bool fits = limit >= high;
  const int64_t common = fits ? pick(mix(r.seed, index, 77), type.is_signed ? -high : 1, high) : 0;
  const size_t place = (static_cast<size_t>(rank) + index) % static_cast<size_t>(r.n_ranks);
  if (r.n_ranks == 1 || (!fits && !type.is_signed) || place > 1) return common;
  return place == 0 ? common + 1 : common - 1;
}

int64_t value_of(const Reduction& r, int rank, size_t index) {
  const DataType& type = data_type(r.type);
  const uint64_t random = mix(r.seed, static_cast<uint64_t>(rank), index);
  switch (r.op) {
    case RedOp::kSum:
    case RedOp::kMulSum:
      return sum_value(type, r, random, rank, index);
    case RedOp::kProd:
      return prod_value(type, r, rank, index);
    case RedOp::kAvg:
      return avg_value(type, r, rank, index);
    case RedOp::kMax:
    case RedOp::kMin:
      break;
  }
  const int64_t limit = std::min<int64_t>(type.exact, 100);
  return pick(random, type.is_signed ? -limit : 0, limit);
}

int64_t reduce_at(const Reduction& r, size_t index) {
  int64_t result = value_of(r, 0, index) * (r.op == RedOp::kMulSum ? premul_scalar(0) : 1);
  for (int rank = 1; rank < r.n_ranks; rank++) {
    const int64_t v = value_of(r, rank, index);
    switch (r.op) {
      case RedOp::kSum:
      case RedOp::kAvg:
        result += v;
        break;
      case RedOp::kMulSum:
        result += v * premul_scalar(rank);
        break;
      case RedOp::kProd:
        result *= v;
        break;
      case RedOp::kMax:
        result = std::max(result, v);
        break;
      case RedOp::kMin:
        result = std::min(result, v);
        break;
    }
  }
  return r.op == RedOp::kAvg ? result / r.n_ranks : result;
}

}  // namespace

// The finalizer of splitmix64 (Steele, Lea, Flood 2014), applied to a combination of the three.
uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b * 0xC2B2AE3D27D4EB4Fu + c * 0x165667B19E3779F9u + 0x27D4EB2F165667C5u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

void Pattern::fill(void* data, size_t first, size_t count) const {
  char* out = static_cast<char*>(data);
  for (size_t at = first % kPeriod; count > 0; at = 0) {
    const size_t n = std::min(count, kPeriod - at);
    std::memcpy(out, bytes_.data() + at * element_bytes_, n * element_bytes_);
    out += n * element_bytes_;
    count -= n;
  }
}

uint64_t Pattern::count_wrong(const void* data, size_t first, size_t count) const {
  const char* in = static_cast<const char*>(data);
  uint64_t wrong = 0;
  for (size_t at = first % kPeriod; count > 0; at = 0) {
    const size_t n = std::min(count, kPeriod - at);
    const char* expected = bytes_.data() + at * element_bytes_;
    if (std::memcmp(in, expected, n * element_bytes_) != 0)
      for (size_t i = 0; i < n; i++)
        wrong += std::memcmp(in + i * element_bytes_, expected + i * element_bytes_, element_bytes_) != 0;
    in += n * element_bytes_;
    count -= n;
  }
  return wrong;
}

Pattern random_pattern(size_t element_bytes, uint64_t seed, int rank) {
  Pattern pattern(element_bytes);
  for (size_t i = 0; i < kPeriod; i++) {
    const uint64_t bits = mix(seed, static_cast<uint64_t>(rank) + 1000003, i);
    std::memcpy(pattern.at(i), &bits, element_bytes);
  }
  return pattern;
}

Pattern reduction_input(const Reduction& reduction, int rank) {
  const DataType& type = data_type(reduction.type);
  Pattern pattern(type.bytes);
  for (size_t i = 0; i < kPeriod; i++) store(type, static_cast<double>(value_of(reduction, rank, i)), pattern.at(i));
  return pattern;
}

Pattern reduction_result(const Reduction& reduction) {
  const DataType& type = data_type(reduction.type);
  Pattern pattern(type.bytes);
  for (size_t i = 0; i < kPeriod; i++) store(type, static_cast<double>(reduce_at(reduction, i)), pattern.at(i));
  return pattern;
}

}  // namespace perf
