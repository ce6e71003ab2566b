// SPDX-License-Identifier: Apache-2.0
// The promises of a link to the executor, whatever moves the bytes: the same cases on every transport.
//
// Networks come from transport/networks.cc. One that this machine cannot use is skipped with the reason, but fails when
// MOECCL_TEST_REQUIRE_NET names it. The other links are memory that ranks share, the same behind a paced uplink, and a
// network that keeps no order at all. Built with MOECCL_TEST_CUDA_LINKS, the test runs on CUDA memory of the emulated
// driver instead: ranks of one host, and ranks of several hosts over TCP and over verbs on the fake libibverbs, through
// page-locked memory and with NICs that reach the device, whose writes come late.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>

#include "tests/support/fake_nets.h"
#include "tests/support/link_worlds.h"

namespace {

// Every rank is a separate host on this machine, over loopback. Set before the environment is read.
const bool over_loopback = setenv("MOECCL_SOCKET_IFNAME", "lo", 0) == 0 && setenv("MOECCL_HOST_ID", "here", 0) == 0 &&
                           setenv("MOECCL_NET_PLUGIN", moeccl::tests::fake_net_file("all").c_str(), 0) == 0;

}  // namespace

namespace moeccl::tests {
namespace {

using transport::PutState;
using transport::RankState;

class LinkContract : public ::testing::TestWithParam<std::string> {
 protected:
  // Null: the test is skipped.
  std::unique_ptr<World> world(uint32_t n) {
    if (GetParam() == "thread" || GetParam() == "paced") return std::make_unique<SharedWorld>(n, GetParam() == "paced");
    if (GetParam().starts_with("cuda")) return cuda_world(GetParam(), n);
    const transport::Network& network = network_of(GetParam());
    const char* required = std::getenv("MOECCL_TEST_REQUIRE_NET");
    if (const transport::Probe probe = network.probe(); !probe.usable) {
      EXPECT_TRUE(required == nullptr || GetParam() != required) << probe.why_not;
      skipped_ = probe.why_not;
      return nullptr;
    }
    auto made = std::make_unique<NetworkWorld>(network, n);
    EXPECT_TRUE(made->status().ok()) << made->status().message();
    if (!made->status().ok()) return nullptr;
    return made;
  }
  std::string skipped_;
};

#define MOECCL_WORLD(name, n)                                         \
  const std::unique_ptr<World> made = world(n);                       \
  if (made == nullptr && !skipped_.empty()) GTEST_SKIP() << skipped_; \
  ASSERT_NE(made, nullptr);                                           \
  World& name = *made

int64_t patience_ms() { return patient_ms(20'000); }

// Works like a thread that drives operations.
class Driving {
 public:
  explicit Driving(exec::Fabric& f) : f_(f) {
    if (f_.engine != nullptr) f_.engine->begin();
  }
  ~Driving() {
    if (f_.engine != nullptr) f_.engine->end();
  }
  bool until(const std::function<bool()>& done) {
    for (const Deadline d = Deadline::after_ms(patience_ms()); !d.passed();) {
      if (done()) return true;
      if (f_.engine != nullptr) f_.engine->progress();
      std::this_thread::yield();
    }
    return false;
  }
  // Waits until the data given to a stream has been sent.
  bool drained() {
    return until([&] {
      if (f_.engine == nullptr) return true;
      const Result<bool> drained = f_.engine->drained();
      EXPECT_TRUE(drained.ok());
      return !drained.ok() || *drained;
    });
  }
  Status put(uint32_t to, uint64_t offset, const void* src, size_t bytes) {
    Status failed;
    const bool ended = until([&] {
      const Result<PutState> state = f_.link(to).put(offset, src, bytes);
      if (!state.ok()) failed = state.status();
      return !state.ok() || *state == PutState::kDone;
    });
    return ended ? failed : error(moecclTimeout, "a put of {} bytes does not end", bytes);
  }

 private:
  exec::Fabric& f_;
};

// Returns whether a rank may continue: the signal has arrived and, on a paced link, its time has come.
bool seen(exec::Fabric& f, uint32_t from, uint32_t sig, uint32_t number) {
  const transport::SignalLine& line = f.own->signal(from, sig);
  if (static_cast<int32_t>(static_cast<uint32_t>(line.word.load(std::memory_order_acquire)) - number) < 0) return false;
  return line.visible_ns[number % transport::kVisibleRing].load() <= now_ns();
}

std::vector<unsigned char> pattern(size_t bytes, uint32_t seed) {
  std::vector<unsigned char> v(bytes);
  std::minstd_rand random(seed + 1);
  for (unsigned char& b : v) b = static_cast<unsigned char>(random() >> 7);
  return v;
}

void write_entry(exec::Fabric& f, uint64_t seq, uint64_t salt) {
  transport::Entry& e = f.own->board().entries[seq % transport::kEntries];
  std::atomic<uint64_t>* const words[] = {&e.signature, &e.count,     &e.plan,   &e.input,
                                          &e.output,    &e.max_block, &e.history};
  for (uint64_t i = 0; i < std::size(words); ++i) words[i]->store(salt + i * 1'000'003, std::memory_order_relaxed);
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    transport::BlockWord& block = f.own->blocks(seq)[p];
    block.count.store(salt + p);
    block.displacement.store(salt + 2 * p);
    block.expects.store(salt + 3 * p);
  }
  e.seq.store(seq, std::memory_order_release);
}

void expect_entry(exec::Fabric& f, uint32_t of, uint64_t seq, uint64_t salt) {
  const transport::Entry& e = f.link(of).board().entries[seq % transport::kEntries];
  const std::atomic<uint64_t>* const words[] = {&e.signature, &e.count,     &e.plan,   &e.input,
                                                &e.output,    &e.max_block, &e.history};
  for (uint64_t i = 0; i < std::size(words); ++i) EXPECT_EQ(words[i]->load(), salt + i * 1'000'003) << "word " << i;
  const transport::BlockWord& block = f.link(of).block(seq);
  EXPECT_EQ(block.count.load(), salt + f.rank);
  EXPECT_EQ(block.displacement.load(), salt + 2 * f.rank);
  EXPECT_EQ(block.expects.load(), salt + 3 * f.rank);
}

TEST_P(LinkContract, WhatARankSaysOfItselfIsReadByAll) {
  MOECCL_WORLD(ranks, 3);
  for (uint64_t seq = 1; seq <= 40; ++seq) {
    write_entry(ranks[0], seq, seq * 77);
    ranks[0].own->board().progress.completed.store(seq - 1, std::memory_order_release);
    if (ranks[0].engine != nullptr) ranks[0].engine->board_changed(seq % 2 == 0);
    for (const uint32_t r : {1u, 2u}) {
      Driving drive(ranks[r]);
      const transport::Board& board = ranks[r].link(0).board();
      ASSERT_TRUE(drive.until([&] {
        return board.entries[seq % transport::kEntries].seq.load(std::memory_order_acquire) == seq &&
               board.progress.completed.load(std::memory_order_acquire) == seq - 1;
      })) << "entry "
          << seq;
      expect_entry(ranks[r], 0, seq, seq * 77);
    }
  }
  // A rank that has failed may revoke the communicator later.
  for (const auto& [code, reason] :
       {std::pair{moecclInvalidArgument, "the reason, in words"}, {moecclAborted, "revoked"}}) {
    ranks[0].publish_state(RankState::kFailed, code, reason);
    for (const uint32_t r : {1u, 2u}) {
      Driving drive(ranks[r]);
      const transport::Board& board = ranks[r].link(0).board();
      ASSERT_TRUE(drive.until([&] {
        return board.health.state.load(std::memory_order_acquire) == static_cast<uint32_t>(RankState::kFailed) &&
               board.health.code.load(std::memory_order_acquire) == static_cast<uint32_t>(code);
      })) << reason;
      char text[transport::kFailureText];
      for (size_t i = 0; i < sizeof(text) / 8; ++i) {
        const uint64_t word = board.health.text[i].load();
        std::memcpy(text + 8 * i, &word, 8);
      }
      EXPECT_STREQ(text, reason);
      EXPECT_TRUE(ranks[r].link(0).check_peer().ok()) << "its own word says more";
    }
  }
}

TEST_P(LinkContract, TheEntryIsThereWithTheFirstSignalBehindIt) {
  MOECCL_WORLD(ranks, 2);
  for (uint32_t seq = 1; seq <= 300; ++seq) {
    write_entry(ranks[0], seq, seq * 13);
    if (ranks[0].engine != nullptr) ranks[0].engine->board_changed(false);
    {
      Driving sends(ranks[0]);
      ASSERT_TRUE(ranks[0].link(1).signal(1, seq, seq).ok() && sends.drained());
    }
    Driving drive(ranks[1]);
    ASSERT_TRUE(drive.until([&] { return seen(ranks[1], 0, 1, seq); })) << "signal " << seq;
    ASSERT_EQ(ranks[1].link(0).board().entries[seq % transport::kEntries].seq.load(std::memory_order_acquire), seq);
    expect_entry(ranks[1], 0, seq, seq * 13);
  }
}

TEST_P(LinkContract, APutIsThereWhenTheSignalBehindItIsSeen) {
  MOECCL_WORLD(ranks, 2);
  const size_t sizes[] = {1, 7, 8, 63, 64, 100, 4095, 4096, 8191, (32 << 10) + 1, 65536, (1 << 20) + 3, 2 << 20};
  uint32_t number = 0;
  for (const uint32_t from : {0u, 1u}) {
    const uint32_t to = 1 - from;
    number = 0;
    for (const size_t bytes : sizes) {
      for (const uint64_t offset : {uint64_t{0}, uint64_t{64}, uint64_t{12'345}}) {
        auto data = pattern(bytes, ++number);
        const auto sent = data;
        std::byte* const staging = ranks.staging(to);
        std::memset(staging, 0xee, offset + bytes + 64);
        {
          Driving drive(ranks[from]);
          ASSERT_TRUE(drive.put(to, offset, data.data(), bytes).ok());
          // After kDone the source belongs to the caller again, and to its stream.
          ranks.synchronize(from);
          std::fill(data.begin(), data.end(), 0xaa);
          ASSERT_TRUE(ranks[from].link(to).signal(2, number, 9).ok() && drive.drained());
        }
        Driving drive(ranks[to]);
        ASSERT_TRUE(drive.until([&] { return seen(ranks[to], from, 2, number); })) << bytes << " bytes at " << offset;
        ranks.settle(to, from);
        EXPECT_EQ(static_cast<uint32_t>(ranks[to].own->signal(from, 2).word.load() >> 32), 9u);
        ASSERT_EQ(std::memcmp(staging + offset, sent.data(), bytes), 0) << bytes << " bytes at " << offset;
        EXPECT_EQ(staging[offset + bytes], std::byte{0xee}) << "behind " << bytes << " bytes at " << offset;
        if (offset > 0) {
          EXPECT_EQ(staging[offset - 1], std::byte{0xee});
        }
      }
    }
  }
}

// Both directions at once, many puts before each signal, on all sigs.
TEST_P(LinkContract, ManyPutsOfAnySizeComeBeforeTheirSignal) {
  constexpr uint32_t kRounds = 200, kSlots = 8;
  constexpr size_t kSlot = 96 << 10;
  MOECCL_WORLD(ranks, 2);
  std::vector<std::thread> threads;
  for (const uint32_t me : {0u, 1u}) {
    threads.emplace_back([&, me] {
      ranks.enter();
      exec::Fabric& f = ranks[me];
      const uint32_t other = 1 - me;
      Driving drive(f);
      for (uint32_t round = 1; round <= kRounds; ++round) {
        std::minstd_rand random(round * 2 + me), theirs(round * 2 + other);
        // Halves alternate, as in operations, because the peer may still read the data of the last round.
        const uint64_t half = (round % 2) * kSlots * kSlot;
        const uint32_t sig = round % transport::kSigsPerPeer, number = (round - sig) / transport::kSigsPerPeer + 1;
        const auto size_of = [=](std::minstd_rand& r) { return r() % 4 == 0 ? 1 + r() % kSlot : 1 + r() % 300; };
        for (uint32_t s = 0; s < kSlots; ++s) {
          const size_t bytes = size_of(random);
          const auto data = pattern(bytes, round * 100 + s * 2 + me);
          const Status put = drive.put(other, half + s * kSlot, data.data(), bytes);
          ASSERT_TRUE(put.ok()) << put.message();
          ranks.synchronize(me);
        }
        ASSERT_TRUE(f.link(other).signal(sig, number, round).ok());
        ASSERT_TRUE(drive.drained());
        ASSERT_TRUE(drive.until([&] { return seen(f, other, sig, number); })) << "round " << round;
        ranks.settle(me, other);
        for (uint32_t s = 0; s < kSlots; ++s) {
          const auto data = pattern(size_of(theirs), round * 100 + s * 2 + other);
          ASSERT_EQ(std::memcmp(ranks.staging(me) + half + s * kSlot, data.data(), data.size()), 0)
              << "round " << round << " slot " << s;
        }
      }
      // The other rank's last round may still be in flight to this rank's staging, which outlives this thread.
    });
  }
  for (auto& t : threads) t.join();
}

// Lanes of one operation put to the same peer, each until its own puts are done.
TEST_P(LinkContract, PutsOfSeveralCallersBesideEachOtherAllEnd) {
  MOECCL_WORLD(ranks, 2);
  constexpr size_t kBytes = 1 << 20;
  constexpr uint32_t kCallers = 3;
  std::vector<std::vector<unsigned char>> data;
  for (uint32_t c = 0; c < kCallers; ++c) data.push_back(pattern(kBytes, c));
  Driving drive(ranks[0]);
  std::thread receiver([&] {
    ranks.enter();
    Driving drives(ranks[1]);
    EXPECT_TRUE(drives.until([&] { return seen(ranks[1], 0, 0, 1); }));
  });
  std::vector<bool> done(kCallers, false);
  EXPECT_TRUE(drive.until([&] {
    bool all = true;
    for (uint32_t c = 0; c < kCallers; ++c) {
      if (done[c]) continue;
      const auto state = ranks[0].link(1).put(c * kBytes, data[c].data(), kBytes);
      EXPECT_TRUE(state.ok());
      done[c] = state.ok() && *state == PutState::kDone;
      all = all && done[c];
    }
    return all;
  }));
  ASSERT_TRUE(ranks[0].link(1).signal(0, 1, 1).ok() && drive.drained());
  receiver.join();
  ranks.settle(1, 0);
  for (uint32_t c = 0; c < kCallers; ++c)
    EXPECT_EQ(std::memcmp(ranks.staging(1) + c * kBytes, data[c].data(), kBytes), 0) << c;
}

TEST_P(LinkContract, PostedPutsAreReadUntilTheyAreTaken) {
  MOECCL_WORLD(ranks, 2);
  transport::PostedPuts* const posts = ranks[0].link(1).posted_puts();
  if (posts == nullptr) GTEST_SKIP() << "it posts nothing";
  constexpr size_t kBytes = 200'000;
  constexpr uint32_t kSlots = 8;
  std::vector<std::vector<unsigned char>> source(kSlots, std::vector<unsigned char>(kBytes));
  std::vector<uint64_t> posted(kSlots, 0);
  Driving drive(ranks[0]);
  for (uint32_t number = 1; number <= 200; ++number) {
    const uint32_t slot = number % kSlots;
    ASSERT_TRUE(drive.until([&] { return posts->taken(posted[slot]); })) << "put " << number;
    // The peer has already seen the slot's previous data, because signals come in order.
    ASSERT_TRUE(drive.until([&] { return number <= kSlots || seen(ranks[1], 0, 6, number - kSlots); }));
    const auto data = pattern(kBytes, number);
    std::memcpy(source[slot].data(), data.data(), kBytes);
    ASSERT_TRUE(drive.until([&] {
      const auto state = posts->post(slot * kBytes, source[slot].data(), kBytes);
      EXPECT_TRUE(state.ok());
      return !state.ok() || *state == PutState::kDone;
    }));
    posted[slot] = posts->posted();
    ASSERT_TRUE(ranks[0].link(1).signal(6, number, 1).ok());
    if (number % 5 != 0) continue;
    Driving receives(ranks[1]);
    ASSERT_TRUE(receives.until([&] { return seen(ranks[1], 0, 6, number); })) << number;
    ASSERT_EQ(std::memcmp(ranks.staging(1) + slot * kBytes, data.data(), kBytes), 0) << number;
  }
  EXPECT_TRUE(drive.until([&] { return posts->taken(posts->posted()); }));
}

TEST_P(LinkContract, WhatIsPackedIntoALinksRoomGoesAsItIs) {
  MOECCL_WORLD(ranks, 2);
  transport::Rooms* const rooms = ranks[0].link(1).rooms();
  if (rooms == nullptr) GTEST_SKIP() << "it has no rooms";
  Driving drive(ranks[0]);
  for (uint32_t number = 1; number <= 300; ++number) {
    const auto data = pattern(1 + (number * 7919) % 200'000, number);
    const uint64_t at = (number % 8) * 256'000;
    std::byte* room = nullptr;
    ASSERT_TRUE(drive.until([&] { return (room = rooms->room(data.size())) != nullptr; })) << number;
    ranks.pack(0, room, data.data(), data.size());
    const auto state = ranks[0].link(1).put(at, room, data.size());
    ASSERT_TRUE(state.ok());
    ASSERT_EQ(*state, PutState::kDone) << "the link owns the room until it has gone";
    ASSERT_TRUE(ranks[0].link(1).signal(4, number, 1).ok() && drive.drained());
    Driving receives(ranks[1]);
    ASSERT_TRUE(receives.until([&] { return seen(ranks[1], 0, 4, number); }));
    ranks.settle(1, 0);
    ASSERT_EQ(std::memcmp(ranks.staging(1) + at, data.data(), data.size()), 0) << number;
  }
}

// The peer computes: no thread drives its engine, and more data arrives than any queue holds.
TEST_P(LinkContract, APeerThatDoesNotLookHoldsUpNothingForEver) {
  MOECCL_WORLD(ranks, 2);
  const auto data = pattern(2 << 20, 5);
  Driving drive(ranks[0]);
  for (uint32_t number = 1; number <= 8; ++number) {
    ASSERT_TRUE(drive.put(1, 0, data.data(), data.size()).ok()) << number;
    ASSERT_TRUE(ranks[0].link(1).signal(0, number, 1).ok());
  }
  ASSERT_TRUE(drive.drained());
  ASSERT_TRUE(drive.until([&] { return seen(ranks[1], 0, 0, 8); }));
  ranks.settle(1, 0);
  EXPECT_EQ(std::memcmp(ranks.staging(1), data.data(), data.size()), 0);
}

TEST_P(LinkContract, ARankThatLeavesHasSaidAllBefore) {
  for (int turn = 0; turn < 5; ++turn) {
    MOECCL_WORLD(ranks, 2);
    const auto data = pattern(300'000, 8);
    {
      Driving drive(ranks[0]);
      ASSERT_TRUE(drive.put(1, 4, data.data(), data.size()).ok());
      ASSERT_TRUE(ranks[0].link(1).signal(3, 1, 1).ok() && drive.drained());
    }
    ranks[0].publish_state(RankState::kLeft, moecclSuccess, "");
    ranks.end(0);
    Driving drive(ranks[1]);
    ASSERT_TRUE(drive.until([&] { return seen(ranks[1], 0, 3, 1); }));
    ranks.settle(1, 0);
    EXPECT_EQ(std::memcmp(ranks.staging(1) + 4, data.data(), data.size()), 0);
    ASSERT_TRUE(drive.until(
        [&] { return ranks[1].link(0).board().health.state.load() == static_cast<uint32_t>(RankState::kLeft); }));
    EXPECT_TRUE(ranks[1].link(0).check_peer().ok()) << ranks[1].link(0).check_peer().message();
  }
}

TEST_P(LinkContract, ARankThatHasFailedTellsNobodyThatItsDataCame) {
  MOECCL_WORLD(ranks, 2);
  if (!ranks.network()) GTEST_SKIP() << "memory that is shared has no queue";
  ranks[0].publish_state(RankState::kFailed, moecclInvalidArgument, "given up");
  const auto data = pattern(100'000, 3);
  Driving drive(ranks[0]);
  EXPECT_TRUE(drive.put(1, 0, data.data(), data.size()).ok()) << "it is lost, but it ends";
  EXPECT_TRUE(ranks[0].link(1).signal(5, 1, 1).ok());
  Driving peer(ranks[1]);
  ASSERT_TRUE(peer.until(
      [&] { return ranks[1].link(0).board().health.state.load() == static_cast<uint32_t>(RankState::kFailed); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(seen(ranks[1], 0, 5, 1));
}

TEST(Capabilities, AreNamedForDoctor) {
  EXPECT_EQ(transport::text_of(transport::tcp::kCapabilities),
            "keeps the order of puts, moves bytes by a thread of each rank, can encrypt");
}

// A network's stated capabilities match the parts of its links.
TEST_P(LinkContract, CapabilitiesAreThePartsOfTheLinks) {
  if (GetParam() == "thread" || GetParam() == "paced" || GetParam().starts_with("cuda")) GTEST_SKIP() << "no network";
  const transport::Network& network = network_of(GetParam());
  if (const transport::Probe probe = network.probe(); !probe.usable) GTEST_SKIP() << probe.why_not;
  struct Nobody final : transport::Arrivals {
    bool arrived(uint32_t, uint64_t, uint64_t) override { return true; }
  } nobody;
  NetworkFabrics ranks(network, 2, 4 << 20, [&](exec::Fabric& f) { f.arrivals = &nobody; });
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  for (const uint32_t r : {0u, 1u}) {
    const transport::Link& link = ranks[r].link(1 - r);
    EXPECT_EQ(network.can.views, link.view().staging != nullptr);
    EXPECT_EQ(network.can.reads, link.reads() != nullptr);
    EXPECT_EQ(network.can.one_sided, link.one_sided() != nullptr) << "who hears of puts that nobody receives?";
    EXPECT_EQ(link.device(), nullptr) << "that is what cuda_net adds";
    EXPECT_FALSE(network.can.one_sided && network.can.needs_pump) << "bytes that land without a CPU need none";
    EXPECT_TRUE(!network.can.needs_pump || ranks[r].engine != nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(All, LinkContract, ::testing::ValuesIn(transports()),
                         [](const auto& name) { return name.param; });

}  // namespace
}  // namespace moeccl::tests
