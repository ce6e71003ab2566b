// SPDX-License-Identifier: Apache-2.0
#include "perf/common/pattern.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace perf {
namespace {

double decode(const DataType& type, const char* element) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, type.bytes);
  if (!type.is_float) {
    const int shift = 64 - 8 * static_cast<int>(type.bytes);
    return type.is_signed ? static_cast<double>(static_cast<int64_t>(bits << shift) >> shift)
                          : static_cast<double>(bits);
  }
  const int biased = static_cast<int>(bits >> type.mantissa_bits & ((1u << type.exponent_bits) - 1));
  if (biased == 0) return 0;
  const double fraction = static_cast<double>(bits & ((uint64_t{1} << type.mantissa_bits) - 1));
  const double value =
      std::ldexp(1 + std::ldexp(fraction, -type.mantissa_bits), biased - (1 << (type.exponent_bits - 1)) + 1);
  return bits >> (type.exponent_bits + type.mantissa_bits) & 1 ? -value : value;
}

double combine(RedOp op, double a, double b) {
  switch (op) {
    case RedOp::kProd:
      return a * b;
    case RedOp::kMax:
      return std::max(a, b);
    case RedOp::kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// Reduces in one of two orders and checks every partial result for exactness.
void check_reduction(const Reduction& r, bool backwards) {
  const DataType& type = data_type(r.type);
  std::vector<Pattern> inputs;
  for (int rank = 0; rank < r.n_ranks; rank++)
    inputs.push_back(reduction_input(r, backwards ? r.n_ranks - 1 - rank : rank));
  Pattern expected = reduction_result(r);
  for (size_t i = 0; i < kPeriod; i += 7) {
    double value = 0;
    for (int n = 0; n < r.n_ranks; n++) {
      const int rank = backwards ? r.n_ranks - 1 - n : n;
      double x = decode(type, inputs[static_cast<size_t>(n)].at(i));
      if (r.op == RedOp::kMulSum) x *= premul_scalar(rank);
      value = n == 0 ? x : combine(r.op, value, x);
      ASSERT_LE(r.op == RedOp::kProd ? 0 : std::fabs(value), static_cast<double>(type.exact)) << type.name();
      char rounded[8] = {};
      store(type, value, rounded);
      ASSERT_EQ(decode(type, rounded), value) << type.name() << " " << red_op_name(r.op);
    }
    if (r.op == RedOp::kAvg) value /= r.n_ranks;
    ASSERT_EQ(decode(type, expected.at(i)), value) << type.name() << " " << red_op_name(r.op) << " " << r.n_ranks;
  }
}

TEST(Pattern, EveryReductionIsExactInEveryTypeAndOrder) {
  for (int t = 0; t < MOECCL_NUM_DATA_TYPES; t++)
    for (const RedOp op : parse_red_ops("all"))
      for (const int n : {1, 2, 3, 5, 8, 33})
        for (const bool backwards : {false, true})
          check_reduction({.type = static_cast<moecclDataType_t>(t), .op = op, .n_ranks = n, .seed = 9}, backwards);
}

TEST(Pattern, RanksBringDifferentData) {
  const Reduction r = {.type = moecclFloat32, .op = RedOp::kSum, .n_ranks = 4, .seed = 1};
  std::vector<float> one(kPeriod), other(kPeriod);
  reduction_input(r, 0).fill(one.data(), 0, kPeriod);
  reduction_input(r, 1).fill(other.data(), 0, kPeriod);
  EXPECT_NE(one, other);
}

TEST(Pattern, FindsWhatItFilledAcrossTheSeam) {
  const Pattern pattern = random_pattern(2, 5, 3);
  std::vector<uint16_t> data(3 * kPeriod);
  pattern.fill(data.data(), kPeriod - 5, data.size());
  EXPECT_EQ(pattern.count_wrong(data.data(), kPeriod - 5, data.size()), 0u);
  data[2] ^= 1;
  data[2 * kPeriod] ^= 256;
  EXPECT_EQ(pattern.count_wrong(data.data(), kPeriod - 5, data.size()), 2u);
}

TEST(Pattern, SeesABlockAtAWrongPlace) {
  const Pattern pattern = random_pattern(4, 5, 3);
  std::vector<uint32_t> data(4096);
  for (const size_t shift : {1, 64, 1024, 65536}) {
    pattern.fill(data.data(), shift, data.size());
    EXPECT_GT(pattern.count_wrong(data.data(), 0, data.size()), 4000u) << shift;
  }
}

}  // namespace
}  // namespace perf
