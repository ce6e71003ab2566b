// SPDX-License-Identifier: Apache-2.0
// Turns the extents of a plan into ranges. Executors, checker and cost model share this one definition.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/table.h"
#include "src/plan/plan.h"

namespace moeccl::plan {

// A step of `rank` that stores at least this much for another core to read stores it past the cache. Modified lines in
// one core's cache reach another core at 1.6 to 14 GB/s, depending on where the host has placed the two; memory gives 8
// or more.
inline constexpr uint64_t kStreamSharedBytes = 4 << 10;

inline bool streams_to_others(const Ref& dst, uint32_t rank, uint64_t bytes) {
  const bool others_read = dst.buffer == Buffer::kStaging || (dst.buffer == Buffer::kOutput && dst.rank != rank);
  return others_read && bytes >= kStreamSharedBytes;
}

struct Range {
  uint64_t offset = 0;  // elements from the start of the buffer
  uint64_t length = 0;  // elements
};

// One row list at one chunk; an element is a row. For kGatherRows, row i of the packed destination block is at
// dst_first + i (slot-relative) and comes from src_index[i] or src_first + i. For kScatterRows, src_index[i]
// (slot-relative) goes to dst_index[i] of Output. Indices into Input or Output are relative to the buffer, those into
// Staging to the slot.
struct RowBlock {
  const uint32_t* src_index = nullptr;
  const uint32_t* dst_index = nullptr;
  uint64_t src_first = 0, dst_first = 0;
  uint64_t count = 0;
  const float* weights = nullptr;  // kScatterRows: [count] scale of each row, null: none
};

// kReduceRows at one chunk: row dst (dst_index ? dst_index[i] : dst_first + i) = the sum of terms [offsets[i],
// offsets[i+1]). With src_first, the block sums stretches: row dst_first + i = the sum over the step's srcs k of row
// src_first[k] + i, and its other lists are ignored.
using RowTermRef = kernels::RowTerm;  // row relative to the buffer (Input) or slot (Staging); segment: which src
struct SumBlock {
  const uint64_t* offsets = nullptr;  // [count + 1]
  const RowTermRef* terms = nullptr;
  const float* weights = nullptr;  // [terms]
  const uint32_t* dst_index = nullptr;
  uint64_t dst_first = 0;
  uint64_t count = 0;
  const uint64_t* src_first = nullptr;  // [n_srcs]
};

// Lengths of row lists for readers that move nothing, over all chunks together: each chunk has an even share.
struct RowCounts {
  struct Sum {
    uint64_t rows = 0, terms = 0;  // written; read
  };
  std::span<const uint32_t> rows;  // [lists]
  std::span<const Sum> sums;       // [lists of kReduceRows]
};

struct Binding {
  Chunking chunking;
  uint32_t element_bytes = 1;
  uint64_t slot_elements = 0;  // stride of staging slots that hold a whole chunk
  uint64_t count = 0;          // uniform block length; block b is at b * count
  // AllToAllv: this rank's blocks; null for uniform ones.
  const uint64_t *in_offset = nullptr, *in_length = nullptr, *out_offset = nullptr, *out_length = nullptr;
  // Rows: list l at chunk c is rows[l * n_chunks + c]; a step's `rows` is l. The same holds for `sums` and kReduceRows.
  std::span<const RowBlock> rows;
  std::span<const SumBlock> sums;
  const RowCounts* counts = nullptr;  // replaces rows and sums where nothing runs
};

// Returns the elements of chunk `chunk` of a block of `length`.
inline Range chunk_range(const Chunking& k, uint64_t length, uint32_t chunk) {
  const uint64_t begin = std::min(length, k.chunk * chunk);
  return {begin, std::min(length - begin, k.chunk)};
}

// Rounds up to whole 64-byte lines. Element sizes are powers of two or rows.
inline uint64_t whole_lines(uint64_t elements, uint32_t element_bytes) {
  const uint64_t line = element_bytes >= 64 ? 1 : 64 / element_bytes;
  return (elements + line - 1) / line * line;
}

// Parts are as even as 64-byte lines allow, so that ranks that write neighbouring parts do not share lines.
inline Range part_range(uint64_t length, uint32_t element_bytes, uint32_t part, uint32_t parts) {
  if (parts == 1) return {0, length};
  const uint64_t size = whole_lines((length + parts - 1) / parts, element_bytes);
  const uint64_t begin = std::min(length, size * part);
  return {begin, std::min(length - begin, size)};
}

// Returns the length of the block that a Ref of Input or Output names: from the Binding's v-arrays if they are set,
// otherwise the uniform count.
inline uint64_t block_length(const Binding& b, const Ref& ref) {
  if (ref.buffer == Buffer::kInput && b.in_length) return b.in_length[ref.index];
  if (ref.buffer == Buffer::kOutput && b.out_length) return b.out_length[ref.index];
  return b.count;
}
inline uint64_t block_offset(const Binding& b, const Ref& ref) {
  if (ref.buffer == Buffer::kInput && b.in_offset) return b.in_offset[ref.index];
  if (ref.buffer == Buffer::kOutput && b.out_offset) return b.out_offset[ref.index];
  return b.count * ref.index;
}

// Returns the block length that governs a step: that of its first own Input or Output Ref, destination first, or else
// the uniform count. In uniform operations, a peer's Input or Output block has the length of ours.
uint64_t governing_length(const Binding& b, const Program& program, const Step& step);

// Returns the elements of a slot that holds a part of a chunk.
inline uint64_t part_slot_elements(const Binding& b, const Program& program) {
  return part_range(b.slot_elements, b.element_bytes, 0, program.slot_parts).length;
}
inline uint64_t rotation_elements(const Binding& b, const Program& program) {
  const uint64_t whole = program.n_slots * b.slot_elements;
  return program.n_part_slots == 0 ? whole : whole + program.n_part_slots * part_slot_elements(b, program);
}
inline uint64_t staging_elements(const Binding& b, const Program& program) {
  return program.depth * rotation_elements(b, program);
}
inline uint64_t elements_of_slot(const Binding& b, const Program& program, const Ref& ref) {
  return program.holds_part(ref) ? part_slot_elements(b, program) : b.slot_elements;
}

// Returns the first element of a staging slot at `chunk`: the base of its rows.
inline uint64_t slot_base(const Binding& b, const Program& program, const Ref& ref, uint32_t chunk) {
  const uint64_t rotation = chunk % program.depth * rotation_elements(b, program);
  if (!program.holds_part(ref)) return rotation + ref.index * b.slot_elements;
  return rotation + program.n_slots * b.slot_elements + (ref.index - program.n_slots) * part_slot_elements(b, program);
}

// Returns the range of `ref` at `chunk` in its buffer, for a step governed by blocks of `length`.
inline Range resolve(const Binding& b, const Program& program, const Ref& ref, uint64_t length, uint32_t chunk) {
  const Range in_block = chunk_range(b.chunking, length, chunk);
  const Range in_chunk = part_range(in_block.length, b.element_bytes, ref.part, ref.parts);
  if (ref.buffer == Buffer::kStaging) {
    const uint64_t base = slot_base(b, program, ref, chunk);
    return {program.holds_part(ref) ? base : base + in_chunk.offset, in_chunk.length};
  }
  return {block_offset(b, ref) + in_block.offset + in_chunk.offset, in_chunk.length};
}

}  // namespace moeccl::plan
