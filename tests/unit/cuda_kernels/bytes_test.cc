// SPDX-License-Identifier: Apache-2.0
// Copies, row copies and reductions of kernels/cuda under emulation, compared with the host reference.
#include <numeric>

#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

using kernels::ReduceOp;

TEST(CudaCopy, CopiesAnyLengthAtAnyAlignment) {
  Random random(11);
  for (int i = 0; i < 1500; ++i) {
    const size_t bytes = random.chance(10) ? random.below(70000) : random.below(1500);
    const Buffer src = random.elements(moecclUint8, bytes);
    Buffer dst(bytes, random.misalignment());
    run_kernel("moeccl_copy", CopyArgs{dst.data(), src.data(), bytes}, random);
    ASSERT_EQ(difference(moecclUint8, src, dst), "") << bytes << " bytes, shape " << i;
  }
}

TEST(CudaCopy, MovesRowsOfAnySizeBetweenAnyPlaces) {
  Random random(13);
  for (int i = 0; i < 1500; ++i) {
    const size_t row_bytes = 1 + (random.chance(30) ? random.below(9000) : random.below(700));
    const size_t count = random.below(random.chance(20) ? 60 : 12), n_rows = count + 1 + random.below(10);
    std::vector<uint32_t> to(n_rows), from(count);
    std::iota(to.begin(), to.end(), 0u);
    for (size_t r = 0; r < count; ++r) std::swap(to[r], to[r + random.below(n_rows - r)]);
    for (uint32_t& r : from) r = static_cast<uint32_t>(random.below(n_rows));
    const size_t aligned = row_bytes % 16 == 0 && random.chance(50) ? 0 : 1;
    const Buffer src = random.elements(moecclUint8, n_rows * row_bytes);
    Buffer expected(n_rows * row_bytes, 0), actual(n_rows * row_bytes, aligned * random.misalignment());
    std::memset(expected.data(), 0, expected.size());
    std::memset(actual.data(), 0, actual.size());
    kernels::CopyRowsArgs host;
    host.dst = expected.data();
    host.src = src.data();
    if (random.chance(50)) host.dst_index = to.data();
    if (random.chance(50)) host.src_index = from.data();
    host.dst_first = host.dst_index ? 0 : random.below(n_rows - count);
    host.src_first = host.src_index ? 0 : random.below(n_rows - count);
    host.count = count;
    host.row_bytes = row_bytes;
    kernels::reference_table().copy_rows(host);
    run_kernel("moeccl_copy_rows",
               RowsKernelArgs{actual.data(), src.data(), host.dst_index, host.src_index, host.dst_first, host.src_first,
                              count, row_bytes, nullptr},
               random);
    ASSERT_EQ(difference(moecclUint8, expected, actual), "") << count << " rows of " << row_bytes << ", shape " << i;
  }
}

struct ReduceCase {
  std::vector<Buffer> srcs{};
  std::vector<kernels::Scalar> scales{};
  ReduceKernelArgs args{};
  kernels::ReduceArgs host{};
  std::vector<const void*> pointers{};

  ReduceCase(int type, ReduceOp op, size_t count, Random& random) {
    const size_t n = 1 + random.below(random.chance(80) ? 4 : 20);
    const bool together = random.chance(50);  // all have the same alignment: the path of 16 bytes
    const size_t at = kTypeSizes[type] * random.below(16);
    for (size_t k = 0; k < n; ++k) {
      const Buffer filled = random.elements(type, count);
      Buffer placed(filled.size(), together ? at : random.misalignment());
      std::memcpy(placed.data(), filled.data(), filled.size());
      srcs.push_back(std::move(placed));
    }
    args.count = host.count = count;
    args.n_srcs = host.n_srcs = static_cast<uint32_t>(n);
    args.op = static_cast<uint32_t>(op);
    if (op == ReduceOp::kSum && random.chance(50))
      args.divisor = host.divisor = static_cast<uint32_t>(random.below(random.chance(80) ? 20 : 5000000000u));
    if (op == ReduceOp::kSum && random.chance(30)) {
      args.scaled = 1;
      for (size_t k = 0; k < n; ++k) scales.push_back(random_scale(type, random));
      host.scales = scales.data();
    }
    for (size_t k = 0; k < n; ++k) {
      pointers.push_back(srcs[k].data());
      args.srcs[k] = srcs[k].data();
      if (args.scaled != 0) args.scales[k].u64 = scales[k].u64;
    }
    host.srcs = pointers.data();
    alignment = together ? at : random.misalignment();
  }
  size_t alignment = 0;
};

