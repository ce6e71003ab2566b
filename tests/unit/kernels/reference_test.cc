// SPDX-License-Identifier: Apache-2.0
// Checks the reference itself: conversions against the formats' definitions, kernels against sums computed in double or
// by hand.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/unit/kernels/kernel_test_util.h"

namespace moeccl::kernels {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Returns the value of a finite pattern, from the format's definition.
double value_of(uint32_t magnitude, int mantissa_bits, int bias) {
  const int exponent = static_cast<int>(magnitude >> mantissa_bits);
  const double fraction = static_cast<double>(magnitude & ((1u << mantissa_bits) - 1)) / (1 << mantissa_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

struct Format {
  float (*decode)(uint32_t);
  uint32_t (*encode)(float);
  int mantissa_bits, bias;
  uint32_t sign, largest;  // patterns
  bool has_infinity;
};
constexpr Format kFormats[] = {{Fp16::decode, Fp16::encode, 10, 15, 0x8000, 0x7bff, true},
                               {Bf16::decode, Bf16::encode, 7, 127, 0x8000, 0x7f7f, true},
                               {Fp8e4m3::decode, Fp8e4m3::encode, 3, 7, 0x80, 0x7e, false},
                               {Fp8e5m2::decode, Fp8e5m2::encode, 2, 15, 0x80, 0x7b, true}};

TEST(FloatFormats, EveryFinitePatternHasItsDefinedValueAndSurvivesARoundTrip) {
  for (const Format& f : kFormats) {
    for (uint32_t m = 0; m <= f.largest; ++m) {
      const double expected = value_of(m, f.mantissa_bits, f.bias);
      ASSERT_EQ(f.decode(m), expected) << m;
      ASSERT_EQ(f.decode(m | f.sign), -expected) << m;
      ASSERT_EQ(f.encode(f.decode(m)), m);
      ASSERT_EQ(f.encode(f.decode(m | f.sign)), m | f.sign);
    }
  }
}

TEST(FloatFormats, PatternsAboveTheLargestAreInfinityOnceAndNans) {
  for (const Format& f : kFormats) {
    uint32_t m = f.largest + 1;
    if (f.has_infinity) {
      EXPECT_EQ(f.decode(m), kInf);
      EXPECT_EQ(f.encode(static_cast<float>(-kInf)), m | f.sign);
      ++m;
    }
    for (; m < f.sign; ++m) {
      ASSERT_TRUE(std::isnan(f.decode(m)));
      ASSERT_TRUE(std::isnan(f.decode(f.encode(f.decode(m)))));
    }
  }
}

// Between each two neighbours, the middle rounds to the even one, and a value just beside it to the nearer one.
TEST(FloatFormats, RoundsToNearestAndTiesToEven) {
  for (const Format& f : kFormats) {
    for (uint32_t m = 0; m < f.largest; ++m) {
      const double middle = (value_of(m, f.mantissa_bits, f.bias) + value_of(m + 1, f.mantissa_bits, f.bias)) / 2;
      const float tie = static_cast<float>(middle);
      if (tie != middle) continue;  // half a bf16 subnormal step is still a float, but guard the assumption
      ASSERT_EQ(f.encode(tie), m + (m & 1)) << m;
      ASSERT_EQ(f.encode(std::nextafter(tie, 0.0f)), m) << m;
      ASSERT_EQ(f.encode(std::nextafter(tie, INFINITY)), m + 1) << m;
      ASSERT_EQ(f.encode(-tie), (m + (m & 1)) | f.sign) << m;
    }
  }
}

TEST(FloatFormats, KnownPatterns) {
  EXPECT_EQ(Fp16::encode(1.0f), 0x3c00u);
  EXPECT_EQ(Fp16::encode(65504.0f), 0x7bffu);
  EXPECT_EQ(Fp16::encode(65519.0f), 0x7bffu);
  EXPECT_EQ(Fp16::encode(65520.0f), 0x7c00u);
  EXPECT_EQ(Fp16::encode(5.9604645e-8f), 0x0001u);
  EXPECT_EQ(Bf16::encode(1.0f), 0x3f80u);
  EXPECT_EQ(Bf16::encode(std::numeric_limits<float>::max()), 0x7f80u);
  EXPECT_EQ(Bf16::encode(-std::nanf("")) & 0x7fffu, 0x7fc0u);
  EXPECT_EQ(Fp8e4m3::encode(1.0f), 0x38u);
  EXPECT_EQ(Fp8e5m2::encode(1.0f), 0x3cu);
}

TEST(FloatFormats, E4m3SaturatesAndE5m2Overflows) {
  for (float big : {448.0f, 464.0f, 465.0f, 480.0f, 1e30f, INFINITY}) {
    EXPECT_EQ(Fp8e4m3::decode(Fp8e4m3::encode(big)), 448.0f) << big;
    EXPECT_EQ(Fp8e4m3::decode(Fp8e4m3::encode(-big)), -448.0f) << big;
  }
  EXPECT_EQ(Fp8e4m3::encode(NAN) & 0x7f, 0x7fu);
  EXPECT_EQ(Fp8e5m2::decode(Fp8e5m2::encode(61439.0f)), 57344.0f);
  EXPECT_EQ(Fp8e5m2::decode(Fp8e5m2::encode(61440.0f)), INFINITY);
  EXPECT_EQ(Fp8e5m2::decode(Fp8e5m2::encode(-INFINITY)), -INFINITY);
}

template <class T>
T reduce_two(int type, ReduceOp op, T a, T b, uint32_t divisor = 0) {
  const void* srcs[] = {&a, &b};
  T out;
  reference_table().reduce[type][static_cast<int>(op)](
      {.dst = &out, .srcs = srcs, .count = 1, .n_srcs = 2, .divisor = divisor});
  return out;
}

TEST(Reference, IntegersWrapAndDivideTowardZero) {
  EXPECT_EQ(reduce_two<int8_t>(moecclInt8, ReduceOp::kSum, 100, 100), -56);
  EXPECT_EQ(reduce_two<uint8_t>(moecclUint8, ReduceOp::kSum, 200, 100), 44);
  EXPECT_EQ(reduce_two<int64_t>(moecclInt64, ReduceOp::kProd, int64_t{1} << 62, 2), INT64_MIN);
  EXPECT_EQ(reduce_two<int32_t>(moecclInt32, ReduceOp::kSum, -4, -3, 2), -3);
  EXPECT_EQ(reduce_two<int8_t>(moecclInt8, ReduceOp::kSum, 60, 60, 4000000000u), 0);
  EXPECT_EQ(reduce_two<uint64_t>(moecclUint64, ReduceOp::kSum, UINT64_MAX - 1, 1, 2), UINT64_MAX / 2);
}

TEST(Reference, MaxAndMinKnowSignsOfTheirType) {
  EXPECT_EQ(reduce_two<int8_t>(moecclInt8, ReduceOp::kMax, -1, 1), 1);
  EXPECT_EQ(reduce_two<uint8_t>(moecclUint8, ReduceOp::kMax, 255, 1), 255);
  EXPECT_EQ(reduce_two<int64_t>(moecclInt64, ReduceOp::kMin, -1, 1), -1);
  EXPECT_EQ(reduce_two<uint64_t>(moecclUint64, ReduceOp::kMin, UINT64_MAX, 1), 1u);
}

TEST(Reference, MaxAndMinReturnNanWhenAnyInputIsNan) {
  for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    EXPECT_TRUE(std::isnan(reduce_two<float>(moecclFloat32, op, NAN, 1)));
    EXPECT_TRUE(std::isnan(reduce_two<float>(moecclFloat32, op, 1, NAN)));
    EXPECT_TRUE(std::isnan(reduce_two<double>(moecclFloat64, op, NAN, -kInf)));
    EXPECT_EQ(reduce_two<uint16_t>(moecclBfloat16, op, 0x3f80, 0x7fc0) & 0x7fff, 0x7fc0);
  }
}

// 256 + 1 + 1 + 1 in bf16 would stay 256 if each sum were rounded; in fp32 it is 259, which rounds once to 260.
TEST(Reference, NarrowFloatsAccumulateInFp32AndRoundOnce) {
  const uint16_t big = static_cast<uint16_t>(Bf16::encode(256)), one = static_cast<uint16_t>(Bf16::encode(1));
  const void* srcs[] = {&big, &one, &one, &one};
  uint16_t out = 0;
  reference_table().reduce[moecclBfloat16][0]({.dst = &out, .srcs = srcs, .count = 1, .n_srcs = 4});
  EXPECT_EQ(Bf16::decode(out), 260.0f);
}

TEST(Reference, ScalesAndDivisorAreAppliedAroundTheSum) {
  const double a[] = {1, 2, 3}, b[] = {10, 20, 30};
  const void* srcs[] = {a, b};
  Scalar scales[2];
  scales[0].f64 = 2;
  scales[1].f64 = 0.5;
  double out[3];
  reference_table().reduce[moecclFloat64][0](
      {.dst = out, .srcs = srcs, .scales = scales, .count = 3, .n_srcs = 2, .divisor = 4});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], (2 * a[i] + 0.5 * b[i]) / 4);
  const int32_t x = -7;
  int32_t y;
  Scalar s;
  s.i64 = -3;
  reference_table().scale_copy[moecclInt32](&y, &x, 1, s);
  EXPECT_EQ(y, 21);
}

