// SPDX-License-Identifier: Apache-2.0
// The codec except its inner loop, and the reference of that loop.
#include "kernels/codec.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "kernels/checksum.h"
#include "kernels/host/codec_encoder.h"
#include "kernels/host/codec_tables.h"
#include "kernels/table.h"

namespace moeccl::kernels {
namespace {

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

template <class C>
bool encode(const CodecTable& table, const CodecShape& shape, const CodecExperts& experts, const CodecUpdate& update) {
  BlockEncoder<C> encoder(table, shape);
  using Block = typename BlockEncoder<C>::Block;
  const auto progress = std::make_unique<CodecProgress[]>(experts.n);
  const auto to = std::make_unique<std::byte*[]>(experts.n);
  for (uint32_t e = 0; e < experts.n; ++e)
    to[e] = static_cast<std::byte*>(experts.encoded) + e * codec_bytes(shape) + sizeof(CodecHeader);
  const auto block_of = [&](uint32_t e, uint64_t first) {
    const uint64_t at = first * sizeof(typename C::Stored), whole = shape.count * sizeof(typename C::Stored);
    return Block{static_cast<const std::byte*>(experts.experts) + e * whole + at,
                 static_cast<const std::byte*>(experts.shared) + at,
                 static_cast<uint32_t>(std::min<uint64_t>(kCodecBlock, shape.count - first))};
  };
  for (uint64_t first = 0; first < shape.count; first += kCodecBlock)
    for (uint32_t e = 0; e < experts.n; ++e) {
      const Block block = block_of(e, first);
      if (update && !update(e, first, block.n)) return false;
      if (first == 0 && e > 0) progress[e].threshold = progress[e - 1].threshold;  // experts are alike
      to[e] = encoder.encode(block, progress[e], to[e]);
    }
  for (uint32_t e = 0; e < experts.n && experts.errors != nullptr; ++e) experts.errors[e] = progress[e].error();
  return true;
}

// Decodes any elements of an expert. It is fastest when each call continues where the last one ended.
template <class C>
class Decoder {
 public:
  Decoder(const CodecShape& shape, const std::byte* from, const void* shared)
      : shape_(shape), from_(from), shared_(static_cast<const std::byte*>(shared)) {}

  // Sets out[count] = elements [first, first + count), whose blocks are ordered().
  void values(uint64_t first, uint64_t count, std::byte* out) {
    while (count > 0) {
      const Block b = block(first / kCodecBlock);
      const auto begin = static_cast<uint32_t>(first % kCodecBlock);
      const auto n = static_cast<uint32_t>(std::min<uint64_t>(count, b.n - begin));
      if (const std::byte* from = shared_ + first * kBytes; from != out) best().copy(out, from, n * kBytes);
      uint32_t i = first == next_ ? next_entry_ : b.entry_from(begin);
      for (; i < b.k; ++i) {
        const uint32_t at = b.index(i) - begin;
        if (at >= n) break;
        C::store(out, at, C::load(out, at) + C::load(b.entries, i));
      }
      first += n;
      count -= n;
      out += n * kBytes;
      next_ = first;
      next_entry_ = begin + n == b.n ? 0 : i;
    }
  }
  // Returns true if the indices of all blocks of the range ascend and are elements.
  bool ordered(uint64_t first, uint64_t count) const {
    if (count == 0) return true;
    for (uint64_t at = first / kCodecBlock; at <= (first + count - 1) / kCodecBlock; ++at) {
      const Block b = block(at);
      bool wrong = b.k > 0 && b.index(b.k - 1) >= b.n;
      for (uint32_t i = 1; i < b.k; ++i) wrong |= b.index(i) <= b.index(i - 1);
      if (wrong) return false;
    }
    return true;
  }

 private:
  static constexpr uint64_t kBytes = sizeof(typename C::Stored);
  struct Block {
    const std::byte *entries = nullptr, *indices = nullptr;
    uint32_t n = 0, k = 0;
    uint32_t index(uint32_t i) const {
      uint16_t v;
      std::memcpy(&v, indices + i * sizeof(v), sizeof(v));
      return v;
    }
    uint32_t entry_from(uint32_t element) const {
      uint32_t low = 0;
      for (uint32_t high = k; low < high;) {
        const uint32_t middle = (low + high) / 2;
        if (index(middle) < element)
          low = middle + 1;
        else
          high = middle;
      }
      return low;
    }
  };
  Block block(uint64_t at) const {
    Block b;
    b.n = static_cast<uint32_t>(std::min<uint64_t>(kCodecBlock, shape_.count - at * kCodecBlock));
    b.k = kept(shape_, b.n);
    b.entries = from_ + at * kept(shape_, kCodecBlock) * (kBytes + sizeof(uint16_t));
    b.indices = b.entries + b.k * kBytes;
    return b;
  }

