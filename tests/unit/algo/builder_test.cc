// SPDX-License-Identifier: Apache-2.0
#include "src/algo/builder.h"

#include <gtest/gtest.h>

namespace moeccl::algo {
namespace {

Shape shape_of(uint64_t count, uint32_t element_bytes, uint64_t staging_bytes = uint64_t{16} << 20) {
  Shape shape;
  shape.count = count;
  shape.element_bytes = element_bytes;
  shape.staging_bytes = staging_bytes;
  shape.n_ranks = 4;
  return shape;
}

TEST(Cut, KeepsSmallBlocksWhole) {
  const Chunking k = cut(shape_of(100, 4), {1, 2}, 4096);
  EXPECT_EQ(k.chunk, 100u);
  EXPECT_EQ(k.n_chunks, 1u);
}

TEST(Cut, NothingIsOneChunk) { EXPECT_EQ(cut(shape_of(0, 4), {1, 2}, 4096).n_chunks, 1u); }

TEST(Cut, MakesChunksEvenAndWholeLines) {
  const Chunking k = cut(shape_of(1025, 4), {1, 2}, 4096);  // 1024 elements would leave one over
  EXPECT_EQ(k.n_chunks, 2u);
  EXPECT_EQ(k.chunk, 528u);  // 513 rounded up to lines of 16
}

TEST(Cut, StaysWithinTheStaging) {
  const Chunking k = cut(shape_of(1 << 20, 4, 64 << 10), {7, 2}, 512 << 10);
  EXPECT_LE(k.chunk * 4 * 7 * 2, 64u << 10);
  EXPECT_GE(k.chunk * k.n_chunks, 1u << 20);
}

TEST(Cut, CountsSlotsOfOnePartByTheirPart) {
  // A rotation holds one slot and 64 / 16 = 4 more.
  const Chunking k = cut(shape_of(1 << 26, 4, 16 << 20), {1, 2, 64, 16}, 16 << 20);
  EXPECT_LE(k.chunk * 4 * 5 * 2, 16u << 20);
  EXPECT_GE(k.chunk * 4 * 5 * 2, 15u << 20);
  // Every part takes at least a line.
  EXPECT_TRUE(chunks_fit(shape_of(1000, 4, 2 * (64 + 64 * 64)), {1, 2, 64, 16}).ok());
  EXPECT_FALSE(chunks_fit(shape_of(1000, 4, 2 * (64 + 64 * 64) - 1), {1, 2, 64, 16}).ok());
}

TEST(Cut, DoesNotDependOnBlocksOfUnknownLength) {
  Shape shape = shape_of(0, 4);
  shape.op = moecclOpAllToAllv;
  const uint64_t chunk = cut(shape, {4, 2}, 65536).chunk;
  shape.count = 7;
  EXPECT_EQ(cut(shape, {4, 2}, 65536).chunk, chunk);
  shape.count = 100000;
  EXPECT_EQ(cut(shape, {4, 2}, 65536).chunk, chunk);
  EXPECT_EQ(cut(shape, {4, 2}, 65536).n_chunks, (100000 + chunk - 1) / chunk);
}

TEST(Fit, ComparesWithTheCap) {
  EXPECT_TRUE(whole_fits(shape_of(16, 4, 256), {4, 1}).ok());
  EXPECT_FALSE(whole_fits(shape_of(17, 4, 256), {4, 1}).ok());
  EXPECT_TRUE(chunks_fit(shape_of(1000, 4, 256), {4, 1}).ok());
  EXPECT_FALSE(chunks_fit(shape_of(1000, 4, 255), {4, 1}).ok());
}

TEST(ProgramBuilder, DropsEmptyLanes) {
  ProgramBuilder b(shape_of(1, 4), 1, {1, 1});
  b.lane(LaneKind::kCopy);
  b.copy(out(1), in(1));
  const Program program = std::move(b).finish();
  ASSERT_EQ(program.lanes.size(), 1u);
  EXPECT_EQ(program.lanes[0].kind, LaneKind::kCopy);
}

TEST(ProgramBuilder, SignalsPeersFromTheNextOneOn) {
  ProgramBuilder b(shape_of(1, 4), 1, {1, 1});
  b.signal_all(3);
  b.wait_all(3, 2);
  const Program program = std::move(b).finish();
  const auto& steps = program.lanes[0].steps;
  ASSERT_EQ(steps.size(), 6u);
  EXPECT_EQ(steps[0].peer, 2u);
  EXPECT_EQ(steps[2].peer, 0u);
  EXPECT_EQ(steps[3].peer, 0u);
  EXPECT_EQ(steps[3].lag, 2u);
}

}  // namespace
}  // namespace moeccl::algo
