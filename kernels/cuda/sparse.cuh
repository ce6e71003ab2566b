// SPDX-License-Identifier: Apache-2.0
// Top-k residual coding and its inverse, which args.h defines. One block handles each segment.
#pragma once

#include "kernels/checksum.h"
#include "kernels/cuda/args.h"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

// Returns how many threads before this one have v, in thread order; *total: in the whole block. `warps` is shared, [8].
MOECCL_DEVICE uint32_t block_rank(bool v, uint32_t* warps, uint32_t* total) {
  const uint32_t lane = thread_index() % kWarp, warp = thread_index() / kWarp, votes = ballot(v);
  block_sync();  // the last round's counts have been read
  if (lane == 0) warps[warp] = count_bits(votes);
  block_sync();
  uint32_t before = 0;
  *total = 0;
  for (uint32_t w = 0; w < block_threads() / kWarp; ++w) {
    if (w == warp) before = *total;
    *total += warps[w];
  }
  return before + count_bits(votes & ((1u << lane) - 1));
}

template <class E>
MOECCL_DEVICE float residual(const EncodeKernelArgs& a, size_t i) {
  using Stored = typename E::Stored;
  float r = E::load(load_any<Stored>(at(a.in, i * sizeof(Stored))));
  if (a.base) r = r - E::load(load_any<Stored>(at(a.base, i * sizeof(Stored))));
  return a.carry ? r + a.carry[i] : r;
}
// Returns larger keys for larger magnitudes. All NaNs have the same key, above all others.
MOECCL_DEVICE uint32_t magnitude_key(float r) {
  const uint32_t bits = kernels::bits_of(r) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0x7f800001u : bits;
}

// Finds the keep-th largest key of residual(0) to residual(length - 1), digit by digit from the top. *ties is how many
// keys equal to it are kept.
template <class Residual>
MOECCL_DEVICE uint32_t threshold(const Residual& residual_of, size_t length, uint32_t keep, uint32_t* ties) {
  MOECCL_SHARED uint32_t histogram[256];
  MOECCL_SHARED uint32_t digit, left;
  uint32_t prefix = 0, mask = 0, need = keep;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (uint32_t b = thread_index(); b < 256; b += block_threads()) histogram[b] = 0;
    block_sync();
    for (size_t j = thread_index(); j < length; j += block_threads()) {
      const uint32_t key = magnitude_key(residual_of(j));
      if ((key & mask) == prefix) atomic_add(&histogram[(key >> shift) & 255], 1);
    }
    block_sync();
    if (thread_index() == 0) {
      uint32_t b = 255;
      left = need;
      for (; b > 0 && histogram[b] < left; --b) left -= histogram[b];
      digit = b;
    }
    block_sync();
    prefix |= digit << shift;
    mask |= 255u << shift;
    need = left;
  }
  *ties = need;
  return prefix;
}

// Calls take(j, residual, sent, position) for each element of a segment, where position counts the elements that are
// sent before it. The `keep` largest are sent; the lower index wins a tie.
template <class Residual, class Take>
MOECCL_DEVICE void select_largest(const Residual& residual_of, size_t length, uint32_t keep, const Take& take) {
  MOECCL_SHARED uint32_t warps[kBlockThreads / kWarp];
  uint32_t ties = 0, ties_before = 0, sent_before = 0;
  const uint32_t least = threshold(residual_of, length, keep, &ties);
  const size_t rounds = (length + block_threads() - 1) / block_threads();
  for (size_t round = 0; round < rounds; ++round) {
    const size_t j = round * block_threads() + thread_index();
    const bool here = j < length;
    const float r = here ? residual_of(j) : 0;
    const uint32_t key = magnitude_key(r);
    uint32_t total = 0;
    const bool tie = here && key == least;
    const uint32_t tie_rank = ties_before + block_rank(tie, warps, &total);
    ties_before += total;
    const bool sent = here && (key > least || (tie && tie_rank < ties));
    const uint32_t to = sent_before + block_rank(sent, warps, &total);
    sent_before += total;
    if (here) take(j, r, sent, to);  // after the last barrier of the round
  }
}

