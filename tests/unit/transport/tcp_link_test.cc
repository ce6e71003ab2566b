// SPDX-License-Identifier: Apache-2.0
// Two to four ranks over loopback: the promises of a link to the executor.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "tests/support/ranks.h"
#include "tests/support/tcp_fabrics.h"

namespace moeccl::tests {
namespace {

using transport::PutState;

constexpr int64_t kPatienceMs = 20'000;

bool wait_until(const std::function<bool()>& done) {
  for (const Deadline d = Deadline::after_ms(kPatienceMs); !d.passed();) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return false;
}

// Puts as the executor does: repeats until it is done, with the engine's progress in between.
Status put_all(exec::Fabric& f, uint32_t to, uint64_t offset, const void* src, size_t bytes) {
  const Deadline deadline = Deadline::after_ms(kPatienceMs);
  for (;;) {
    MOECCL_ASSIGN_OR_RETURN(const PutState s, f.link(to).put(offset, src, bytes));
    if (s == PutState::kDone) return {};
    if (deadline.passed()) return error(moecclTimeout, "the put does not end");
    f.engine->progress();
  }
}

uint64_t word_of(exec::Fabric& f, uint32_t from, uint32_t sig) {
  return f.own->signal(from, sig).word.load(std::memory_order_acquire);
}

std::vector<unsigned char> pattern(size_t bytes, unsigned seed) {
  std::vector<unsigned char> v(bytes);
  uint32_t x = seed * 2654435761u + 1;
  for (unsigned char& b : v) b = static_cast<unsigned char>((x = x * 1664525u + 1013904223u) >> 24);
  return v;
}

// Data that a CUDA side copies on to the device: all of it, and nothing twice, when the signal is seen.
TEST(TcpArrivals, EveryByteIsToldBeforeTheSignalBehindIt) {
  struct Heard final : transport::Arrivals {
    std::mutex mutex;
    std::vector<uint8_t> times = std::vector<uint8_t>(4 << 20);  // [offset]
    bool full = false;
    bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) override {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(src_rank, 0u);
      for (uint64_t i = offset; i < offset + bytes; ++i) ++times.at(i);
      return !full;
    }
  };
  for (const int streams : {1, 3}) {
    Heard heard;
    TcpFabrics fabrics(2, streams, 4 << 20, &heard);
    ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
    uint32_t number = 0;
    for (const size_t bytes : {1u, 9000u, 40'000u, 1'500'001u}) {
      const auto data = pattern(bytes, 5);
      const uint64_t at = 777 + bytes;
      ASSERT_TRUE(put_all(fabrics[0], 1, at, data.data(), bytes).ok());
      ASSERT_TRUE(fabrics[0].link(1).signal(2, ++number, 9).ok());
      ASSERT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 2) == (uint64_t{9} << 32 | number); }));
      const std::lock_guard lock(heard.mutex);
      const auto told = heard.times.begin() + static_cast<ptrdiff_t>(at);
      EXPECT_TRUE(std::all_of(told, told + static_cast<ptrdiff_t>(bytes), [](uint8_t n) { return n == 1; })) << bytes;
      EXPECT_EQ(std::count(heard.times.begin(), heard.times.end(), 0), static_cast<ptrdiff_t>((4 << 20) - bytes));
      std::fill(heard.times.begin(), heard.times.end(), 0);
    }
    // A receiver that is told too much ends the link.
    {
      const std::lock_guard lock(heard.mutex);
      heard.full = true;
    }
    const auto data = pattern(100, 6);
    ASSERT_TRUE(put_all(fabrics[0], 1, 0, data.data(), data.size()).ok());
    ASSERT_TRUE(fabrics[0].link(1).signal(2, ++number, 9).ok());
    EXPECT_TRUE(wait_until([&] { return !fabrics[1].link(0).check_peer().ok(); }));
    EXPECT_NE(fabrics[1].link(0).check_peer().message().find("more puts"), std::string::npos);
    EXPECT_NE(word_of(fabrics[1], 0, 2), uint64_t{9} << 32 | number);
  }
}

