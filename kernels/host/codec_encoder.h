// SPDX-License-Identifier: Apache-2.0
// The encoder of the codec, one block at a time: finds the largest residuals and what is lost without the others.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "kernels/codec.h"
#include "kernels/float_formats.h"

namespace moeccl::kernels {

struct Fp32Codec {
  using Stored = float;
  static float load(const void* p, uint64_t i) {
    float v;
    std::memcpy(&v, static_cast<const std::byte*>(p) + i * sizeof(v), sizeof(v));
    return v;
  }
  static void store(void* p, uint64_t i, float v) {
    std::memcpy(static_cast<std::byte*>(p) + i * sizeof(v), &v, sizeof(v));
  }
};

struct Bf16Codec {
  using Stored = uint16_t;
  static float load(const void* p, uint64_t i) {
    uint16_t v;
    std::memcpy(&v, static_cast<const std::byte*>(p) + i * sizeof(v), sizeof(v));
    return Bf16::decode(v);
  }
  static void store(void* p, uint64_t i, float f) {
    const auto v = static_cast<uint16_t>(Bf16::encode(f));
    std::memcpy(static_cast<std::byte*>(p) + i * sizeof(v), &v, sizeof(v));
  }
};

inline uint32_t magnitude(float v) { return std::bit_cast<uint32_t>(v) & 0x7fffffffu; }

// The state of one expert between blocks.
struct CodecProgress {
  uint32_t threshold = 0;      // the next block begins with it; 0: unknown
  uint32_t max_dropped = 0;    // as bits, which order NaN above all numbers
  double lost = 0, whole = 0;  // sums of squares
  CodecError error() const { return {std::bit_cast<float>(max_dropped), relative_loss(lost, whole)}; }
};

template <class C>
class BlockEncoder {
 public:
  // A block's elements of the expert and of the shared one.
  struct Block {
    const std::byte *expert = nullptr, *shared = nullptr;
    uint32_t n = 0;
  };
  BlockEncoder(const CodecTable& table, const CodecShape& shape)
      : shape_(shape),
        scan_(sizeof(typename C::Stored) == 4 ? table.scan_fp32 : table.scan_bf16),
        room_(std::min<uint64_t>(shape.count, kCodecBlock) + kCodecLanes),
        index_(std::make_unique_for_overwrite<uint32_t[]>(room_)),
        residual_(std::make_unique_for_overwrite<float[]>(room_)),
        keys_(std::make_unique_for_overwrite<uint64_t[]>(room_)) {}

  // Returns the end of what it wrote.
  std::byte* encode(const Block& block, CodecProgress& progress, std::byte* to) {
    const uint32_t n = block.n, k = codec_kept(shape_, n);
    // Looks for one more than is kept, so that the largest dropped one is known.
    const uint32_t wanted = std::min(n, k + 1);
    uint32_t found = 0;
    if (progress.threshold > 0) found = find(block, progress, progress.threshold);
    if (found < wanted) found = find(block, progress, likely_threshold(block, wanted));
    if (found < wanted) found = find(block, progress, 0);
    uint32_t most = 0;  // magnitude of the largest dropped one
    if (k < n) {
      most = keep_largest(k, found, progress);
      progress.max_dropped = std::max(progress.max_dropped, most);
    }
    std::byte* indices = to + k * sizeof(typename C::Stored);
    double kept_squares = 0;
    for (uint32_t i = 0; i < k; ++i) {
      C::store(to, i, residual_[i]);
      const auto index = static_cast<uint16_t>(index_[i]);
      std::memcpy(indices + i * sizeof(index), &index, sizeof(index));
      const double whole = residual_[i];
      kept_squares += whole * whole;
      progress.lost += square_of_loss(block, index, C::load(to, i));
    }
    if (k < n) {
      // The squares of the whole were summed in fp32. Bounds from the largest of the n - k dropped ones are more
      // accurate for the rest.
      const double limit = std::bit_cast<float>(most);
      progress.lost += std::clamp(squares_ - kept_squares, limit * limit, (n - k) * limit * limit);
    }
    return indices + k * sizeof(uint16_t);
  }

