// SPDX-License-Identifier: Apache-2.0
// Top-k residual coding and routing of kernels/cuda under emulation, compared with plain definitions.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <set>

#include "kernels/codec.h"
#include "kernels/cuda/route_args.h"
#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

constexpr int kSparseTypes[] = {moecclFloat16, moecclFloat32, moecclBfloat16, moecclFloat8e4m3, moecclFloat8e5m2};

float load(int type, const Buffer& b, size_t i) {
  return static_cast<float>(kernels::read_float(type, b.data() + i * kTypeSizes[type]));
}

// The definition in kernels/cuda/args.h, computed by sorting.
struct Encoded {
  std::vector<uint32_t> index{};
  std::vector<float> value{};  // before rounding
  std::vector<float> residual{};
};
Encoded encode_plainly(int type, const Buffer& in, const Buffer* base, const std::vector<float>& carry, size_t length,
                       size_t n_segments, size_t keep) {
  Encoded e;
  for (size_t i = 0; i < length * n_segments; ++i) {
    float r = load(type, in, i);
    if (base) r = r - load(type, *base, i);
    e.residual.push_back(carry.empty() ? r : r + carry[i]);
  }
  for (size_t s = 0; s < n_segments; ++s) {
    const float* r = e.residual.data() + s * length;
    std::vector<uint32_t> order(length);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      if (std::isnan(r[a]) || std::isnan(r[b])) return std::isnan(r[a]) && !std::isnan(r[b]);
      return std::fabs(r[a]) > std::fabs(r[b]);
    });
    order.resize(keep);
    std::sort(order.begin(), order.end());
    for (const uint32_t j : order) {
      e.index.push_back(j);
      e.value.push_back(r[j]);
    }
  }
  return e;
}

TEST(CudaSparse, EncodesTheLargestResidualsAndDecodesThemBack) {
  Random random(31);
  for (int i = 0; i < 350; ++i) {
    const int type = kSparseTypes[i % 5];
    const size_t length = 1 + random.below(random.chance(80) ? 300 : 2000), segments = 1 + random.below(4);
    const size_t keep = 1 + random.below(std::min<size_t>(length, 100)), n = length * segments, size = kTypeSizes[type];
    const Buffer in = random.elements(type, n), base = random.elements(type, n);
    const bool with_base = random.chance(70), with_carry = random.chance(50);
    std::vector<float> carry;
    for (size_t j = 0; with_carry && j < n; ++j) carry.push_back(static_cast<float>(random.normal()) * 0.01f);
    const Encoded want = encode_plainly(type, in, with_base ? &base : nullptr, carry, length, segments, keep);
    std::vector<uint32_t> index(segments * keep);
    Buffer value(segments * keep * size, size * random.below(8));
    std::vector<float> left = carry;
    run_typed(
        "moeccl_encode", type,
        EncodeKernelArgs{in.data(), with_base ? base.data() : nullptr, with_carry ? left.data() : nullptr, index.data(),
                         value.data(), length, static_cast<uint32_t>(segments), static_cast<uint32_t>(keep)},
        random);
    ASSERT_EQ(index, want.index) << "shape " << i;
    Buffer rounded(value.size(), 0);
    for (size_t j = 0; j < want.value.size(); ++j) kernels::write_float(type, rounded.data() + j * size, want.value[j]);
    ASSERT_EQ(difference(type, rounded, value), "") << "shape " << i;
    std::vector<float> expected_left = want.residual;
    for (size_t s = 0; s < segments; ++s)
      for (size_t k = 0; k < keep; ++k) {
        float& r = expected_left[s * length + index[s * keep + k]];
        r = r - load(type, rounded, s * keep + k);
      }
    for (size_t j = 0; with_carry && j < n; ++j)
      ASSERT_TRUE(left[j] == expected_left[j] || (std::isnan(left[j]) && std::isnan(expected_left[j]))) << j;

    Buffer out(n * size, random.misalignment()), in_place = base, expected = base;
    for (size_t s = 0; s < segments; ++s)
      for (size_t k = 0; k < keep; ++k) {
        const size_t at = s * length + index[s * keep + k];
        kernels::write_float(type, expected.data() + at * size, load(type, base, at) + load(type, value, s * keep + k));
      }
    DecodeKernelArgs decode{out.data(),
                            base.data(),
                            index.data(),
                            value.data(),
                            length,
                            static_cast<uint32_t>(segments),
                            static_cast<uint32_t>(keep)};
    run_typed("moeccl_decode_add", type, decode, random);
    ASSERT_EQ(difference(type, expected, out), "") << "shape " << i;
    decode.out = in_place.data();
    decode.base = in_place.data();
    run_typed("moeccl_decode_add", type, decode, random);
    ASSERT_EQ(difference(type, expected, in_place), "") << "in place, shape " << i;
  }
}