TEST(Reference, ScaledIntegerRowsAreTruncated) {
  const int32_t src[] = {7, -7, 100, 3};
  const float weights[] = {0.5f, -1.0f};
  int32_t dst[4];
  CopyRowsArgs rows;
  rows.dst = dst;
  rows.src = src;
  rows.count = 2;
  rows.row_bytes = 2 * sizeof(int32_t);
  reference_table().scale_rows[moecclInt32]({.rows = rows, .weights = weights});
  EXPECT_EQ(std::vector<int32_t>(dst, dst + 4), (std::vector<int32_t>{3, -3, -100, -3}));
}

template <class T>
T scale_one(int type, T value, float weight) {
  T out;
  CopyRowsArgs rows;
  rows.dst = &out;
  rows.src = &value;
  rows.count = 1;
  rows.row_bytes = sizeof(T);
  reference_table().scale_rows[type]({.rows = rows, .weights = &weight});
  return out;
}

TEST(Reference, ScaledIntegersBeyond64BitsAreClampedThenCutToTheType) {
  EXPECT_EQ(scale_one<int64_t>(moecclInt64, INT64_MAX, 4.0f), INT64_MAX);
  EXPECT_EQ(scale_one<int64_t>(moecclInt64, INT64_MAX, -4.0f), INT64_MIN);
  EXPECT_EQ(scale_one<uint64_t>(moecclUint64, UINT64_MAX, 2.0f), UINT64_MAX);
  EXPECT_EQ(scale_one<uint64_t>(moecclUint64, 5, -1.0f), static_cast<uint64_t>(-5));
  EXPECT_EQ(scale_one<int64_t>(moecclInt64, 5, NAN), 0);
  EXPECT_EQ(scale_one<int8_t>(moecclInt8, 100, 2.0f), -56);
  EXPECT_EQ(scale_one<int32_t>(moecclInt32, 1, INFINITY), -1);  // the low bits of INT64_MAX
}