template <class E>
MOECCL_DEVICE void encode_segment(const EncodeKernelArgs& a, size_t segment) {
  using Stored = typename E::Stored;
  const size_t first = segment * a.length;
  const auto residual_of = [&](size_t j) { return residual<E>(a, first + j); };
  select_largest(residual_of, a.length, a.keep, [&](size_t j, float r, bool sent, uint32_t position) {
    const size_t to = segment * a.keep + position;
    const Stored coded = E::round(r);
    if (sent) {
      a.index[to] = static_cast<uint32_t>(j);
      store_any<Stored>(at(a.value, to * sizeof(Stored)), coded);
    }
    if (a.carry) a.carry[first + j] = sent ? r - E::load(coded) : r;
  });
}

template <class E>
MOECCL_DEVICE void encode(const EncodeKernelArgs& a) {
  for (size_t s = block_index(); s < a.n_segments; s += grid_blocks()) {
    block_sync();
    encode_segment<E>(a, s);
  }
}

template <class E>
MOECCL_DEVICE void decode_add(const DecodeKernelArgs& a) {
  using Stored = typename E::Stored;
  for (size_t s = block_index(); s < a.n_segments; s += grid_blocks()) {
    uint8_t* out = at(a.out, s * a.length * sizeof(Stored));
    const uint8_t* base = at(a.base, s * a.length * sizeof(Stored));
    if (out != base) {
      for (size_t j = thread_index(); j < a.length; j += block_threads())
        store_any<Stored>(out + j * sizeof(Stored), load_any<Stored>(base + j * sizeof(Stored)));
    }
    block_sync();
    for (size_t i = thread_index(); i < a.keep; i += block_threads()) {
      const size_t j = a.index[s * a.keep + i];
      if (j >= a.length) continue;  // the index came from another rank
      const float v = E::load(load_any<Stored>(at(a.value, (s * a.keep + i) * sizeof(Stored))));
      const float sum = E::load(load_any<Stored>(base + j * sizeof(Stored))) + v;
      store_any<Stored>(out + j * sizeof(Stored), E::round(sum));
    }
  }
}

inline constexpr uint32_t kCodecElements = 1 << 16;  // kernels::kCodecBlock

// Returns where a block of an encoded expert begins: values, then 16-bit indices.
template <class E>
MOECCL_DEVICE size_t codec_offset(size_t block, uint32_t keep) {
  return sizeof(CodecHeaderBits) + block * keep * (sizeof(typename E::Stored) + sizeof(uint16_t));
}
MOECCL_DEVICE size_t codec_blocks(size_t count) { return (count + kCodecElements - 1) / kCodecElements; }
MOECCL_DEVICE uint32_t codec_length(size_t count, size_t first) {
  return static_cast<uint32_t>(count - first < kCodecElements ? count - first : kCodecElements);
}

// The part of an encoded expert that one block of the launch handles.
template <class Byte>
struct CodecPart {
  size_t first;  // its first element
  uint32_t length, keep;
  Byte *value, *index;
};
template <class E, class Byte>
MOECCL_DEVICE CodecPart<Byte> codec_part(size_t count, Byte* encoded, size_t block, uint32_t keep, uint32_t keep_last) {
  CodecPart<Byte> p{};
  p.first = block * kCodecElements;
  p.length = codec_length(count, p.first);
  p.keep = p.length == kCodecElements ? keep : keep_last;
  p.value = encoded + codec_offset<E>(block, keep);
  p.index = p.value + p.keep * sizeof(typename E::Stored);
  return p;
}
MOECCL_DEVICE void write_header(void* encoded, const CodecHeaderBits& header) {
  const uint32_t byte = thread_index();
  if (byte < sizeof(header)) *at(encoded, byte) = static_cast<uint8_t>(header.word[byte / 8] >> byte % 8 * 8);
}