// A rank that has finished leaves while others still send to it. Its last messages count.
TEST(TcpFarewell, WhatCameBeforeTheEndIsReadWhenASendFindsIt) {
  for (int turn = 0; turn < 20; ++turn) {
    TcpFabrics fabrics(2, turn % 2 == 0 ? 1 : 3);
    ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
    // The driving thread does not look, so only the calls below read anything.
    fabrics[1].engine->begin();
    const auto data = pattern(60'000, 3);
    fabrics[0].engine->begin();
    ASSERT_TRUE(fabrics[1].link(0).signal(1, 1, 9).ok());  // unread when its receiver leaves
    ASSERT_TRUE(put_all(fabrics[0], 1, 128, data.data(), data.size()).ok());
    ASSERT_TRUE(fabrics[0].link(1).signal(2, 7, 9).ok());
    fabrics[0].engine->end();
    fabrics.slot(0).reset();
    // The first send finds a closed socket, and a later one learns of it.
    const auto lost = [&] { return !fabrics[1].link(0).check_peer().ok(); };
    for (uint32_t n = 2; n < 1000 && !lost(); ++n) {
      ASSERT_TRUE(fabrics[1].link(0).signal(1, n, 9).ok());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(lost());
    EXPECT_EQ(word_of(fabrics[1], 0, 2), uint64_t{9} << 32 | 7);
    EXPECT_EQ(std::memcmp(fabrics[1].own->staging() + 128, data.data(), data.size()), 0);
    fabrics[1].engine->end();
  }
}

// Returns this process's ends of TCP connections to a port, in the order of their numbers.
std::vector<int> connections_to(uint16_t port) {
  std::vector<int> found;
  for (int fd = 3; fd < 1024; ++fd) {
    const Result<driver::SocketAddress> peer = driver::peer_address(fd);
    if (peer.ok() && !peer->is_unix() && peer->port() == port) found.push_back(fd);
  }
  return found;
}

// The other streams of a rank that leaves may end before its last words have come on the first one.
TEST(TcpFarewell, TheEndOfOneStreamIsNotTheEndOfAll) {
  const auto ports = [] {
    std::map<uint16_t, int> n;
    for (int fd = 3; fd < 1024; ++fd)
      if (const auto peer = driver::peer_address(fd); peer.ok() && !peer->is_unix()) ++n[peer->port()];
    return n;
  };
  const std::map<uint16_t, int> before = ports();
  TcpFabrics fabrics(2, 2);
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  uint16_t listener = 0;  // rank 0's: rank 1 has connected to it twice
  for (const auto& [port, n] : ports())
    if (n == 2 && before.count(port) == 0) listener = port;
  const std::vector<int> streams = connections_to(listener);
  ASSERT_EQ(streams.size(), 2u);
  ASSERT_EQ(::shutdown(streams[1], SHUT_WR), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_TRUE(fabrics[0].link(1).check_peer().ok()) << fabrics[0].link(1).check_peer().message();
  ASSERT_TRUE(fabrics[1].link(0).signal(2, 1, 9).ok());
  EXPECT_TRUE(wait_until([&] { return word_of(fabrics[0], 1, 2) == (uint64_t{9} << 32 | 1); }));
  fabrics.slot(1).reset();
  EXPECT_TRUE(wait_until([&] { return !fabrics[0].link(1).check_peer().ok(); }));
}

// land() is a hint that may come too late or be withdrawn. Each byte is at one of the two places, and landed() says
// where.
TEST(TcpLanding, PutsGoWhereTheyAreWanted) {
  TcpFabrics fabrics(2);
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  transport::Link& own = fabrics[1].link(0);
  uint32_t number = 0;
  const auto send = [&](const std::vector<unsigned char>& data, uint64_t offset) {
    ASSERT_TRUE(put_all(fabrics[0], 1, offset, data.data(), data.size()).ok());
    ASSERT_TRUE(fabrics[0].link(1).signal(3, ++number, 9).ok());
    ASSERT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 3) == (uint64_t{9} << 32 | number); }));
  };
  for (const size_t bytes : {100u, 9000u, 1u << 20}) {
    const auto data = pattern(bytes, static_cast<unsigned>(bytes)), nothing = std::vector<unsigned char>(bytes, 0);
    std::vector<unsigned char> dst = nothing;
    const auto staged = [&] { return std::memcmp(fabrics[1].own->staging() + 64, data.data(), bytes) == 0; };
    std::memset(fabrics[1].own->staging() + 64, 0, bytes);
    own.landings()->land(64, bytes, reinterpret_cast<std::byte*>(dst.data()));
    send(data, 64);
    EXPECT_TRUE(own.landings()->landed(64).value());
    EXPECT_EQ(dst, data);
    EXPECT_FALSE(own.landings()->landed(64).value()) << "it has ended";
    // Another range than the one that was named, then none.
    dst = nothing;
    own.landings()->land(0, bytes, reinterpret_cast<std::byte*>(dst.data()));
    send(data, 64);
    EXPECT_FALSE(own.landings()->landed(0).value());
    own.landings()->land(64, bytes, reinterpret_cast<std::byte*>(dst.data()));
    own.landings()->land_nothing();
    send(data, 64);
    EXPECT_FALSE(own.landings()->landed(64).value());
    EXPECT_EQ(dst, nothing);
    EXPECT_TRUE(staged());
  }
}

