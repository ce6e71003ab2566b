// SPDX-License-Identifier: Apache-2.0
// The order in which a process's communicators put on TCP links, on a simulated clock and then over loopback.
#include "transport/common/put_order.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "tests/support/ranks.h"
#include "tests/support/tcp_fabrics.h"

namespace moeccl::tests {
namespace {

using transport::kFirstRate;
using transport::kQuiet_ns;
using transport::kShare;
using transport::PutOrder;
using transport::PutState;

constexpr uint32_t kLow = 0, kMiddle = 2, kHigh = 4;
constexpr uint64_t kChunk = 1 << 20;
constexpr int64_t kChunk_ns = static_cast<int64_t>(kChunk * 1'000'000 / kFirstRate);

TEST(TcpLane, AloneEveryClassGoesAtOnce) {
  PutOrder order;
  begins(order, kLow, 1);
  for (int64_t now = 1; now < 1000; ++now) EXPECT_TRUE(may_go(order, kLow, kChunk, now));
  EXPECT_EQ(order.of[kLow].bytes.load(), 999 * kChunk);
  EXPECT_EQ(order.of[kLow].bytes_beside.load(), 0u);
}

TEST(TcpLane, ALessUrgentPutWaitsWhileAMoreUrgentOperationMoves) {
  PutOrder order;
  int64_t now = 1'000'000'000;
  begins(order, kHigh, now);
  EXPECT_FALSE(may_go(order, kLow, kChunk, now));
  EXPECT_FALSE(may_go(order, kMiddle, kChunk, now));
  EXPECT_TRUE(may_go(order, kHigh, kChunk, now));
  // It waits for a peer and not for the line, so no other class is held back.
  now += kQuiet_ns;
  EXPECT_TRUE(may_go(order, kLow, kChunk, now));
  moves(order, kHigh, now);
  EXPECT_FALSE(may_go(order, kLow, kChunk, now));
  ends(order, kHigh);
  EXPECT_TRUE(may_go(order, kLow, kChunk, now));
  // Classes of equal urgency do not wait for each other.
  begins(order, kLow, now);
  EXPECT_TRUE(may_go(order, kLow, kChunk, now));
}

TEST(TcpLane, NobodyStarves) {
  PutOrder order;
  int64_t now = 1'000'000'000;
  begins(order, kHigh, now);
  uint64_t went = 0;
  const int64_t span = 100 * kShare * kChunk_ns;
  for (const int64_t end = now + span; now < end; now += 500'000) {
    moves(order, kHigh, now);
    EXPECT_TRUE(may_go(order, kHigh, kFirstRate / 2, now));  // fills the line
    went += may_go(order, kLow, kChunk, now) ? kChunk : 0;
  }
  EXPECT_EQ(order.of[kLow].bytes_beside.load(), went);
  const double share = static_cast<double>(went) * 1e6 / kFirstRate / static_cast<double>(span);
  EXPECT_NEAR(share, 1.0 / kShare, 0.3 / kShare);
}

TEST(TcpLane, TheRateIsThatOfTheLine) {
  PutOrder order;
  int64_t now = 1'000'000'000;
  for (int i = 0; i < 100; ++i, now += 10'000'000) EXPECT_TRUE(may_go(order, kLow, 400'000, now));  // 40 kB a ms
  EXPECT_LT(order.window.bytes_per_ms.load(), kFirstRate);
  for (int i = 0; i < 1000; ++i, now += 10'000'000) EXPECT_TRUE(may_go(order, kLow, 400'000, now));
  EXPECT_NEAR(static_cast<double>(order.window.bytes_per_ms.load()), 40'000, 4000);
}

// Two communicators of two ranks. One thread puts chunks of a less urgent class without end. When the other's operation
// begins, none of these chunks goes until it has ended.
TEST(TcpLane, OverLoopbackTheUrgentOperationHasTheLineToItself) {
  constexpr size_t kPut = 64 << 10;
  TcpFabrics low(2), high(2);
  ASSERT_TRUE(low.status.ok() && high.status.ok());
  PutOrder order;
  order.window.bytes_per_ms = 1;             // so slow that the share of the less urgent is nothing here,
  order.window.begin_ns = int64_t{1} << 62;  // and stays so
  for (TcpFabrics* fabrics : {&low, &high})
    for (uint32_t r = 0; r < 2; ++r)
      static_cast<transport::tcp::TcpEngine&>(*(*fabrics)[r].engine).use_put_order(order);
  const auto put = [](exec::Fabric& f, uint64_t offset, const std::vector<unsigned char>& data) {
    for (const Deadline d = Deadline::after_ms(20'000); !d.passed(); f.engine->progress()) {
      const auto state = f.link(1).put(offset, data.data(), data.size());
      if (!state.ok() || *state == PutState::kDone) return state.ok();
    }
    return false;
  };
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> held{0}, puts{0}, failed{0};
  std::thread bulk([&] {
    const std::vector<unsigned char> data(kPut, 0x11);
    exec::Fabric& f = low[0];
    transport::EngineUse use;
    use.begin(f.engine.get(), kLow);
    f.engine->begin();
    while (!stop) {
      if (!f.link(1).put_turns()->may_put(kLow, kPut)) {
        ++held;
        f.engine->progress();
        std::this_thread::yield();
        continue;
      }
      failed += put(f, 0, data) ? 0 : 1;
      ++puts;
    }
    f.engine->end();
  });
  const Deadline patience = Deadline::after_ms(20'000);
  while (puts == 0 && !patience.passed()) std::this_thread::yield();
  const std::vector<unsigned char> data(kPut, 0x22);
  exec::Fabric& f = high[0];
  f.engine->begin();
  uint32_t rounds = 0;
  {
    transport::EngineUse use;
    use.begin(f.engine.get(), kHigh);
    // Waits until the other thread has asked in vain.
    for (const uint64_t before = held; (held < before + 10 || rounds < 20) && !patience.passed(); ++rounds) {
      EXPECT_TRUE(f.link(1).put_turns()->may_put(kHigh, kPut));
      EXPECT_TRUE(put(f, (rounds % 8) * kPut, data));
    }
  }
  EXPECT_TRUE(f.link(1).signal(0, 1, 0).ok());
  f.engine->end();
  const uint64_t then = puts;
  while (puts < then + 5 && !patience.passed()) std::this_thread::yield();  // it goes on
  stop = true;
  bulk.join();
  EXPECT_FALSE(patience.passed());
  EXPECT_EQ(failed, 0u);
  EXPECT_GE(held, 10u);
  EXPECT_EQ(order.of[kLow].bytes_beside.load(), 0u) << "put beside the urgent operation";
  EXPECT_GE(order.of[kHigh].bytes.load(), rounds * kPut);
  for (const Deadline d = Deadline::after_ms(20'000); !d.passed();)
    if (high[1].own->signal(0, 0).word.load(std::memory_order_acquire) == 1) break;
  EXPECT_EQ(std::memcmp(high[1].own->staging(), data.data(), kPut), 0);
  for (uint32_t c = 0; c < transport::kTrafficClasses; ++c) EXPECT_EQ(order.of[c].running.load(), 0);
}

}  // namespace
}  // namespace moeccl::tests