TEST(CudaReduce, EveryTypeAndOperatorGivesTheReferencesBits) {
  Random random(14);
  for (int i = 0; i < 2600; ++i) {
    const int type = i % MOECCL_NUM_DATA_TYPES, op = i / MOECCL_NUM_DATA_TYPES % kernels::kNumReduceOps;
    ReduceCase c(type, static_cast<ReduceOp>(op), random.chance(90) ? random.below(400) : random.below(4000), random);
    Buffer expected(c.args.count * kTypeSizes[type], 0), actual(expected.size(), c.alignment);
    c.host.dst = expected.data();
    kernels::reference_table().reduce[type][op](c.host);
    const bool in_place = random.chance(20);
    Buffer& dst = in_place ? c.srcs[random.below(c.srcs.size())] : actual;
    c.args.dst = dst.data();
    run_typed("moeccl_reduce", type, c.args, random);
    ASSERT_EQ(difference(type, expected, dst), "") << "op " << op << ", " << c.args.n_srcs << " sources, divisor "
                                                   << c.args.divisor << ", scaled " << c.args.scaled << ", shape " << i;
  }
}

TEST(CudaReduce, NansInfinitiesAndSignedZerosMeetAsInTheReference) {
  Random random(15);
  const double inf = HUGE_VAL, nan = std::nan("");
  const std::vector<double> special = {nan,  -nan, inf,   -inf,    0.0,     -0.0, 1.0,
                                       -1.0, 3e38, 448.0, 57344.0, 65504.0, 1e-40};
  const size_t n = special.size(), count = n * n;
  for (int type = moecclFloat16; type < MOECCL_NUM_DATA_TYPES; ++type) {
    for (int op = 0; op < kernels::kNumReduceOps; ++op) {
      Buffer a(count * kTypeSizes[type], 0), b(count * kTypeSizes[type], 0);
      for (size_t i = 0; i < count; ++i) {
        kernels::write_float(type, a.data() + i * kTypeSizes[type], special[i / n]);
        kernels::write_float(type, b.data() + i * kTypeSizes[type], special[i % n]);
      }
      Buffer expected(a.size(), 0), actual(a.size(), 0);
      const void* srcs[] = {a.data(), b.data()};
      kernels::reference_table().reduce[type][op]({.dst = expected.data(), .srcs = srcs, .count = count, .n_srcs = 2});
      ReduceKernelArgs args{};
      args.dst = actual.data();
      args.count = count;
      args.n_srcs = 2;
      args.op = static_cast<uint32_t>(op);
      args.srcs[0] = a.data();
      args.srcs[1] = b.data();
      run_typed("moeccl_reduce", type, args, random);
      ASSERT_EQ(difference(type, expected, actual), "") << "op " << op;
    }
  }
}

// The scales move the products to ties, to the subnormals and past the largest values.
TEST(CudaReduce, EveryPatternOfTheNarrowFormatsConvertsAndRoundsAsInTheReference) {
  Random random(16);
  for (int type : {moecclFloat16, moecclBfloat16, moecclFloat8e4m3, moecclFloat8e5m2}) {
    const size_t count = kTypeSizes[type] == 1 ? 256 : 65536;
    Buffer src(count * kTypeSizes[type], 0);
    for (size_t i = 0; i < count; ++i) std::memcpy(src.data() + i * kTypeSizes[type], &i, kTypeSizes[type]);
    for (float scale : {1.0f, 0.75f, 0.00048828125f * 1.5f, 1000.0f, -1.0625f}) {
      Buffer expected(src.size(), 0), actual(src.size(), 0);
      kernels::Scalar s{};
      s.f32 = scale;
      kernels::reference_table().scale_copy[type](expected.data(), src.data(), count, s);
      ReduceKernelArgs args{};
      args.dst = actual.data();
      args.count = count;
      args.n_srcs = args.scaled = 1;
      args.srcs[0] = src.data();
      args.scales[0].f32 = scale;
      run_typed("moeccl_reduce", type, args, random);
      ASSERT_EQ(difference(type, expected, actual), "") << "scale " << scale;
    }
  }
}

}  // namespace
}  // namespace moeccl::cuda
