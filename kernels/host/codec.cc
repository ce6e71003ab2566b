// SPDX-License-Identifier: Apache-2.0
// The codec but for its inner loop, and the reference of that loop.
#include "kernels/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/checksum.h"
#include "kernels/float_formats.h"
#include "kernels/host/codec_tables.h"
#include "kernels/table.h"

namespace moeccl::kernels {
namespace {

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

uint32_t magnitude(float v) { return std::bit_cast<uint32_t>(v) & 0x7fffffffu; }

template <class C>
uint32_t scan(const CodecScan& s) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < s.count; ++i) {
    const float e = C::load(s.expert, i), r = e - C::load(s.shared, i);
    s.residual_squares[i % kCodecLanes] += r * r;
    s.expert_squares[i % kCodecLanes] += e * e;
    if (magnitude(r) < s.threshold) continue;
    s.index[n] = i;
    s.residual[n++] = r;
  }
  return n;
}

uint32_t kept(const CodecShape& shape, uint32_t n) { return codec_kept(shape, n); }

// Larger magnitude first, then lower index.
uint64_t key_of(uint32_t index, float residual) {
  return uint64_t{magnitude(residual)} << 16 | (kCodecBlock - 1 - index);
}

template <class C>
class Encoder {
 public:
  Encoder(const CodecTable& table, const CodecShape& shape)
      : shape_(shape),
        scan_(sizeof(typename C::Stored) == 4 ? table.scan_fp32 : table.scan_bf16),
        index_(std::min<uint64_t>(shape.count, kCodecBlock) + kCodecLanes),
        residual_(index_.size()),
        keys_(index_.size()) {}

  // Returns the end of what it wrote.
  std::byte* block(const std::byte* expert, const std::byte* shared, uint32_t n, std::byte* to) {
    const uint32_t k = kept(shape_, n);
    // One more than is kept, so that the largest dropped one is known.
    const uint32_t wanted = std::min(n, k + 1);
    uint32_t found = 0;
    if (threshold_ > 0) found = find(expert, shared, n, threshold_);
    if (found < wanted) found = find(expert, shared, n, likely_threshold(expert, shared, n, wanted));
    if (found < wanted) found = find(expert, shared, n, 0);
    for (uint32_t i = 0; i < found; ++i) keys_[i] = key_of(index_[i], residual_[i]);
    uint64_t dropped = 0;
    bool drops = k < n;
    if (drops) {
      std::nth_element(keys_.begin(), keys_.begin() + k, keys_.begin() + found, std::greater<>());
      dropped = keys_[k];
      max_dropped_ = std::max(max_dropped_, std::bit_cast<float>(static_cast<uint32_t>(dropped >> 16)));
      guess_next(k, found);
    }
    std::byte* indices = to + k * sizeof(typename C::Stored);
    double kept_squares = 0;
    for (uint32_t i = 0, at = 0; i < found && at < k; ++i) {
      if (drops && key_of(index_[i], residual_[i]) <= dropped) continue;
      C::store(to, at, residual_[i]);
      const auto index = static_cast<uint16_t>(index_[i]);
      std::memcpy(indices + at * sizeof(index), &index, sizeof(index));
      const double whole = residual_[i];
      kept_squares += whole * whole;
      lost_ += square_of_loss(expert, shared, index, C::load(to, at));
      ++at;
    }
    if (drops) {
      // The whole's squares were summed in fp32: what is left of them is known better from the largest of n - k.
      const double most = std::bit_cast<float>(magnitude_of(dropped));
      lost_ += std::clamp(squares_ - kept_squares, most * most, (n - k) * most * most);
    }
    return indices + k * sizeof(uint16_t);
  }
  CodecError error() const { return {max_dropped_, whole_ > 0 ? std::sqrt(lost_ / whole_) : 0}; }