TEST(TcpLanding, WhatIsTakenBackUnderWayGoesOnIntoTheStaging) {
  TcpFabrics fabrics(2);
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  const size_t bytes = 2 << 20;
  const auto data = pattern(bytes, 5);
  for (uint32_t number = 1; number <= 20; ++number) {
    std::vector<unsigned char> dst(bytes, 0);
    std::memset(fabrics[1].own->staging(), 0, bytes);
    fabrics[1].link(0).landings()->land(0, bytes, reinterpret_cast<std::byte*>(dst.data()));
    std::thread sender([&] {
      EXPECT_TRUE(put_all(fabrics[0], 1, 0, data.data(), bytes).ok());
      EXPECT_TRUE(fabrics[0].link(1).signal(3, number, 9).ok());
    });
    std::this_thread::sleep_for(std::chrono::microseconds(30 * number));
    fabrics[1].link(0).landings()->land_nothing();
    const std::vector<unsigned char> then = dst;
    EXPECT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 3) == (uint64_t{9} << 32 | number); }));
    sender.join();
    EXPECT_EQ(dst, then) << "written after it was taken back";
    const auto landed = static_cast<size_t>(std::mismatch(dst.begin(), dst.end(), data.begin()).first - dst.begin());
    EXPECT_EQ(std::memcmp(fabrics[1].own->staging() + landed, data.data() + landed, bytes - landed), 0) << landed;
  }
}

class TcpLink : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Streams, TcpLink, ::testing::Values(1, 3));

TEST_P(TcpLink, DataIsThereWhenItsSignalIs) {
  TcpFabrics fabrics(2, GetParam());
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  uint32_t number = 0;
  // No thread drives rank 1, so its engine's own thread receives.
  for (const size_t bytes : {1u, 63u, 4096u, 8193u, 32'768u, 32'769u, 70'000u, 1u << 20, (2u << 20) - 5}) {
    const auto data = pattern(bytes, static_cast<unsigned>(bytes));
    std::memset(fabrics[1].own->staging(), 0, bytes + 7);
    ASSERT_TRUE(put_all(fabrics[0], 1, 7, data.data(), bytes).ok());
    ASSERT_TRUE(fabrics[0].link(1).signal(3, ++number, 9).ok());
    ASSERT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 3) == (uint64_t{9} << 32 | number); })) << bytes;
    ASSERT_EQ(std::memcmp(fabrics[1].own->staging() + 7, data.data(), bytes), 0) << bytes;
  }
}

