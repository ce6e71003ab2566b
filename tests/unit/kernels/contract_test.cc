// SPDX-License-Identifier: Apache-2.0
// Compares copy, reduce and scale_copy of every overlay with the reference. rows_contract_test.cc has the row kernels.
#include "tests/unit/kernels/kernel_test_util.h"

namespace moeccl::kernels {
namespace {

constexpr int kRounds = 60;

using CopyContract = OverlayTest;
using ReduceContract = OverlayTest;

INSTANTIATE_TEST_SUITE_P(Overlays, CopyContract, testing::ValuesIn(overlays()));
INSTANTIATE_TEST_SUITE_P(Overlays, ReduceContract, testing::ValuesIn(overlays()));

TEST_P(CopyContract, CopiesAnyLengthAtAnyAlignment) {
  Random random(1);
  for (auto copy : {overlay().copy, overlay().copy_stream}) {
    for (size_t bytes = 0; bytes < 1200; bytes += bytes < 300 ? 1 : 37) {
      const Buffer src = random.elements(moecclUint8, bytes);
      Buffer dst(bytes, random.misalignment());
      copy(dst.data(), src.data(), bytes);
      ASSERT_EQ(difference(moecclUint8, src, dst), "") << bytes << " bytes";
    }
  }
}

// copy has a separate path between 2 KiB and 1 MiB.
TEST_P(CopyContract, CopiesLargeBlocksAtAnyAlignment) {
  Random random(2);
  for (const size_t bytes : {2047, 2048, 2049, 4095, 4096, 5000, 65536 + 17, (1 << 20) - 1, 1 << 20, (1 << 20) + 1}) {
    for (int i = 0; i < 4; ++i) {
      const Buffer src = random.elements(moecclUint8, bytes);
      Buffer dst(bytes, random.misalignment());
      overlay().copy(dst.data(), src.data(), bytes);
      ASSERT_EQ(difference(moecclUint8, src, dst), "") << bytes << " bytes";
    }
  }
}

TEST_P(CopyContract, CopyingNothingAcceptsNull) {
  overlay().copy(nullptr, nullptr, 0);
  overlay().copy_stream(nullptr, nullptr, 0);
}

struct Case {
  int type = 0;
  ReduceOp op = ReduceOp::kSum;
  size_t count = 0;
  uint32_t divisor = 0;
  bool stream = false;
  std::vector<Buffer> srcs{};
  std::vector<Scalar> scales{};
};

Scalar random_scale(int type, Random& random) {
  Scalar s{};
  if (type == moecclFloat64)
    s.f64 = random.normal();
  else if (is_float(type))
    s.f32 = static_cast<float>(random.normal());
  else
    s.u64 = random.bits();
  return s;
}

Case random_case(int type, ReduceOp op, Random& random) {
  Case c{.type = type, .op = op, .count = random.count(), .stream = random.chance(50)};
  const size_t n = 1 + random.below(random.chance(80) ? 4 : 20);
  for (size_t k = 0; k < n; ++k) c.srcs.push_back(random.elements(type, c.count));
  if (op != ReduceOp::kSum) return c;
  if (random.chance(50)) c.divisor = static_cast<uint32_t>(random.below(random.chance(80) ? 20 : 5000000000u));
  if (random.chance(50)) {
    for (size_t k = 0; k < n; ++k) c.scales.push_back(random_scale(type, random));
  }
  return c;
}

void run(const KernelTable& table, const Case& c, std::byte* dst, const std::vector<const void*>& srcs,
         const std::vector<void*>& copies = {}) {
  table.reduce[c.type][static_cast<int>(c.op)]({.dst = dst,
                                                .srcs = srcs.data(),
                                                .scales = c.scales.empty() ? nullptr : c.scales.data(),
                                                .count = c.count,
                                                .n_srcs = static_cast<uint32_t>(srcs.size()),
                                                .divisor = c.divisor,
                                                .stream = c.stream,
                                                .copies = copies.data(),
                                                .n_copies = static_cast<uint32_t>(copies.size())});
}

std::vector<const void*> pointers(const Case& c) {
  std::vector<const void*> p;
  for (const Buffer& b : c.srcs) p.push_back(b.data());
  return p;
}

TEST_P(ReduceContract, EveryTypeAndOperatorGivesTheReferencesBits) {
  Random random(2);
  for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      for (int round = 0; round < kRounds; ++round) {
        const Case c = random_case(type, static_cast<ReduceOp>(op), random);
        Buffer expected(c.count * kTypeSizes[type], 0);
        Buffer actual(c.count * kTypeSizes[type], random.misalignment());
        run(reference(), c, expected.data(), pointers(c));
        run(overlay(), c, actual.data(), pointers(c));
        ASSERT_EQ(difference(type, expected, actual), "")
            << "op " << op << ", " << c.srcs.size() << " sources, divisor " << c.divisor << ", scales "
            << c.scales.size() << ", stream " << c.stream;
      }
    }
  }
}

TEST_P(ReduceContract, DestinationMayBeOneOfTheSources) {
  Random random(3);
  for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int round = 0; round < kRounds; ++round) {
      Case c = random_case(type, ReduceOp::kSum, random);
      Buffer expected(c.count * kTypeSizes[type], 0);
      run(reference(), c, expected.data(), pointers(c));
      Buffer& dst = c.srcs[random.below(c.srcs.size())];
      run(overlay(), c, dst.data(), pointers(c));
      ASSERT_EQ(difference(type, expected, dst), "");
    }
  }
}