TEST(Reference, ScalarFromReadsEachTypeAsReductionsWantIt) {
  const int8_t i8 = -3;
  const uint32_t u32 = 4000000000u;
  const double f64 = 0.1;
  const uint16_t f16 = 0x3c00, bf16 = 0xbf80;
  const uint8_t e4m3 = 0x38, e5m2 = 0x3c;
  EXPECT_EQ(scalar_from(&i8, moecclInt8).i64, -3);
  EXPECT_EQ(scalar_from(&u32, moecclUint32).u64, 4000000000u);
  EXPECT_EQ(scalar_from(&f64, moecclFloat64).f64, 0.1);
  EXPECT_EQ(scalar_from(&f16, moecclFloat16).f32, 1.0f);
  EXPECT_EQ(scalar_from(&bf16, moecclBfloat16).f32, -1.0f);
  EXPECT_EQ(scalar_from(&e4m3, moecclFloat8e4m3).f32, 1.0f);
  EXPECT_EQ(scalar_from(&e5m2, moecclFloat8e5m2).f32, 1.0f);
}

TEST(Reference, RowSumsAgreeWithSumsInDouble) {
  Random random(21);
  constexpr size_t kRows = 50, kElements = 33, kTopK = 8, kOut = 20;
  std::vector<float> src(kRows * kElements), weights(kOut * kTopK), dst(kOut * kElements);
  for (float& v : src) v = static_cast<float>(random.normal());
  for (float& v : weights) v = static_cast<float>(random.normal());
  std::vector<RowTerm> terms(kOut * kTopK);
  std::vector<uint64_t> offsets{0};
  for (size_t i = 0; i < kOut; ++i) offsets.push_back((i + 1) * kTopK);
  for (RowTerm& t : terms) t.row = static_cast<uint32_t>(random.below(kRows));
  const void* base = src.data();
  for (bool grouped : {false, true}) {
    reference_table().reduce_rows[moecclFloat32]({.dst = dst.data(),
                                                  .bases = &base,
                                                  .offsets = offsets.data(),
                                                  .terms = terms.data(),
                                                  .weights = weights.data(),
                                                  .count = kOut,
                                                  .row_elements = kElements,
                                                  .grouped = grouped});
    for (size_t i = 0; i < kOut * kElements; ++i) {
      double sum = 0, magnitude = 0;
      for (size_t t = i / kElements * kTopK; t < (i / kElements + 1) * kTopK; ++t) {
        const double product = double{weights[t]} * double{src[terms[t].row * kElements + i % kElements]};
        sum += product;
        magnitude += std::abs(product);
      }
      ASSERT_NEAR(dst[i], sum, magnitude * kTopK * 0x1p-24);
    }
  }
}