TEST_P(TcpLink, BothWaysAtOnceFromManyRanks) {
  constexpr uint32_t n = 4;
  constexpr size_t kBytes = 300'000;
  constexpr int kRounds = 12;
  TcpFabrics fabrics(n, GetParam());
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (uint32_t r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      exec::Fabric& f = fabrics[r];
      f.engine->begin();
      for (int round = 1; round <= kRounds; ++round) {
        const auto slot = [&](uint32_t from) { return size_t{from} * kBytes + (round % 2) * (2u << 20); };
        for (uint32_t i = 1; i < n; ++i) {
          const uint32_t p = (r + i) % n;
          const auto data = pattern(kBytes, r * 100 + p * 10 + static_cast<unsigned>(round));
          if (!put_all(f, p, slot(r), data.data(), kBytes).ok()) ++wrong;
          (void)f.link(p).signal(0, static_cast<uint32_t>(round), 0);
        }
        for (uint32_t p = 0; p < n; ++p) {
          if (p == r) continue;
          const bool there = wait_until([&] {
            f.engine->progress();
            return word_of(f, p, 0) >= static_cast<uint64_t>(round);
          });
          const auto data = pattern(kBytes, p * 100 + r * 10 + static_cast<unsigned>(round));
          if (!there || std::memcmp(f.own->staging() + slot(p), data.data(), kBytes) != 0) ++wrong;
        }
      }
      f.engine->end();
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_P(TcpLink, WhoAwaitsOneRankHearsItAtOnceAndTheOthersSoon) {
  TcpFabrics fabrics(3, GetParam());
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  exec::Fabric& f = fabrics[0];
  f.engine->begin();
  // Nothing is read for a rank of the same host; this number stands for one.
  constexpr uint32_t kOfOwnHost = 0;
  uint32_t number = 0;
  for (const uint32_t awaited : {1u, 2u, kOfOwnHost}) {
    ++number;
    const auto data = pattern(5000, number);
    for (const uint32_t sender : {1u, 2u}) {
      ASSERT_TRUE(put_all(fabrics[sender], 0, sender * 8192, data.data(), data.size()).ok());
      ASSERT_TRUE(fabrics[sender].link(0).signal(0, number, 0).ok());
    }
    for (const uint32_t sender : {1u, 2u}) {
      EXPECT_TRUE(wait_until([&] {
        f.engine->progress(awaited);
        return word_of(f, sender, 0) == number;
      })) << sender
          << " while " << awaited << " is awaited";
      EXPECT_EQ(std::memcmp(f.own->staging() + sender * 8192, data.data(), data.size()), 0);
    }
  }
  f.engine->end();
}

TEST_P(TcpLink, APutThatTheSocketDoesNotTakeIsCalledAgainAndOthersWait) {
  TcpFabrics fabrics(2, GetParam(), 64 << 20);
  ASSERT_TRUE(fabrics.status.ok()) << fabrics.status.message();
  const auto data = pattern(48 << 20, 1), other = pattern(100'000, 2);
  auto first = fabrics[0].link(1).put(0, data.data(), data.size());
  // A fast receiver takes everything at once, so try again.
  for (int i = 0; i < 30 && first.ok() && *first == PutState::kDone; ++i) {
    first = fabrics[0].link(1).put(0, data.data(), data.size());
  }
  ASSERT_TRUE(first.ok());
  if (*first == PutState::kDone) GTEST_SKIP() << "the receiver took 48 MiB at once, 31 times";
  bool waited = false;
  while (*first != PutState::kDone) {
    const auto second = fabrics[0].link(1).put(48 << 20, other.data(), other.size());
    ASSERT_TRUE(second.ok());
    waited = waited || *second == PutState::kFull;
    ASSERT_NE(*second, PutState::kDone);
    // A signal comes in between. It must not arrive before the earlier put, but may arrive before the rest.
    ASSERT_TRUE(fabrics[0].link(1).signal(1, 1, 0).ok());
    fabrics[0].engine->progress();
    first = fabrics[0].link(1).put(0, data.data(), data.size());
    ASSERT_TRUE(first.ok());
  }
  EXPECT_TRUE(waited);
  ASSERT_TRUE(put_all(fabrics[0], 1, 48 << 20, other.data(), other.size()).ok());
  ASSERT_TRUE(fabrics[0].link(1).signal(0, 1, 0).ok());
  ASSERT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 0) == 1; }));
  EXPECT_EQ(std::memcmp(fabrics[1].own->staging(), data.data(), data.size()), 0);
  EXPECT_EQ(std::memcmp(fabrics[1].own->staging() + (48 << 20), other.data(), other.size()), 0);
  // Signals with different numbers may use different streams, and arrive in any order.
  EXPECT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 1) == 1; }));
}

