// SPDX-License-Identifier: Apache-2.0
// Weighted rows, row sums and products of kernels/cuda under emulation, compared with the host reference.
#include <algorithm>

#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

static_assert(sizeof(kernels::RowTerm) == sizeof(RowTermBits));

// Half of the rows are aligned multiples of 16 bytes, as hidden sizes are.
struct Place {
  size_t elements = 0, src = 0, dst = 0;
  Place(int type, Random& random) {
    const size_t size = kTypeSizes[type], per_pack = 16 / size;
    if (random.chance(50)) {
      elements = per_pack * (1 + random.below(12));
      return;
    }
    elements = 1 + random.below(200);
    src = random.misalignment();
    dst = random.misalignment();
  }
};

Buffer placed(const Buffer& filled, size_t misalignment) {
  Buffer b(filled.size(), misalignment);
  std::memcpy(b.data(), filled.data(), filled.size());
  return b;
}

std::vector<float> random_weights(size_t n, Random& random) {
  std::vector<float> w(n);
  for (float& v : w) v = random.chance(5) ? 0.0f : static_cast<float>(random.normal());
  return w;
}

TEST(CudaRows, ScaledRowsGiveTheReferencesBits) {
  Random random(21);
  for (int i = 0; i < 900; ++i) {
    const int type = i % MOECCL_NUM_DATA_TYPES;
    const Place place(type, random);
    const size_t n_rows = 1 + random.below(12), count = random.below(n_rows + 1);
    const size_t row_bytes = place.elements * kTypeSizes[type];
    const Buffer src = placed(random.elements(type, n_rows * place.elements), place.src);
    std::vector<uint32_t> from(count);
    for (uint32_t& r : from) r = static_cast<uint32_t>(random.below(n_rows));
    const std::vector<float> weights = random_weights(count, random);
    Buffer expected(n_rows * row_bytes, 0), actual(n_rows * row_bytes, place.dst);
    std::memset(expected.data(), 0, expected.size());
    std::memset(actual.data(), 0, actual.size());
    kernels::ScaleRowsArgs host;
    host.rows.dst = expected.data();
    host.rows.src = src.data();
    if (random.chance(60)) host.rows.src_index = from.data();
    host.rows.dst_first = n_rows - count;
    host.rows.count = count;
    host.rows.row_bytes = row_bytes;
    host.weights = weights.data();
    kernels::reference_table().scale_rows[type](host);
    run_typed("moeccl_scale_rows", type,
              RowsKernelArgs{actual.data(), src.data(), nullptr, host.rows.src_index, host.rows.dst_first, 0, count,
                             row_bytes, weights.data()},
              random);
    ASSERT_EQ(difference(type, expected, actual), "") << "shape " << i;
  }
}

TEST(CudaRows, WeightedSumsGiveTheReferencesBits) {
  Random random(22);
  for (int i = 0; i < 1900; ++i) {
    const int type = i % MOECCL_NUM_DATA_TYPES;
    const Place place(type, random);
    // A combine has a base for each rank.
    const size_t n_bases = random.chance(10) ? 60 + random.below(80) : 1 + random.below(4),
                 n_rows = 1 + random.below(10), count = random.below(14);
    const size_t row_bytes = place.elements * kTypeSizes[type];
    std::vector<Buffer> bases;
    for (size_t b = 0; b < n_bases; ++b)
      bases.push_back(placed(random.elements(type, n_rows * place.elements), place.src));
    std::vector<uint64_t> offsets{0};
    std::vector<kernels::RowTerm> terms;
    for (size_t r = 0; r < count; ++r) {
      for (size_t t = random.below(random.chance(80) ? 9 : 30); t > 0; --t) {
        terms.push_back({static_cast<uint32_t>(random.below(n_rows)), static_cast<uint16_t>(random.below(n_bases)),
                         static_cast<uint16_t>(random.below(9))});
      }
      offsets.push_back(terms.size());
    }
    const std::vector<float> weights = random_weights(terms.size(), random);
    Buffer expected((count + 3) * row_bytes, 0), actual(expected.size(), place.dst);
    std::memset(expected.data(), 0, expected.size());
    std::memset(actual.data(), 0, actual.size());
    ReduceRowsKernelArgs args{};
    std::vector<const void*> pointers;
    for (size_t b = 0; b < n_bases; ++b) pointers.push_back(bases[b].data());
    args.bases = pointers.data();
    kernels::ReduceRowsArgs host;
    host.dst = expected.data();
    host.bases = pointers.data();
    host.offsets = offsets.data();
    host.terms = terms.data();
    host.weights = random.chance(60) ? weights.data() : nullptr;
    host.dst_first = random.below(3);
    host.count = count;
    host.row_elements = place.elements;
    host.grouped = random.chance(30);
    kernels::reference_table().reduce_rows[type](host);
    args.dst = actual.data();
    args.offsets = offsets.data();
    args.terms = reinterpret_cast<const RowTermBits*>(terms.data());
    args.weights = host.weights;
    args.dst_first = host.dst_first;
    args.count = count;
    args.row_elements = place.elements;
    args.n_bases = static_cast<uint32_t>(n_bases);
    args.grouped = host.grouped;
    run_typed("moeccl_reduce_rows", type, args, random);
    ASSERT_EQ(difference(type, expected, actual), "")
        << count << " rows, grouped " << host.grouped << ", weights " << (host.weights != nullptr) << ", shape " << i;
  }
}

TEST(CudaRows, ProductsGiveTheReferencesBits) {
  Random random(23);
  for (int i = 0; i < 600; ++i) {
    const int type = i % MOECCL_NUM_DATA_TYPES;
    const size_t n_rows = 1 + random.below(10), count = random.below(20), elements = 1 + random.below(150);
    const Buffer a = random.elements(type, n_rows * elements), b = random.elements(type, n_rows * elements);
    std::vector<uint32_t> rows(count);
    for (uint32_t& r : rows) r = static_cast<uint32_t>(random.below(n_rows));
    kernels::DotRowsArgs host;
    Buffer expected(count * 4, 0), actual(count * 4, 0);
    host.out = reinterpret_cast<float*>(expected.data());
    host.a = a.data();
    host.b = b.data();
    host.a_index = host.b_index = rows.data();
    host.count = count;
    host.row_elements = elements;
    kernels::reference_table().dot_rows[type](host);
    run_typed("moeccl_dot_rows", type,
              DotRowsKernelArgs{reinterpret_cast<float*>(actual.data()), a.data(), b.data(), rows.data(), rows.data(),
                                count, elements},
              random);
    ASSERT_EQ(difference(moecclFloat32, expected, actual), "") << kTypeNames[type] << ", shape " << i;
  }
}

}  // namespace
}  // namespace moeccl::cuda
