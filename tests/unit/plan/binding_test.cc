// SPDX-License-Identifier: Apache-2.0
#include "src/plan/binding.h"

#include <gtest/gtest.h>

namespace moeccl::plan {
namespace {

TEST(Binding, PartsCoverTheirExtentExactly) {
  for (const uint32_t element_bytes : {1u, 2u, 4u, 8u, 64u, 100u}) {
    for (uint64_t length = 0; length < 300; length += length < 20 ? 1 : 37) {
      for (uint32_t parts = 1; parts <= 40; ++parts) {
        uint64_t next = 0;
        for (uint32_t part = 0; part < parts; ++part) {
          const Range range = part_range(length, element_bytes, part, parts);
          EXPECT_EQ(range.offset, next);
          next += range.length;
          if (range.length > 0 && element_bytes <= 64) {
            EXPECT_EQ(range.offset * element_bytes % 64, 0u);
          }
        }
        EXPECT_EQ(next, length);
      }
    }
  }
}

TEST(Binding, ChunksCoverTheBlockExactly) {
  for (const uint64_t length : {0u, 1u, 99u, 100u, 101u, 250u}) {
    const Chunking chunking{50, 6};
    uint64_t next = 0;
    for (uint32_t c = 0; c < chunking.n_chunks; ++c) {
      const Range range = chunk_range(chunking, length, c);
      EXPECT_EQ(range.offset, next);
      next += range.length;
    }
    EXPECT_EQ(next, length);
  }
}

TEST(Binding, SlotsRotateWithTheChunk) {
  Program program;
  program.n_slots = 3;
  program.depth = 2;
  Binding b;
  b.chunking = {8, 4};
  b.slot_elements = 8;
  b.count = 30;
  const Ref slot{0, Buffer::kStaging, 1, 0, 1};
  EXPECT_EQ(resolve(b, program, slot, b.count, 0).offset, 8u);
  EXPECT_EQ(resolve(b, program, slot, b.count, 1).offset, (3 + 1) * 8u);
  EXPECT_EQ(resolve(b, program, slot, b.count, 2).offset, 8u);
  EXPECT_EQ(resolve(b, program, slot, b.count, 3).length, 6u);
  EXPECT_EQ(slot_base(b, program, slot, 1), 32u);
}

TEST(Binding, SlotsOfOnePartFollowTheWholeSlotsOfTheirRotation) {
  Program program;
  program.n_slots = 2;
  program.depth = 2;
  program.n_part_slots = 3;
  program.slot_parts = 4;
  Binding b;
  b.element_bytes = 64;
  b.chunking = {10, 2};
  b.slot_elements = 10;
  b.count = 15;
  EXPECT_EQ(part_slot_elements(b, program), 3u);
  EXPECT_EQ(rotation_elements(b, program), 2 * 10 + 3 * 3u);
  EXPECT_EQ(staging_elements(b, program), 2 * 29u);
  const auto at = [&](uint16_t index, uint16_t part, uint32_t chunk) {
    return resolve(b, program, {0, Buffer::kStaging, index, part, 4}, b.count, chunk);
  };
  EXPECT_EQ(at(1, 2, 0).offset, 10 + 6u);  // where it lies in the chunk
  EXPECT_EQ(at(3, 2, 0).offset, 23u);      // at the start of its slot
  EXPECT_EQ(at(3, 2, 0).length, 3u);
  EXPECT_EQ(at(3, 3, 0).length, 1u);
  EXPECT_EQ(at(3, 2, 1).offset, 29 + 23u);
  EXPECT_EQ(at(3, 2, 1).length, 1u);  // the last chunk is short
}

TEST(Binding, GoverningLengthIsThatOfTheFirstOwnBlock) {
  const uint64_t in_offset[] = {0, 10}, in_length[] = {10, 7}, out_offset[] = {0, 5}, out_length[] = {5, 9};
  Binding b;
  b.count = 3;
  b.in_offset = in_offset, b.in_length = in_length, b.out_offset = out_offset, b.out_length = out_length;
  Program program;
  program.rank = 1;
  program.srcs = {{1, Buffer::kInput, 1, 0, 1}, {0, Buffer::kStaging, 0, 0, 1}};
  Step step;
  step.first_src = 0;
  step.n_srcs = 1;
  step.dst = {0, Buffer::kStaging, 0, 0, 1};
  EXPECT_EQ(governing_length(b, program, step), 7u);
  step.dst = {1, Buffer::kOutput, 1, 0, 1};
  EXPECT_EQ(governing_length(b, program, step), 9u);
  step.dst = {0, Buffer::kOutput, 1, 0, 1};
  step.first_src = 1;
  EXPECT_EQ(governing_length(b, program, step), 3u);
}

}  // namespace
}  // namespace moeccl::plan