TEST(TcpLinkBoard, ComesWithSignalsAndByItself) {
  TcpFabrics fabrics(2);
  ASSERT_TRUE(fabrics.status.ok());
  exec::Fabric& f = fabrics[0];
  transport::Board& own = f.own->board();
  for (uint64_t seq = 1; seq <= 6; ++seq) {
    f.own->blocks(seq)[1].count.store(100 + seq);
    transport::Entry& e = own.entries[seq % transport::kEntries];
    e.count.store(10 * seq);
    e.seq.store(seq, std::memory_order_release);
    own.progress.completed.store(seq - 1);
    ASSERT_TRUE(f.link(1).signal(0, static_cast<uint32_t>(seq), 0).ok());
    ASSERT_TRUE(wait_until([&] { return word_of(fabrics[1], 0, 0) == seq; }));
    const transport::Link& back = fabrics[1].link(0);
    EXPECT_EQ(back.board().entries[seq % transport::kEntries].seq.load(), seq);
    EXPECT_EQ(back.board().entries[seq % transport::kEntries].count.load(), 10 * seq);
    EXPECT_EQ(back.board().progress.completed.load(), seq - 1);
    EXPECT_EQ(back.block(seq).count.load(), 100 + seq);
  }
  own.progress.completed.store(6);
  f.engine->board_changed(true);
  EXPECT_TRUE(wait_until([&] { return fabrics[1].link(0).board().progress.completed.load() == 6; }));
  own.progress.completed.store(7);
  f.engine->board_changed(false);
  EXPECT_TRUE(wait_until([&] { return fabrics[1].link(0).board().progress.completed.load() == 7; }));
}

TEST(TcpLinkBoard, AFailureReachesAllPeersInItsWords) {
  TcpFabrics fabrics(3);
  ASSERT_TRUE(fabrics.status.ok());
  // A put is in flight, and its memory is freed afterwards.
  {
    const auto data = pattern(3 << 20, 1);
    (void)fabrics[0].link(1).put(0, data.data(), data.size());
    fabrics[0].fail(error(moecclTimeout, "the test says so"));
  }
  for (const uint32_t r : {1u, 2u}) {
    const transport::Board& b = fabrics[r].link(0).board();
    ASSERT_TRUE(wait_until([&] {
      return b.health.state.load() == static_cast<uint32_t>(transport::RankState::kFailed);
    })) << r;
    EXPECT_EQ(b.health.code.load(), static_cast<uint32_t>(moecclTimeout));
    char text[9] = {};
    const uint64_t word = b.health.text[0].load();
    std::memcpy(text, &word, 8);
    EXPECT_STREQ(text, "the test");
  }
}

TEST(TcpLinkPeer, ThatLeavesIsNoFailureAndOneThatVanishesIs) {
  TcpFabrics fabrics(3);
  ASSERT_TRUE(fabrics.status.ok());
  fabrics[0].publish_state(transport::RankState::kLeft, moecclSuccess, "");
  fabrics.slot(0).reset();
  ASSERT_TRUE(wait_until([&] { return fabrics[1].link(0).board().health.state.load() != 0; }));
  EXPECT_TRUE(fabrics[1].link(0).check_peer().ok());
  EXPECT_TRUE(fabrics[1].link(0).signal(0, 1, 0).ok()) << "to a rank that has left: lost, as in memory";
  fabrics.slot(2).reset();  // without a word
  Status lost;
  ASSERT_TRUE(wait_until([&] {
    fabrics[1].engine->progress();
    return !(lost = fabrics[1].link(2).check_peer()).ok();
  }));
  EXPECT_EQ(lost.code(), moecclRemoteError);
  EXPECT_NE(lost.message().find("rank 2"), std::string::npos) << lost.message();
}

}  // namespace
}  // namespace moeccl::tests