 private:
  // Of an element whose residual is sent as `coded`: what decode() makes of it is rounded to the type once more.
  static double square_of_loss(const std::byte* expert, const std::byte* shared, uint32_t at, float coded) {
    typename C::Stored sum;
    C::store(&sum, 0, C::load(shared, at) + coded);
    const double loss = static_cast<double>(C::load(expert, at)) - C::load(&sum, 0);
    return loss * loss;
  }
  uint32_t find(const std::byte* expert, const std::byte* shared, uint32_t n, uint32_t threshold) {
    float residual[kCodecLanes] = {}, whole[kCodecLanes] = {};
    const uint32_t found = scan_({expert, shared, n, threshold, index_.data(), residual_.data(), residual, whole});
    if (threshold > 0 && found <= kept(shape_, n)) return found;  // to be done again
    squares_ = 0;
    for (uint32_t l = 0; l < kCodecLanes; ++l) {
      squares_ += residual[l];
      whole_ += whole[l];
    }
    return found;
  }
  // Neighbouring blocks are alike: the next one begins with the magnitude that a quarter more than k elements of this
  // one reach, and samples only when that was too much. Keys from k on are in no order yet.
  void guess_next(uint32_t k, uint32_t found) {
    const uint32_t spare = k / 4 + 16;
    if (found - k <= spare) {
      threshold_ = magnitude_of(*std::min_element(keys_.begin() + k, keys_.begin() + found));
      threshold_ -= std::min(threshold_, 1u << 19);  // a sixteenth of a power of two lower
      return;
    }
    std::nth_element(keys_.begin() + k, keys_.begin() + k + spare, keys_.begin() + found, std::greater<>());
    threshold_ = magnitude_of(keys_[k + spare]);
  }
  static uint32_t magnitude_of(uint64_t key) { return static_cast<uint32_t>(key >> 16); }
  // A magnitude that somewhat more than `wanted` elements reach, as far as a sample tells. Only speed depends on it.
  uint32_t likely_threshold(const std::byte* expert, const std::byte* shared, uint32_t n, uint32_t wanted) const {
    constexpr uint32_t kSamples = 512;
    if (n < 8 * kSamples) return 0;
    const uint32_t rank = wanted * (kSamples * 3 / 2) / n + 6;
    if (rank >= kSamples / 2) return 0;
    uint32_t samples[kSamples];
    const uint32_t stride = n / kSamples;
    for (uint32_t i = 0; i < kSamples; ++i) {
      // Another place in each stride: weights have periods.
      const uint32_t at = i * stride + (i * 2654435761u >> 8) % stride;
      samples[i] = magnitude(C::load(expert, at) - C::load(shared, at));
    }
    std::nth_element(samples, samples + rank, samples + kSamples, std::greater<>());
    return samples[rank];
  }

  const CodecShape& shape_;
  CodecScanFn scan_;
  std::vector<uint32_t> index_;
  std::vector<float> residual_;
  std::vector<uint64_t> keys_;
  uint32_t threshold_ = 0;  // with which the next block begins; 0: not known
  float max_dropped_ = 0;
  double lost_ = 0, whole_ = 0;  // sums of squares
  double squares_ = 0;           // of this block's residuals
};

template <class C>
CodecError encode(const CodecTable& table, const CodecShape& shape, const void* expert, const void* shared,
                  std::byte* to) {
  Encoder<C> encoder(table, shape);
  for (uint64_t first = 0; first < shape.count; first += kCodecBlock) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(kCodecBlock, shape.count - first));
    const uint64_t at = first * sizeof(typename C::Stored);
    to = encoder.block(static_cast<const std::byte*>(expert) + at, static_cast<const std::byte*>(shared) + at, n, to);
  }
  return encoder.error();
}

template <class C>
bool decode(const CodecShape& shape, const std::byte* from, const void* shared, void* out) {
  const KernelTable& kernels = best();
  for (uint64_t first = 0; first < shape.count; first += kCodecBlock) {
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(kCodecBlock, shape.count - first));
    const uint64_t at = first * sizeof(typename C::Stored);
    std::byte* to = static_cast<std::byte*>(out) + at;
    kernels.copy(to, static_cast<const std::byte*>(shared) + at, n * sizeof(typename C::Stored));
    const uint32_t k = kept(shape, n);
    const std::byte* indices = from + k * sizeof(typename C::Stored);
    for (uint32_t i = 0; i < k; ++i) {
      uint16_t index;
      std::memcpy(&index, indices + i * sizeof(index), sizeof(index));
      if (index >= n) return false;
      C::store(to, index, C::load(to, index) + C::load(from, i));
    }
    from = indices + k * sizeof(uint16_t);
  }
  return true;
}

}  // namespace

const CodecTable& reference_codec() {
  static constexpr CodecTable table = {"reference", scan<Fp32Codec>, scan<Bf16Codec>};
  return table;
}

bool codec_supports(moecclDataType_t type) { return type == moecclFloat32 || type == moecclBfloat16; }