TEST(CudaSparse, AnIndexOutOfRangeFromAPeerIsIgnored) {
  Random random(32);
  std::vector<float> base(10, 1.0f), value{5.0f, 6.0f};
  const std::vector<uint32_t> index{3, 4000000000u};
  run_typed("moeccl_decode_add", moecclFloat32,
            DecodeKernelArgs{base.data(), base.data(), index.data(), value.data(), 10, 1, 2}, random);
  for (size_t i = 0; i < base.size(); ++i) EXPECT_EQ(base[i], i == 3 ? 6.0f : 1.0f);
}

CodecHeaderBits header_bits(const kernels::CodecShape& shape) {
  const kernels::CodecHeader header = kernels::codec_header(shape);
  CodecHeaderBits bits;
  std::memcpy(&bits, &header, sizeof(bits));
  return bits;
}

// Results equal the host's byte for byte, at any alignment of buffers and encoded experts, also where one element is
// kept.
TEST(CudaCodecKernels, EncodeDecodeCheckAndChecksumAreTheHosts) {
  Random random(34);
  for (int i = 0; i < 60; ++i) {
    const int type = i % 2 == 0 ? moecclFloat32 : moecclBfloat16;
    const size_t size = kTypeSizes[type], count = i % 12 == 11 ? 66'000 + random.below(2000) : 1 + random.below(900);
    const kernels::CodecShape shape{static_cast<moecclDataType_t>(type), count, i % 3 == 0 ? 50.0 : 3.0};
    const uint32_t n_last = static_cast<uint32_t>(count % kernels::kCodecBlock);
    const uint32_t keep = kernels::codec_kept(shape, kernels::kCodecBlock),
                   keep_last = kernels::codec_kept(shape, n_last);
    const size_t bytes = kernels::codec_bytes(shape),
                 blocks = (count + kernels::kCodecBlock - 1) / kernels::kCodecBlock;
    std::vector<float> values(count), base(count);
    for (size_t j = 0; j < count; ++j) {
      base[j] = static_cast<float>(random.normal());
      values[j] = base[j] + (random.chance(30) ? 0 : static_cast<float>(random.below(9)) - 4);  // many ties
    }
    Buffer expert(count * size, random.misalignment()), shared(count * size, random.misalignment());
    for (size_t j = 0; j < count; ++j) {
      kernels::write_float(type, expert.data() + j * size, values[j]);
      kernels::write_float(type, shared.data() + j * size, base[j]);
    }
    std::vector<char> want(bytes);
    const kernels::CodecError lost =
        kernels::codec_encode(*kernels::select_codec("reference"), shape, expert.data(), shared.data(), want.data());
    Buffer encoded(bytes, random.misalignment());
    std::vector<CodecError> error(blocks);
    run_typed("moeccl_codec_encode", type,
              CodecEncodeArgs{expert.data(), shared.data(), encoded.data(), error.data(), count, keep, keep_last,
                              header_bits(shape)},
              random);
    ASSERT_EQ(std::memcmp(encoded.data(), want.data(), bytes), 0) << "shape " << i << ", " << count << " elements";
    double sum = 0, whole = 0;
    float dropped = 0;
    for (const CodecError& e : error) {
      sum += e.lost;
      whole += e.whole;
      dropped = std::max(dropped, std::bit_cast<float>(e.dropped));
    }
    EXPECT_EQ(dropped, lost.max_dropped) << "shape " << i;
    EXPECT_NEAR(whole > 0 ? std::sqrt(sum / whole) : 0, lost.relative, 1e-5) << "shape " << i;

    Buffer out(count * size, random.misalignment()), expected(count * size, 0);
    ASSERT_TRUE(kernels::codec_decode(shape, want.data(), bytes, shared.data(), expected.data()));
    run_typed("moeccl_codec_decode", type,
              CodecDecodeArgs{out.data(), shared.data(), encoded.data(), count, keep, keep_last}, random);
    ASSERT_EQ(difference(type, expected, out), "") << "shape " << i;

    uint32_t bad = 0;
    const CodecCheckArgs check{encoded.data(), &bad, 1, bytes, keep_last, n_last, header_bits(shape)};
    run_kernel("moeccl_codec_check", check, random);
    EXPECT_EQ(bad, 0u) << "shape " << i;
    if (keep_last > 0) {
      encoded.data()[bytes - 1] = encoded.data()[bytes - 2] = static_cast<std::byte>(0xff);
    } else {
      encoded.data()[0] ^= static_cast<std::byte>(1);
    }
    run_kernel("moeccl_codec_check", check, random);
    EXPECT_EQ(bad, n_last == 0 && keep_last > 0 ? 0u : 1u) << "shape " << i;

    std::vector<uint64_t> sums(3);
    run_kernel("moeccl_checksum", ChecksumArgs{expert.data(), sums.data(), count * size - 1}, random);
    EXPECT_EQ(sums[0] + sums[1] + sums[2], kernels::checksum(expert.data(), count * size - 1)) << "shape " << i;
  }
}