  const CodecShape& shape_;
  const std::byte *from_, *shared_;
  uint64_t next_ = 0;  // the element after the last call's, and its block's first entry from there on
  uint32_t next_entry_ = 0;
};

template <class C>
bool decode(const CodecShape& shape, const std::byte* from, const void* shared, void* out) {
  Decoder<C> decoder(shape, from, shared);
  for (uint64_t first = 0; first < shape.count; first += kCodecBlock) {
    const uint64_t n = std::min<uint64_t>(kCodecBlock, shape.count - first);
    if (!decoder.ordered(first, n)) return false;
    decoder.values(first, n, static_cast<std::byte*>(out) + first * sizeof(typename C::Stored));
  }
  return true;
}

uint64_t piece_of(const CodecRange& range) { return std::max<uint64_t>(1, kCodecPiece / range.row) * range.row; }

template <class C>
bool decode(const CodecShape& shape, const std::byte* from, const void* shared, const CodecRange& range,
            const CodecUse& use) {
  Decoder<C> decoder(shape, from, shared);
  if (!decoder.ordered(range.first, range.count)) return false;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const uint64_t piece = std::min(piece_of(range), range.count);
  const auto lines = std::make_unique_for_overwrite<Line[]>(piece * sizeof(typename C::Stored) / sizeof(Line) + 1);
  auto* const values = reinterpret_cast<std::byte*>(lines.get());
  for (uint64_t done = 0; done < range.count;) {
    const uint64_t n = std::min(piece, range.count - done);
    decoder.values(range.first + done, n, values);
    if (!use(range.first + done, n, values)) return true;
    done += n;
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
  if (n == 0) return 0;
  const double element = shape.type == moecclFloat32 ? 4 : 2;
  // At least one: what error feedback carries over would otherwise never leave a short block.
  return std::max(1u, static_cast<uint32_t>(n * element / (shape.ratio * (element + 2))));
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

bool codec_copy(const void* expert, void* to, uint64_t count, size_t element_bytes, uint32_t number,
                const CodecUpdate& update) {
  const uint64_t piece = update ? kCodecBlock : count;
  for (uint64_t first = 0; first < count; first += piece) {
    const uint64_t n = std::min(piece, count - first), at = first * element_bytes;
    if (update && !update(number, first, n)) return false;
    best().copy(static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(expert) + at, n * element_bytes);
  }
  return true;
}

bool codec_encode(const CodecTable& table, const CodecShape& shape, const CodecExperts& experts,
                  const CodecUpdate& update) {
  const CodecHeader header = codec_header(shape);
  const uint64_t bytes = codec_bytes(shape), element = shape.type == moecclFloat32 ? 4 : 2;
  for (uint32_t e = 0; e < experts.n; ++e) {
    std::byte* to = static_cast<std::byte*>(experts.encoded) + e * bytes;
    std::memcpy(to, &header, sizeof(header));
    if (shape.ratio > 1) continue;
    const std::byte* from = static_cast<const std::byte*>(experts.experts) + e * shape.count * element;
    if (!codec_copy(from, to + sizeof(header), shape.count, element, e, update)) return false;
    if (experts.errors != nullptr) experts.errors[e] = {};
  }
  if (shape.ratio <= 1) return true;
  return shape.type == moecclFloat32 ? encode<Fp32Codec>(table, shape, experts, update)
                                     : encode<Bf16Codec>(table, shape, experts, update);
}

CodecError codec_encode(const CodecTable& table, const CodecShape& shape, const void* expert, const void* shared,
                        void* encoded) {
  CodecError error;
  (void)codec_encode(table, shape, {expert, shared, encoded, &error, 1}, {});
  return error;
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
  if (shape.ratio <= 1) return true;
  const std::byte* from = static_cast<const std::byte*>(encoded) + sizeof(CodecHeader);
  return shape.type == moecclFloat32 ? Decoder<Fp32Codec>(shape, from, nullptr).ordered(0, shape.count)
                                     : Decoder<Bf16Codec>(shape, from, nullptr).ordered(0, shape.count);
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

void codec_use(const void* values, size_t element_bytes, const CodecRange& range, const CodecUse& use) {
  const uint64_t piece = piece_of(range);
  for (uint64_t done = 0; done < range.count; done += piece) {
    const uint64_t first = range.first + done;
    if (!use(first, std::min(piece, range.count - done), static_cast<const std::byte*>(values) + first * element_bytes))
      return;
  }
}

bool codec_decode(const CodecShape& shape, const void* encoded, uint64_t bytes, const void* shared,
                  const CodecRange& range, const CodecUse& use) {
  if (!header_valid(shape, encoded, bytes)) return false;
  const std::byte* from = static_cast<const std::byte*>(encoded) + sizeof(CodecHeader);
  if (shape.ratio <= 1) {
    codec_use(from, shape.type == moecclFloat32 ? 4 : 2, range, use);
    return true;
  }
  return shape.type == moecclFloat32 ? decode<Fp32Codec>(shape, from, shared, range, use)
                                     : decode<Bf16Codec>(shape, from, shared, range, use);
}

const CodecTable* select_codec(const char* name) {
  // A processor that runs the kernel table of a name also runs the codec table of that name.
  if (select(name) == nullptr) return nullptr;
#if defined(MOECCL_KERNELS_X86)
  if (std::strcmp(name, "avx512") == 0) return &avx512_codec();
  if (std::strcmp(name, "avx2") == 0) return &avx2_codec();
#elif defined(MOECCL_KERNELS_NEON)
  if (std::strcmp(name, "neon") == 0) return &neon_codec();
#endif
  return &reference_codec();
}

const CodecTable& best_codec() {
  static const CodecTable& table = *select_codec(best().name);
  return table;
}

}  // namespace moeccl::kernels
