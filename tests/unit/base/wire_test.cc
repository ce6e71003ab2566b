// SPDX-License-Identifier: Apache-2.0
#include "src/base/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "src/base/clock.h"
#include "src/base/hash.h"
#include "src/base/random.h"

namespace moeccl {
namespace {

TEST(Wire, WhatIsWrittenIsRead) {
  Writer w;
  w.u8(0xfe);
  w.u16(0x1234);
  w.u32(0x89abcdef);
  w.u64(0x0123456789abcdef);
  w.i32(-7);
  w.i64(std::numeric_limits<int64_t>::min());
  w.f64(-0.1);
  w.string("hello");
  w.bytes({});
  EXPECT_EQ(static_cast<int>(w.view()[1]), 0x34);  // little-endian

  Reader r(w.view());
  EXPECT_EQ(r.u8(), 0xfe);
  EXPECT_EQ(r.u16(), 0x1234);
  EXPECT_EQ(r.u32(), 0x89abcdefu);
  EXPECT_EQ(r.u64(), 0x0123456789abcdefu);
  EXPECT_EQ(r.i32(), -7);
  EXPECT_EQ(r.i64(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(r.f64(), -0.1);
  EXPECT_EQ(r.string(5), "hello");
  EXPECT_TRUE(r.bytes(0).empty());
  EXPECT_TRUE(r.done());
}

TEST(Wire, MissingBytesReadAsZeroAndStayAFailure) {
  Writer w;
  w.u16(7);
  Reader r(w.view());
  EXPECT_EQ(r.u32(), 0u);
  EXPECT_FALSE(r.ok());
  EXPECT_EQ(r.u16(), 0u);  // even though two bytes are left
  EXPECT_FALSE(r.done());
}

TEST(Wire, LengthsBeyondTheCapOrTheBytesAreRefused) {
  Writer w;
  w.string("0123456789");
  Reader capped(w.view());
  EXPECT_EQ(capped.string(9), "");
  EXPECT_FALSE(capped.ok());
  Writer lie;
  lie.u32(0xffffffff);
  Reader r(lie.view());
  EXPECT_TRUE(r.bytes(std::numeric_limits<size_t>::max()).empty());
  EXPECT_FALSE(r.ok());
}

TEST(Wire, LeftoversAreNotDone) {
  Writer w;
  w.u32(1);
  Reader r(w.view());
  r.u16();
  EXPECT_TRUE(r.ok());
  EXPECT_FALSE(r.done());
}

TEST(Wire, RandomBytesNeverReadOutside) {
  SplitMix64 random(1);
  for (int round = 0; round < 20'000; ++round) {
    // On the heap with the exact size, so that the address sanitizer notices an access past the end.
    std::vector<std::byte> bytes(random.below(64));
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    Reader r(bytes);
    size_t seen = 0;
    for (int i = 0; i < 12; ++i) {
      switch (random.below(6)) {
        case 0:
          r.u8();
          break;
        case 1:
          r.u64();
          break;
        case 2:
          seen += r.string(random.below(80)).size();
          break;
        case 3:
          seen += r.bytes(random()).size();
          break;
        case 4:
          seen += r.raw(random.below(200)).size();
          break;
        default:
          r.f64();
      }
    }
    EXPECT_LE(seen, bytes.size());
  }
}

TEST(Hash, EveryBitCounts) {
  unsigned char data[37] = {};
  const uint64_t zero = hash_bytes(data, sizeof(data));
  for (size_t bit = 0; bit < sizeof(data) * 8; ++bit) {
    data[bit / 8] = static_cast<unsigned char>(1u << (bit % 8));
    EXPECT_NE(hash_bytes(data, sizeof(data)), zero);
    data[bit / 8] = 0;
  }
  EXPECT_NE(hash_bytes(data, 36), zero);  // the length too
  EXPECT_NE(hash_combine(hash_combine(0, 1), 2), hash_combine(hash_combine(0, 2), 1));
  EXPECT_NE(hash_string("a"), hash_string("a", 1));
}

TEST(Random, EqualSeedsGiveEqualSequencesWithinTheBound) {
  SplitMix64 a(42);
  SplitMix64 b(42);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(a(), b());
    EXPECT_LT(a.below(7), 7u);
    b.below(7);
    const double unit = a.unit();
    EXPECT_TRUE(unit >= 0 && unit < 1);
    b.unit();
  }
}

TEST(Random, TheKernelsBytesDiffer) {
  uint64_t a = 0;
  uint64_t b = 0;
  ASSERT_TRUE(random_bytes(&a, sizeof(a)).ok());
  ASSERT_TRUE(random_bytes(&b, sizeof(b)).ok());
  EXPECT_NE(a, b);
}

TEST(Clock, DeadlinesEndAndNeverDoesNot) {
  EXPECT_FALSE(Deadline::never().passed());
  EXPECT_GT(Deadline::never().remaining_ms(), 1000);
  EXPECT_TRUE(Deadline::after_ms(std::numeric_limits<int64_t>::max()).is_never());
  EXPECT_TRUE(Deadline::after_ms(-5).passed());
  EXPECT_EQ(Deadline::after_ms(-5).remaining_ms(), 0);
  const Deadline soon = Deadline::after_ms(1000);
  EXPECT_FALSE(soon.passed());
  EXPECT_GT(soon.remaining_ms(), 900);
  EXPECT_LE(soon.remaining_ms(), 1000);
  EXPECT_EQ(Deadline::after_ms(-5).left_ms(), 0);
  // poll() is woken each hour, but a deadline may be later.
  const Deadline tomorrow = Deadline::after_ms(86'400'000);
  EXPECT_LE(tomorrow.remaining_ms(), 3'600'000);
  EXPECT_GT(tomorrow.left_ms(), 86'300'000);
  EXPECT_LE(tomorrow.left_ms(), 86'400'000);
  EXPECT_TRUE(Deadline::after_ms(Deadline::never().left_ms()).is_never());
  EXPECT_EQ(Deadline::earlier(soon, Deadline::never()).at_ns, soon.at_ns);
}

}  // namespace
}  // namespace moeccl