// The sums of gradients and remainders, encoded to zeros, are the host's byte for byte, and what is added and kept too.
TEST(CudaCodecKernels, GradientsAreEncodedAddedAndKeptAsOnTheHost) {
  Random random(35);
  for (int i = 0; i < 40; ++i) {
    const int type = i % 2 == 0 ? moecclFloat32 : moecclBfloat16;
    const size_t size = kTypeSizes[type], count = i % 10 == 9 ? 65'000 + random.below(2000) : 1 + random.below(900);
    const kernels::CodecShape shape{static_cast<moecclDataType_t>(type), count, i % 3 == 0 ? 50.0 : 3.0};
    const uint32_t keep = kernels::codec_kept(shape, kernels::kCodecBlock),
                   keep_last = kernels::codec_kept(shape, static_cast<uint32_t>(count % kernels::kCodecBlock));
    constexpr uint32_t kAll = 4, kSent = 3;
    const uint32_t which[kSent] = {2, 0, 3}, place[kSent] = {1, 2, 0};
    const size_t bytes = kernels::codec_bytes(shape);
    Buffer gradients(kAll * count * size, random.misalignment()), sums(kSent * count * size, 0);
    Buffer out(kSent * count * size, random.misalignment()), expected(kSent * count * size, 0);
    std::vector<float> remainders(kSent * count), kept(kSent * count);
    for (size_t j = 0; j < kAll * count; ++j)
      kernels::write_float(type, gradients.data() + j * size, static_cast<float>(random.below(17)) - 8);
    for (float& r : remainders) r = static_cast<float>(random.normal());
    std::vector<char> want(kSent * bytes);
    const Buffer zeros(count * size, 0);
    for (uint32_t g = 0; g < kSent; ++g) {
      const std::byte* in = gradients.data() + which[g] * count * size;
      std::byte* sum = sums.data() + g * count * size;
      float* r = &remainders[place[g] * count];
      for (size_t j = 0; j < count; ++j)
        kernels::write_float(type, sum + j * size, static_cast<float>(kernels::read_float(type, in + j * size)) + r[j]);
      kernels::codec_encode(*kernels::select_codec("reference"), shape, sum, zeros.data(), want.data() + g * bytes);
      std::byte* base = expected.data() + g * count * size;
      for (size_t j = 0; j < count; ++j) {
        kernels::write_float(type, base + j * size, static_cast<float>(j % 5));
        kernels::write_float(type, out.data() + (g * count + j) * size, static_cast<float>(j % 5));
      }
      ASSERT_TRUE(kernels::codec_decode(shape, want.data() + g * bytes, bytes, base, base));
      ASSERT_TRUE(kernels::codec_decode(shape, want.data() + g * bytes, bytes, zeros.data(), sum));
      for (size_t j = 0; j < count; ++j)
        kept[place[g] * count + j] = (static_cast<float>(kernels::read_float(type, in + j * size)) + r[j]) -
                                     static_cast<float>(kernels::read_float(type, sum + j * size));
    }
    Buffer encoded(kSent * bytes, random.misalignment());
    GradientArgs args{gradients.data(), remainders.data(), which, place, encoded.data(), count, bytes, kSent, keep,
                      keep_last,        header_bits(shape)};
    run_typed("moeccl_gradient_encode", type, args, random);
    ASSERT_EQ(std::memcmp(encoded.data(), want.data(), want.size()), 0) << "shape " << i << ", " << count;
    run_typed("moeccl_codec_add", type, CodecAddArgs{out.data(), encoded.data(), count, bytes, kSent, keep, keep_last},
              random);
    ASSERT_EQ(difference(type, expected, out), "") << "shape " << i;
    args.header = {};
    run_typed("moeccl_gradient_keep", type, args, random);
    ASSERT_EQ(remainders, kept) << "shape " << i;
    ASSERT_EQ(std::memcmp(encoded.data(), want.data(), want.size()), 0) << "shape " << i;
  }
}