template <class E>
MOECCL_DEVICE void codec_encode_block(const CodecEncodeArgs& a, size_t block) {
  using Stored = typename E::Stored;
  MOECCL_SHARED double lost[kBlockThreads], whole[kBlockThreads];
  MOECCL_SHARED uint32_t least_dropped;  // complement of the largest key that is not sent
  const CodecPart p = codec_part<E>(a.count, at(a.encoded, 0), block, a.keep, a.keep_last);
  EncodeKernelArgs part{};
  part.in = at(a.expert, p.first * sizeof(Stored));
  part.base = at(a.shared, p.first * sizeof(Stored));
  if (thread_index() == 0) least_dropped = ~0u;
  double left_squares = 0, squares = 0;
  const auto residual_of = [&](size_t j) { return residual<E>(part, j); };
  select_largest(residual_of, p.length, p.keep, [&](size_t j, float r, bool sent, uint32_t to) {
    const float e = E::load(load_any<Stored>(at(part.in, j * sizeof(Stored))));
    double left = r;  // loss after decoding, which rounds to the type once more
    if (sent) {
      const Stored coded = E::round(r);
      store_any<Stored>(p.value + to * sizeof(Stored), coded);
      store_any<uint16_t>(p.index + to * sizeof(uint16_t), static_cast<uint16_t>(j));
      const float base = E::load(load_any<Stored>(at(part.base, j * sizeof(Stored))));
      left = static_cast<double>(e) - E::load(E::round(base + E::load(coded)));
    } else {
      atomic_min(&least_dropped, ~magnitude_key(r));
    }
    left_squares += left * left;
    squares += static_cast<double>(e) * e;
  });
  lost[thread_index()] = left_squares;
  whole[thread_index()] = squares;
  block_sync();
  if (thread_index() > 0) return;
  CodecError sum{0, 0, least_dropped == ~0u ? 0 : ~least_dropped, 0};
  for (uint32_t t = 0; t < block_threads(); ++t) {
    sum.lost += lost[t];
    sum.whole += whole[t];
  }
  a.error[block] = sum;
}

template <class E>
MOECCL_DEVICE void codec_encode(const CodecEncodeArgs& a) {
  if (block_index() == 0) write_header(a.encoded, a.header);
  for (size_t b = block_index(); b < codec_blocks(a.count); b += grid_blocks()) {
    block_sync();
    codec_encode_block<E>(a, b);
  }
}

// out = base plus what was sent, where something was; out may be base.
template <class E, class Byte>
MOECCL_DEVICE void add_sent(const CodecPart<Byte>& p, const uint8_t* base, uint8_t* out) {
  using Stored = typename E::Stored;
  for (uint32_t i = thread_index(); i < p.keep; i += block_threads()) {
    const uint32_t j = load_any<uint16_t>(p.index + i * sizeof(uint16_t));
    if (j >= p.length) continue;  // the index came from another rank
    const float sum =
        E::load(load_any<Stored>(base + j * sizeof(Stored))) + E::load(load_any<Stored>(p.value + i * sizeof(Stored)));
    store_any<Stored>(out + j * sizeof(Stored), E::round(sum));
  }
}

template <class E>
MOECCL_DEVICE void codec_decode(const CodecDecodeArgs& a) {
  using Stored = typename E::Stored;
  for (size_t b = block_index(); b < codec_blocks(a.count); b += grid_blocks()) {
    const CodecPart p = codec_part<E>(a.count, at(a.encoded, 0), b, a.keep, a.keep_last);
    uint8_t* const out = at(a.out, p.first * sizeof(Stored));
    const uint8_t* const base = at(a.shared, p.first * sizeof(Stored));
    for (uint32_t j = thread_index(); j < p.length; j += block_threads())
      store_any<Stored>(out + j * sizeof(Stored), load_any<Stored>(base + j * sizeof(Stored)));
    block_sync();
    add_sent<E>(p, base, out);
  }
}

// A gradient plus its remainder, as fp32 and as what is encoded.
template <class E>
MOECCL_DEVICE float gradient_sum(const uint8_t* gradient, const float* remainder, size_t j) {
  return E::load(load_any<typename E::Stored>(gradient + j * sizeof(typename E::Stored))) + remainder[j];
}
MOECCL_DEVICE float finite_or_zero(float v) { return v - v == 0 ? v : 0; }

// Calls work(gradient, remainder, part) for this block's share of the parts of all gradients.
template <class E, class Work>
MOECCL_DEVICE void each_gradient_part(const GradientArgs& a, const Work& work) {
  using Stored = typename E::Stored;
  const size_t blocks = codec_blocks(a.count);
  for (size_t i = block_index(); i < a.n * blocks; i += grid_blocks()) {
    const size_t g = i / blocks;
    uint8_t* const encoded = at(a.encoded, g * a.expert_bytes);
    const CodecPart part = codec_part<E>(a.count, encoded, i % blocks, a.keep, a.keep_last);
    if (i % blocks == 0 && a.header.word[0] != 0) write_header(encoded, a.header);
    block_sync();
    work(at(a.gradients, (a.which[g] * a.count + part.first) * sizeof(Stored)),
         a.remainders + a.remainder[g] * a.count + part.first, part);
  }
}

