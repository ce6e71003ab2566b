// SPDX-License-Identifier: Apache-2.0
// Seeded test data whose results are known without communicating: every buffer repeats a table of kPeriod elements, so
// that filling and checking run at the speed of memory, and every sum and product is exact in its type, in any order.
#ifndef PERF_COMMON_PATTERN_H_
#define PERF_COMMON_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "perf/common/data_types.h"

namespace perf {

// A prime, so that a block at a wrong place is noticed, whatever round number the mistake is.
inline constexpr size_t kPeriod = 4093;

// A stable 64-bit mix of three numbers.
uint64_t mix(uint64_t a, uint64_t b, uint64_t c = 0);

// Element i of the endless buffer is element i mod kPeriod of the table.
class Pattern {
 public:
  Pattern() = default;
  explicit Pattern(size_t element_bytes) : element_bytes_(element_bytes), bytes_(kPeriod * element_bytes) {}

  char* at(size_t index) { return bytes_.data() + index * element_bytes_; }
  // Writes elements first .. first + count - 1.
  void fill(void* data, size_t first, size_t count) const;
  // Returns how many of `count` elements differ from elements first .. first + count - 1.
  uint64_t count_wrong(const void* data, size_t first, size_t count) const;

 private:
  size_t element_bytes_ = 1;
  std::vector<char> bytes_;
};

// Returns arbitrary bits, for operations that only move data.
Pattern random_pattern(size_t element_bytes, uint64_t seed, int rank);

struct Reduction {
  moecclDataType_t type;
  RedOp op;
  int n_ranks;
  uint64_t seed;
};
// Return the contribution of `rank`, and the value that every element becomes.
Pattern reduction_input(const Reduction& reduction, int rank);
Pattern reduction_result(const Reduction& reduction);

}  // namespace perf

#endif  // PERF_COMMON_PATTERN_H_