TEST(CudaRoute, ListsEachExpertsTokensInOrderAndOnce) {
  Random random(33);
  for (int i = 0; i < 250; ++i) {
    const auto n_experts = static_cast<uint32_t>(1 + random.below(random.chance(80) ? 40 : 700));
    const auto top_k = static_cast<uint32_t>(1 + random.below(std::min<size_t>(n_experts, random.chance(80) ? 8 : 20)));
    const auto n_tokens = static_cast<uint32_t>(random.below(random.chance(70) ? 300 : 1200));
    const bool one_takes_all = random.chance(10), wrong = random.chance(30);
    std::vector<int32_t> topk;
    std::vector<std::vector<uint32_t>> want(n_experts);
    for (uint32_t t = 0; t < n_tokens; ++t) {
      std::set<int32_t> chosen;
      for (uint32_t k = 0; k < top_k; ++k) {
        int32_t e = -1;
        if (!random.chance(10)) {
          e = k == 0 && one_takes_all ? 0 : static_cast<int32_t>(random.below(n_experts));
          while (!wrong && chosen.count(e) > 0) e = (e + 1) % static_cast<int32_t>(n_experts);
          if (chosen.insert(e).second) want[static_cast<size_t>(e)].push_back(t);
        }
        topk.push_back(wrong && e < 0 ? static_cast<int32_t>(n_experts) : e);
      }
    }
    RouteKernelArgs a{};
    a.topk = topk.data();
    a.n_tokens = n_tokens;
    a.top_k = top_k;
    a.n_experts = n_experts;
    a.n_tiles = (n_tokens + kRouteTile - 1) / kRouteTile;
    std::vector<uint32_t> tiles(size_t{a.n_tiles} * n_experts, 77), first(n_experts + 1, 77), list(topk.size());
    a.tile_count = tiles.data();
    a.first = first.data();
    a.list = list.data();
    run_kernel("moeccl_route_count", a, random);
    run_kernel("moeccl_route_scan", a, random, 1);
    run_kernel("moeccl_route_fill", a, random);
    for (uint32_t e = 0; e < n_experts; ++e) {
      const std::vector<uint32_t> got(list.begin() + first[e], list.begin() + first[e + 1]);
      ASSERT_EQ(got, want[e]) << "expert " << e << " of " << n_experts << ", shape " << i;
    }
  }
}

TEST(CudaShapes, TenThousandHaveRun) {
  // This is the last test in the program, because tests run in the order of files and definitions.
  EXPECT_GE(shapes_run(), 10'000);
  RecordProperty("shapes", shapes_run());
}

}  // namespace
}  // namespace moeccl::cuda
