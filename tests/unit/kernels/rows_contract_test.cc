// SPDX-License-Identifier: Apache-2.0
// Compares the row kernels of every overlay with the reference: copy_rows, scale_rows, reduce_rows, dot_rows.
#include <algorithm>
#include <numeric>

#include "tests/unit/kernels/kernel_test_util.h"

namespace moeccl::kernels {
namespace {

using RowsContract = OverlayTest;
INSTANTIATE_TEST_SUITE_P(Overlays, RowsContract, testing::ValuesIn(overlays()));

// Returns distinct rows of a larger array, in random order.
std::vector<uint32_t> distinct_rows(size_t count, size_t n_rows, Random& random) {
  std::vector<uint32_t> all(n_rows);
  std::iota(all.begin(), all.end(), 0u);
  for (size_t i = 0; i < count; ++i) std::swap(all[i], all[i + random.below(n_rows - i)]);
  all.resize(count);
  return all;
}

std::vector<uint32_t> any_rows(size_t count, size_t n_rows, Random& random) {
  std::vector<uint32_t> rows(count);
  for (uint32_t& r : rows) r = static_cast<uint32_t>(random.below(n_rows));
  return rows;
}

struct RowsCase {
  std::vector<uint32_t> dst_index, src_index;
  CopyRowsArgs args;
  size_t n_rows;

  RowsCase(size_t row_bytes, Random& random) {
    args.count = random.below(20);
    args.row_bytes = row_bytes;
    args.stream = random.chance(50);
    n_rows = args.count + 1 + random.below(10);
    dst_index = distinct_rows(args.count, n_rows, random);
    src_index = any_rows(args.count, n_rows, random);
    if (random.chance(50)) args.dst_index = dst_index.data();
    if (random.chance(50)) args.src_index = src_index.data();
    args.dst_first = args.dst_index ? 0 : random.below(n_rows - args.count);
    args.src_first = args.src_index ? 0 : random.below(n_rows - args.count);
  }
  RowsCase(const RowsCase&) = delete;
};

TEST_P(RowsContract, CopyRowsMovesRowsOfAnySizeBetweenAnyPlaces) {
  Random random(11);
  std::vector<size_t> sizes(150);
  std::iota(sizes.begin(), sizes.end(), size_t{1});
  sizes.insert(sizes.end(), {255, 256, 1023, 1024, 1025, 4099, 14336});
  for (size_t row_bytes : sizes) {
    for (int round = 0; round < 12; ++round) {
      RowsCase c(row_bytes, random);
      const Buffer src = random.elements(moecclUint8, c.n_rows * row_bytes);
      Buffer expected(src.size(), 0), actual(src.size(), random.misalignment());
      c.args.src = src.data();
      c.args.dst = expected.data();
      reference().copy_rows(c.args);
      c.args.dst = actual.data();
      overlay().copy_rows(c.args);
      ASSERT_EQ(difference(moecclUint8, expected, actual), "") << "rows of " << row_bytes << " bytes";
    }
  }
}

TEST_P(RowsContract, ScaleRowsGivesTheReferencesBits) {
  Random random(12);
  for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int round = 0; round < 80; ++round) {
      const size_t n_elements = 1 + random.below(random.chance(80) ? 100 : 1000);
      RowsCase c(n_elements * kTypeSizes[type], random);
      std::vector<float> weights(c.args.count);
      for (float& w : weights) w = static_cast<float>(random.normal());
      const Buffer src = random.elements(type, c.n_rows * n_elements);
      Buffer expected(src.size(), 0), actual(src.size(), random.misalignment());
      c.args.src = src.data();
      c.args.dst = expected.data();
      reference().scale_rows[type]({.rows = c.args, .weights = weights.data()});
      c.args.dst = actual.data();
      overlay().scale_rows[type]({.rows = c.args, .weights = weights.data()});
      ASSERT_EQ(difference(type, expected, actual), "") << n_elements << " elements a row, stream " << c.args.stream;
    }
  }
}