 private:
  // Returns the squared loss of an element whose residual is sent as `coded`. decode() rounds once more to the type.
  static double square_of_loss(const Block& block, uint32_t at, float coded) {
    typename C::Stored sum;
    C::store(&sum, 0, C::load(block.shared, at) + coded);
    const double loss = static_cast<double>(C::load(block.expert, at)) - C::load(&sum, 0);
    return loss * loss;
  }
  uint32_t find(const Block& block, CodecProgress& progress, uint32_t threshold) {
    float residual[kCodecLanes] = {}, whole[kCodecLanes] = {};
    const uint32_t found =
        scan_({block.expert, block.shared, block.n, threshold, index_.get(), residual_.get(), residual, whole});
    const uint32_t wanted = std::min(block.n, codec_kept(shape_, block.n) + 1);
    if (threshold > 0 && found < wanted) return found;  // will be scanned again
    squares_ = 0;
    for (uint32_t l = 0; l < kCodecLanes; ++l) {
      squares_ += residual[l];
      progress.whole += whole[l];
    }
    return found;
  }

  // Orders by larger magnitude first, then by lower index.
  uint64_t key(uint32_t i) const { return uint64_t{magnitude(residual_[i])} << 16 | (kCodecBlock - 1 - index_[i]); }
  // Moves the k largest candidates to the front, in their order. Returns the magnitude of the next one, and guesses the
  // next block's threshold. It counts by magnitude first, because selecting among all by comparisons would take half
  // the time of a block.
  uint32_t keep_largest(uint32_t k, uint32_t found, CodecProgress& progress) {
    constexpr uint32_t kBuckets = 1 << 10;
    uint32_t low = ~0u, high = 0;
    for (uint32_t i = 0; i < found; ++i) {
      low = std::min(low, magnitude(residual_[i]));
      high = std::max(high, magnitude(residual_[i]));
    }
    const int shift =
        std::max(0, static_cast<int>(std::bit_width(high - low)) - static_cast<int>(std::bit_width(kBuckets - 1)));
    uint32_t n_in[kBuckets] = {};
    for (uint32_t i = 0; i < found; ++i) ++n_in[(magnitude(residual_[i]) - low) >> shift];
    uint32_t bucket = kBuckets - 1, above = 0;
    for (; above + n_in[bucket] <= k; --bucket) above += n_in[bucket];
    uint32_t n = 0;
    for (uint32_t i = 0; i < found; ++i) {
      keys_[n] = key(i);
      n += (magnitude(residual_[i]) - low) >> shift == bucket;
    }
    std::nth_element(keys_.get(), keys_.get() + (k - above), keys_.get() + n, std::greater<>());
    const uint64_t dropped = keys_[k - above];
    // Neighbouring blocks are alike. The next block begins with the magnitude that a quarter more than k elements of
    // this one reach, and samples only if that was too high.
    const uint32_t spare = k / 4 + 16;
    if (found - k <= spare) {
      progress.threshold = low - std::min(low, 1u << 19);  // a sixteenth of a power of two lower
    } else {
      for (; above + n_in[bucket] <= k + spare; --bucket) above += n_in[bucket];
      progress.threshold = low + (bucket << shift);
    }
    for (uint32_t i = 0, at = 0; i < found; ++i) {
      const bool keeps = key(i) > dropped;
      index_[at] = index_[i];
      residual_[at] = residual_[i];
      at += keeps;
    }
    return static_cast<uint32_t>(dropped >> 16);
  }
  // Estimates from a sample a magnitude that somewhat more than `wanted` elements reach. Only speed depends on it.
  static uint32_t likely_threshold(const Block& block, uint32_t wanted) {
    const uint32_t n = block.n;
    constexpr uint32_t kSamples = 512;
    if (n < 8 * kSamples) return 0;
    const uint32_t rank = wanted * (kSamples * 3 / 2) / n + 6;
    if (rank >= kSamples / 2) return 0;
    uint32_t samples[kSamples];
    const uint32_t stride = n / kSamples;
    for (uint32_t i = 0; i < kSamples; ++i) {
      // Each stride is sampled at a different place, because weights have periods.
      const uint32_t at = i * stride + (i * 2654435761u >> 8) % stride;
      samples[i] = magnitude(C::load(block.expert, at) - C::load(block.shared, at));
    }
    std::nth_element(samples, samples + rank, samples + kSamples, std::greater<>());
    return samples[rank];
  }

  const CodecShape& shape_;
  CodecScanFn scan_;
  size_t room_;
  std::unique_ptr<uint32_t[]> index_;
  std::unique_ptr<float[]> residual_;
  std::unique_ptr<uint64_t[]> keys_;
  double squares_ = 0;  // of this block's residuals
};

}  // namespace moeccl::kernels
