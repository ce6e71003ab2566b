// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

namespace moeccl::transport::shm {
namespace {

TEST(Segment, PeerMapsTheSameMemory) {
  const SegmentShape shape{4, 1, 1 << 16, 2048};
  auto mine = *Segment::create(shape, true);
  auto theirs = *Segment::map(shape, Fd(dup(mine->fd().get())));
  mine->staging()[100] = std::byte{42};
  mine->signal(3, 2).word.store(7);
  EXPECT_EQ(theirs->staging()[100], std::byte{42});
  EXPECT_EQ(theirs->signal(3, 2).word.load(), 7u);
}

TEST(Segment, RegionsDoNotOverlap) {
  const SegmentShape shape{3, 0, 1 << 16, 2048};
  auto s = *Segment::create(shape, false);
  auto* board = reinterpret_cast<std::byte*>(&s->board());
  auto* signals = reinterpret_cast<std::byte*>(&s->signal(0, 0));
  auto* signals_end = reinterpret_cast<std::byte*>(&s->signal(2, kSigsPerPeer - 1) + 1);
  auto* blocks = reinterpret_cast<std::byte*>(s->blocks(0));
  auto* blocks_end = reinterpret_cast<std::byte*>(s->blocks(1) + 3);
  EXPECT_LE(board + sizeof(Board), signals);
  EXPECT_LE(signals_end, blocks);
  EXPECT_LE(blocks_end, reinterpret_cast<std::byte*>(&s->pace(0)));
  EXPECT_LE(reinterpret_cast<std::byte*>(&s->pace(kPaceLevels - 1) + 1), s->staging());
  EXPECT_LE(s->staging() + shape.staging_bytes, s->message(0, 0));
}

TEST(Segment, UnsealedOrShortFilesAreRefused) {
  const SegmentShape shape{2, 0, 1 << 16, 2048};
  Fd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), static_cast<off_t>((*Segment::create(shape, false))->bytes())), 0);
  EXPECT_EQ(Segment::map(shape, Fd(dup(unsealed.get()))).status().code(), moecclRemoteError);
  auto small_file = driver::shared_segment("test", 4096);
  const Status status = Segment::map(shape, std::move(*small_file)).status();
  EXPECT_NE(status.message().find("4096"), std::string::npos) << status.message();
}

TEST(Segment, AnotherLayoutIsRefused) {
  const SegmentShape shape{2, 0, 1 << 16, 2048};
  auto zeros = driver::shared_segment("test", (*Segment::create(shape, false))->bytes());
  EXPECT_EQ(Segment::map(shape, std::move(*zeros)).status().code(), moecclRemoteError);
}

TEST(Segment, LeavesNothingInDevShm) {
  const SegmentShape shape{2, 0, 1 << 16, 2048};
  auto s = *Segment::create(shape, true);
  EXPECT_EQ(fcntl(s->fd().get(), F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW), F_SEAL_SHRINK | F_SEAL_GROW);
  char path[64], target[256] = {};
  snprintf(path, sizeof(path), "/proc/self/fd/%d", s->fd().get());
  ASSERT_GT(readlink(path, target, sizeof(target) - 1), 0);
  EXPECT_EQ(std::string(target).rfind("/memfd:", 0), 0u) << target;
}

}  // namespace
}  // namespace moeccl::transport::shm