// Terms over several segments, with some rows without any term and groups closed at random.
struct SumCase {
  std::vector<Buffer> segments;
  std::vector<const void*> bases;
  std::vector<uint64_t> offsets{3};  // terms need not start at 0
  std::vector<RowTerm> terms;
  std::vector<float> weights;
  std::vector<uint32_t> dst_index;
  ReduceRowsArgs args;
  size_t n_dst_rows;

  SumCase(int type, bool grouped, Random& random) {
    constexpr size_t kRows = 9;
    args.row_elements = 1 + random.below(random.chance(80) ? 200 : 1000);
    const size_t n_segments = 1 + random.below(3);
    for (size_t s = 0; s < n_segments; ++s) segments.push_back(random.elements(type, kRows * args.row_elements));
    for (const Buffer& b : segments) bases.push_back(b.data());
    args.count = random.below(12);
    terms.resize(3);
    for (size_t i = 0; i < args.count; ++i) {
      const size_t n = random.chance(20) ? 0 : 1 + random.below(10);
      for (size_t t = 0; t < n; ++t) {
        terms.push_back(
            {.row = static_cast<uint32_t>(random.below(kRows)),
             .segment = static_cast<uint16_t>(random.below(n_segments)),
             .close = static_cast<uint16_t>(grouped && random.chance(50) ? random.below(kMaxGroups + 1) : 0)});
      }
      offsets.push_back(terms.size());
    }
    for (size_t t = 0; t < terms.size(); ++t) weights.push_back(static_cast<float>(random.normal()));
    n_dst_rows = args.count + 3;
    dst_index = distinct_rows(args.count, n_dst_rows, random);
    args.bases = bases.data();
    args.offsets = offsets.data();
    args.terms = terms.data();
    if (random.chance(70)) args.weights = weights.data();
    if (random.chance(50))
      args.dst_index = dst_index.data();
    else
      args.dst_first = random.below(4);
    args.grouped = grouped;
    args.stream = random.chance(50);
  }
  SumCase(const SumCase&) = delete;
};

class ReduceRowsContract : public OverlayTest {
 protected:
  void expect_reference_bits(bool grouped) {
    Random random(grouped ? 13 : 14);
    for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
      for (int round = 0; round < 100; ++round) {
        SumCase c(type, grouped, random);
        const size_t bytes = c.n_dst_rows * c.args.row_elements * kTypeSizes[type];
        Buffer expected(bytes, 0), actual(bytes, random.misalignment());
        c.args.dst = expected.data();
        reference().reduce_rows[type](c.args);
        c.args.dst = actual.data();
        overlay().reduce_rows[type](c.args);
        ASSERT_EQ(difference(type, expected, actual), "") << c.args.row_elements << " elements a row";
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Overlays, ReduceRowsContract, testing::ValuesIn(overlays()));

TEST_P(ReduceRowsContract, PlainSumsGiveTheReferencesBits) { expect_reference_bits(false); }
TEST_P(ReduceRowsContract, GroupedSumsGiveTheReferencesBits) { expect_reference_bits(true); }

TEST_P(RowsContract, DotRowsGivesTheReferencesBits) {
  Random random(15);
  for (int type = 0; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int round = 0; round < 100; ++round) {
      constexpr size_t kRows = 12;
      const size_t n_elements = random.below(random.chance(80) ? 150 : 2000);
      const Buffer a = random.elements(type, kRows * n_elements), b = random.elements(type, kRows * n_elements);
      const size_t count = random.below(kRows);
      const std::vector<uint32_t> a_index = any_rows(count, kRows, random), b_index = any_rows(count, kRows, random);
      Buffer expected(count * sizeof(float), 0), actual(count * sizeof(float), 0);
      DotRowsArgs args{.a = a.data(), .b = b.data(), .count = count, .row_elements = n_elements};
      if (random.chance(50)) args.a_index = a_index.data();
      if (random.chance(50)) args.b_index = b_index.data();
      args.out = reinterpret_cast<float*>(expected.data());
      reference().dot_rows[type](args);
      args.out = reinterpret_cast<float*>(actual.data());
      overlay().dot_rows[type](args);
      ASSERT_EQ(difference(moecclFloat32, expected, actual), "")
          << kTypeNames[type] << ", " << n_elements << " elements";
    }
  }
}

}  // namespace
}  // namespace moeccl::kernels