uint32_t codec_kept(const CodecShape& shape, uint32_t n) {
  const double element = shape.type == moecclFloat32 ? 4 : 2;
  return static_cast<uint32_t>(n * element / (shape.ratio * (element + 2)));
}

CodecHeader codec_header(const CodecShape& shape) {
  CodecHeader header;
  header.type = static_cast<uint32_t>(shape.type);
  header.count = shape.count;
  header.ratio = shape.ratio;
  return header;
}

uint64_t checksum(const void* data, uint64_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  const uint64_t words = bytes / sizeof(uint64_t);
  uint64_t sum = 0, last = 0;
  for (uint64_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, at + i * sizeof(word), sizeof(word));
    sum += checksum_term(word, i);
  }
  if (bytes % sizeof(last) == 0) return sum;
  std::memcpy(&last, at + words * sizeof(last), bytes % sizeof(last));
  return sum + checksum_term(last, words);
}

uint64_t codec_bytes(const CodecShape& shape) {
  const uint64_t element = shape.type == moecclFloat32 ? 4 : 2;
  if (shape.ratio <= 1) return sizeof(CodecHeader) + shape.count * element;
  const uint64_t whole = shape.count / kCodecBlock;
  const uint64_t k = whole * kept(shape, kCodecBlock) + kept(shape, static_cast<uint32_t>(shape.count % kCodecBlock));
  return sizeof(CodecHeader) + k * (element + 2);
}

CodecError codec_encode(const CodecTable& table, const CodecShape& shape, const void* expert, const void* shared,
                        void* encoded) {
  const CodecHeader header = codec_header(shape);
  std::memcpy(encoded, &header, sizeof(header));
  std::byte* to = static_cast<std::byte*>(encoded) + sizeof(header);
  if (shape.ratio <= 1) {
    best().copy(to, expert, codec_bytes(shape) - sizeof(header));
    return {};
  }
  return shape.type == moecclFloat32 ? encode<Fp32Codec>(table, shape, expert, shared, to)
                                     : encode<Bf16Codec>(table, shape, expert, shared, to);
}

namespace {

bool header_valid(const CodecShape& shape, const void* encoded, uint64_t bytes) {
  if (bytes != codec_bytes(shape)) return false;
  CodecHeader header;
  std::memcpy(&header, encoded, sizeof(header));
  return header.magic == kCodecMagic && header.type == static_cast<uint32_t>(shape.type) &&
         header.count == shape.count && header.ratio == shape.ratio;
}

}  // namespace

bool codec_valid(const CodecShape& shape, const void* encoded, uint64_t bytes) {
  if (!header_valid(shape, encoded, bytes)) return false;
  // An index has 16 bits: only in the last block can it be too large.
  const auto n = static_cast<uint32_t>(shape.count % kCodecBlock);
  if (shape.ratio <= 1 || n == 0) return true;
  const uint32_t k = kept(shape, n);
  const std::byte* indices = static_cast<const std::byte*>(encoded) + bytes - k * sizeof(uint16_t);
  for (uint32_t i = 0; i < k; ++i) {
    uint16_t index;
    std::memcpy(&index, indices + i * sizeof(index), sizeof(index));
    if (index >= n) return false;
  }
  return true;
}

bool codec_decode(const CodecShape& shape, const void* encoded, uint64_t bytes, const void* shared, void* out) {
  if (!header_valid(shape, encoded, bytes)) return false;
  const std::byte* from = static_cast<const std::byte*>(encoded) + sizeof(CodecHeader);
  if (shape.ratio <= 1) {
    best().copy(out, from, bytes - sizeof(CodecHeader));
    return true;
  }
  return shape.type == moecclFloat32 ? decode<Fp32Codec>(shape, from, shared, out)
                                     : decode<Bf16Codec>(shape, from, shared, out);
}

const CodecTable* select_codec(const char* name) {
  // Whoever runs a kernel table of a name also runs the codec's.
  if (select(name) == nullptr) return nullptr;
#if defined(MOECCL_KERNELS_X86)
  if (std::strcmp(name, "avx512") == 0) return &avx512_codec();
  if (std::strcmp(name, "avx2") == 0) return &avx2_codec();
#endif
  return &reference_codec();
}

const CodecTable& best_codec() {
  static const CodecTable& table = *select_codec(best().name);
  return table;
}

}  // namespace moeccl::kernels