TEST_P(ReduceContract, CopiesHoldTheResultAlsoInPlaceOfASource) {
  Random random(5);
  for (const KernelTable* table : {&reference(), &overlay()}) {
    ASSERT_TRUE(table->reduces_to_many);
    for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
      for (int round = 0; round < kRounds; ++round) {
        Case c = random_case(type, static_cast<ReduceOp>(random.below(kNumReduceOps)), random);
        const size_t bytes = c.count * kTypeSizes[type];
        Buffer expected(bytes, 0);
        run(reference(), c, expected.data(), pointers(c));
        Buffer dst(bytes, random.misalignment()), other(bytes, random.misalignment());
        Buffer& source = c.srcs[random.below(c.srcs.size())];
        run(*table, c, dst.data(), pointers(c), {other.data(), source.data()});
        for (const Buffer* result : {&dst, &other, &source}) {
          ASSERT_EQ(difference(type, expected, *result), "") << table->name << ", stream " << c.stream;
        }
      }
    }
  }
}

// Uses pairs of special values in every position of a vector and of its tail.
TEST_P(ReduceContract, NansInfinitiesAndSignedZerosMeetAsInTheReference) {
  Random random(4);
  const double inf = HUGE_VAL, nan = std::nan("");
  const std::vector<double> special = {nan,  -nan, inf,   -inf,    0.0,     -0.0, 1.0,
                                       -1.0, 3e38, 448.0, 57344.0, 65504.0, 1e-40};
  for (int type = moecclFloat16; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      const size_t count = special.size() * special.size();
      Case c{.type = type, .op = static_cast<ReduceOp>(op), .count = count};
      for (int k = 0; k < 2; ++k) c.srcs.push_back(random.elements(type, count));
      for (size_t i = 0; i < count; ++i) {
        write_float(type, c.srcs[0].data() + i * kTypeSizes[type], special[i / special.size()]);
        write_float(type, c.srcs[1].data() + i * kTypeSizes[type], special[i % special.size()]);
      }
      Buffer expected(count * kTypeSizes[type], 0), actual(count * kTypeSizes[type], 0);
      run(reference(), c, expected.data(), pointers(c));
      run(overlay(), c, actual.data(), pointers(c));
      ASSERT_EQ(difference(type, expected, actual), "") << "op " << op;
    }
  }
}

TEST_P(ReduceContract, ScaleCopyGivesTheReferencesBitsAlsoInPlace) {
  Random random(5);
  for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int round = 0; round < kRounds; ++round) {
      const size_t count = random.count();
      Buffer src = random.elements(type, count);
      const Scalar scale = random_scale(type, random);
      Buffer expected(src.size(), 0), actual(src.size(), random.misalignment());
      reference().scale_copy[type](expected.data(), src.data(), count, scale);
      overlay().scale_copy[type](actual.data(), src.data(), count, scale);
      ASSERT_EQ(difference(type, expected, actual), "");
      overlay().scale_copy[type](src.data(), src.data(), count, scale);
      ASSERT_EQ(difference(type, expected, src), "");
    }
  }
}

// The scales move the products to ties, to the subnormals and past the largest values.
TEST_P(ReduceContract, EveryPatternOfTheNarrowFormatsConvertsAndRoundsAsInTheReference) {
  for (int type : {moecclFloat16, moecclBfloat16, moecclFloat8e4m3, moecclFloat8e5m2}) {
    const size_t count = kTypeSizes[type] == 1 ? 256 : 65536;
    Buffer src(count * kTypeSizes[type], 0);
    for (size_t i = 0; i < count; ++i) std::memcpy(src.data() + i * kTypeSizes[type], &i, kTypeSizes[type]);
    for (float scale : {1.0f, 0.5f, 0.75f, 1.125f, 0.0009765625f, 0.00048828125f * 1.5f, 3.0f, 1000.0f, -1.0625f}) {
      Buffer expected(src.size(), 0), actual(src.size(), 0);
      Scalar s{};
      s.f32 = scale;
      reference().scale_copy[type](expected.data(), src.data(), count, s);
      overlay().scale_copy[type](actual.data(), src.data(), count, s);
      ASSERT_EQ(difference(type, expected, actual), "") << "scale " << scale;
    }
  }
}

TEST(Select, UnknownNamesGiveNullAndTheBestIsSelectable) {
  EXPECT_EQ(select("sse9"), nullptr);
  EXPECT_EQ(select(nullptr), nullptr);
  EXPECT_EQ(select("reference"), &reference_table());
  EXPECT_EQ(select(best().name), &best());
}

TEST(Select, EveryEntryOfEveryTableIsFilled) {
  for (const char* name : names()) {
    const KernelTable* t = select(name);
    if (!t) continue;
    EXPECT_STREQ(t->name, name);
    EXPECT_TRUE(t->copy && t->copy_stream && t->copy_rows);
    for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
      EXPECT_TRUE(t->scale_copy[type] && t->scale_rows[type] && t->reduce_rows[type] && t->dot_rows[type]);
      for (ReduceFn f : t->reduce[type]) EXPECT_TRUE(f);
    }
  }
}

}  // namespace
}  // namespace moeccl::kernels