template <class E>
MOECCL_DEVICE void gradient_encode(const GradientArgs& a) {
  using Stored = typename E::Stored;
  each_gradient_part<E>(a, [&](const uint8_t* gradient, const float* remainder, const CodecPart<uint8_t>& p) {
    const auto sum_of = [&](size_t j) { return E::load(E::round(gradient_sum<E>(gradient, remainder, j))); };
    select_largest(sum_of, p.length, p.keep, [&](size_t j, float sum, bool sent, uint32_t to) {
      if (!sent) return;
      store_any<Stored>(p.value + to * sizeof(Stored), E::round(sum));
      store_any<uint16_t>(p.index + to * sizeof(uint16_t), static_cast<uint16_t>(j));
    });
  });
}

// The remainder becomes the sum, less what was sent of it.
template <class E>
MOECCL_DEVICE void gradient_keep(const GradientArgs& a) {
  using Stored = typename E::Stored;
  each_gradient_part<E>(a, [&](const uint8_t* gradient, float* remainder, const CodecPart<uint8_t>& p) {
    for (uint32_t j = thread_index(); j < p.length; j += block_threads())
      remainder[j] = finite_or_zero(gradient_sum<E>(gradient, remainder, j));
    block_sync();
    for (uint32_t i = thread_index(); i < p.keep; i += block_threads()) {
      const uint32_t j = load_any<uint16_t>(p.index + i * sizeof(uint16_t));
      const float sent = E::load(load_any<Stored>(p.value + i * sizeof(Stored)));
      remainder[j] = finite_or_zero(remainder[j] - sent);
    }
  });
}

// Adds what was sent of a[n] to out[n][count].
template <class E>
MOECCL_DEVICE void codec_add(const CodecAddArgs& a) {
  const size_t blocks = codec_blocks(a.count);
  for (size_t i = block_index(); i < a.n * blocks; i += grid_blocks()) {
    const size_t g = i / blocks;
    const CodecPart p = codec_part<E>(a.count, at(a.encoded, g * a.expert_bytes), i % blocks, a.keep, a.keep_last);
    uint8_t* const out = at(a.out, (g * a.count + p.first) * sizeof(typename E::Stored));
    add_sent<E>(p, out, out);
  }
}

MOECCL_DEVICE void codec_check(const CodecCheckArgs& a, const Team& team) {
  const size_t header = sizeof(CodecHeaderBits), per_expert = header + (a.n_last > 0 ? a.keep_last : 0);
  for (size_t i = team.thread; i < a.n_experts * per_expert; i += team.n_threads) {
    const uint8_t* const expert = at(a.encoded, i / per_expert * a.expert_bytes);
    const size_t item = i % per_expert;
    const bool wrong =
        item < header
            ? expert[item] != static_cast<uint8_t>(a.header.word[item / 8] >> item % 8 * 8)
            : load_any<uint16_t>(expert + a.expert_bytes - (item - header + 1) * sizeof(uint16_t)) >= a.n_last;
    if (wrong) atomic_or(a.bad, 1);
  }
}

MOECCL_DEVICE void checksum(const ChecksumArgs& a, const Team& team) {
  MOECCL_SHARED uint64_t sums[kBlockThreads];
  uint64_t sum = 0;
  const size_t words = a.bytes / sizeof(uint64_t);
  for (size_t i = team.thread; i < words; i += team.n_threads)
    sum += kernels::checksum_term(load_any<uint64_t>(at(a.data, i * sizeof(uint64_t))), i);
  if (team.thread == 0 && a.bytes % sizeof(uint64_t) != 0) {
    uint64_t last = 0;
    for (size_t b = words * sizeof(uint64_t); b < a.bytes; ++b)
      last |= static_cast<uint64_t>(*at(a.data, b)) << b % sizeof(uint64_t) * 8;
    sum += kernels::checksum_term(last, words);
  }
  sums[thread_index()] = sum;
  block_sync();
  if (thread_index() > 0) return;
  for (uint32_t t = 1; t < block_threads(); ++t) sum += sums[t];
  a.sum[block_index()] = sum;
}

}  // namespace moeccl::cuda