// Sums one column of bf16 rows: values[t] with close[t].
float grouped_sum(const std::vector<float>& values, const std::vector<uint16_t>& close, bool grouped = true) {
  std::vector<uint16_t> rows;
  std::vector<RowTerm> terms;
  for (size_t t = 0; t < values.size(); ++t) {
    rows.push_back(static_cast<uint16_t>(Bf16::encode(values[t])));
    terms.push_back({.row = static_cast<uint32_t>(t), .segment = 0, .close = close[t]});
  }
  const uint64_t offsets[] = {0, terms.size()};
  const void* base = rows.data();
  uint16_t out = 0xffff;
  reference_table().reduce_rows[moecclBfloat16]({.dst = &out,
                                                 .bases = &base,
                                                 .offsets = offsets,
                                                 .terms = terms.data(),
                                                 .count = 1,
                                                 .row_elements = 1,
                                                 .grouped = grouped});
  return Bf16::decode(out);
}

// In bf16, 256 + 1 rounds to 256, so the sum shows where the groups end.
TEST(Reference, GroupsRoundWhereTheyEnd) {
  EXPECT_EQ(grouped_sum({256, 1, 1, 1}, {0, 0, 0, 0}), 260.0f);
  EXPECT_EQ(grouped_sum({256, 1, 1, 1}, {0, 1, 0, 0}), 258.0f);  // (256 + 1 -> 256) + (1 + 1)
  EXPECT_EQ(grouped_sum({256, 1, 1, 1}, {0, 1, 0, 0}, false), 260.0f);
  EXPECT_EQ(grouped_sum({256, 1, 1, 1}, {0, 2, 0, 0}), 258.0f);
  EXPECT_EQ(grouped_sum({256, 1, 256, 1}, {1, 2, 1, 0}), 512.0f);  // ((256) + (1) -> 256) + ((256) + (1) -> 256)
  EXPECT_EQ(grouped_sum({256, 1, 2, 3}, {1, 1, 1, 1}), 262.0f);    // groups of one: one plain sum, rounded once
}

TEST(Reference, AGroupOfOneTermPassesItsValueUnchanged) {
  for (float v : {-0.0f, 0.0f, INFINITY, 3.0f}) {
    for (uint16_t close = 0; close <= kMaxGroups; ++close) {
      const float sum = grouped_sum({v}, {close});
      EXPECT_EQ(sum, v);
      EXPECT_EQ(std::signbit(sum), std::signbit(v));
    }
  }
}

TEST(Reference, RowsWithoutTermsBecomeZeros) { EXPECT_EQ(grouped_sum({}, {}), 0.0f); }

TEST(Reference, DotProductsAgreeWithDouble) {
  Random random(22);
  constexpr size_t kElements = 1000;
  std::vector<float> a(kElements), b(kElements);
  double sum = 0, magnitude = 0;
  for (size_t i = 0; i < kElements; ++i) {
    a[i] = static_cast<float>(random.normal());
    b[i] = static_cast<float>(random.normal());
    sum += double{a[i]} * double{b[i]};
    magnitude += std::abs(double{a[i]} * double{b[i]});
  }
  float out;
  reference_table().dot_rows[moecclFloat32](
      {.out = &out, .a = a.data(), .b = b.data(), .count = 1, .row_elements = kElements});
  EXPECT_NEAR(out, sum, magnitude * 1e-6);
}

}  // namespace
}  // namespace moeccl::kernels
