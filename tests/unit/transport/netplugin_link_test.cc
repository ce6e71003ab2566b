// SPDX-License-Identifier: Apache-2.0
// Links through a net plugin that behaves like real ones: every version, and each trap that real plugins have set.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <random>
#include <thread>

#include "tests/support/fake_nets.h"
#include "tests/support/timing.h"
#include "transport/netplugin/connecting.h"
#include "transport/netplugin/plugin_engine.h"
#include "transport/netplugin/plugin_network.h"
#include "transport/shm/segment.h"

namespace moeccl::tests {
namespace {

using namespace transport::netplugin;
using transport::PutState;
using transport::RankState;
using transport::shm::Segment;

constexpr uint64_t kStaging = 4 << 20;

int64_t patience_ms() { return patient_ms(20'000); }
bool says(const Status& s, const char* what) { return s.message().find(what) != std::string::npos; }

// Ranks of one process, each as if on its own host.
class Ranks {
 public:
  struct Setting {
    uint32_t n = 2;
    std::vector<std::string> lists = {};  // MOECCL_NET_PLUGIN of each rank; the last one for all others
    int64_t deadline_ms = patience_ms();
    int memory_type = abi::kPtrHost;
    std::vector<int> keys = {};  // of each rank; empty: all the same
    int absent = -1;             // a rank that offers and then does not connect
  };
  explicit Ranks(const Setting& s) : statuses(s.n), links(s.n) {
    std::vector<std::vector<std::byte>> offers(s.n);
    std::vector<std::vector<std::vector<std::byte>>> rows(s.n);
    std::latch offered(s.n), ended(s.n);
    for (uint32_t r = 0; r < s.n; ++r) segments.push_back(*Segment::create({s.n, r, kStaging, 4096}, false));
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < s.n; ++r) {
      threads.emplace_back([&, r] {
        transport::NetworkOptions o;
        o.rank = r;
        for (uint32_t p = 0; p < s.n; ++p) o.host_of.push_back(p);
        o.key[0] = static_cast<std::byte>(s.keys.empty() ? 42 : s.keys[r]);
        o.timeout_ms = patience_ms();
        o.deadline = Deadline::after_ms(s.deadline_ms);
        auto endpoint = open_with(o, {s.lists[std::min<size_t>(r, s.lists.size() - 1)]}, s.memory_type);
        statuses[r] = endpoint.status();
        if (endpoint.ok()) offers[r] = std::move(*(*endpoint)->offer());
        if (endpoint.ok()) rows[r] = (*endpoint)->rows();
        offered.arrive_and_wait();
        std::vector<std::vector<std::byte>> read = offers;
        for (uint32_t p = 0; p < s.n; ++p)
          if (!rows[p].empty()) read[p].insert(read[p].end(), rows[p][r].begin(), rows[p][r].end());
        if (statuses[r].ok() && static_cast<int>(r) != s.absent) {
          const int64_t begin = now_ns();
          auto made = (*endpoint)->connect(segments[r]->memory(r), {}, read);
          took_ms = std::max<int64_t>(took_ms, (now_ns() - begin) / 1'000'000);
          statuses[r] = made.status();
          if (made.ok()) links[r] = std::move(*made);
        }
        ended.arrive_and_wait();
      });
    }
    for (auto& t : threads) t.join();
    for (const Status& each : statuses)
      if (!each.ok() && status.ok()) status = each;
  }

  transport::Link& link(uint32_t from, uint32_t to) { return *links[from].links[to]; }
  transport::Engine& engine(uint32_t r) { return *links[r].engine; }
  uint64_t word(uint32_t at, uint32_t from, uint32_t sig) {
    return segments[at]->signal(from, sig).word.load(std::memory_order_acquire);
  }
  bool until(uint32_t rank, const std::function<bool()>& done, int64_t ms = patience_ms()) {
    engine(rank).begin();
    bool ended = false;
    for (const Deadline d = Deadline::after_ms(ms); !ended && !d.passed();) {
      engine(rank).progress();
      ended = done();
      std::this_thread::yield();
    }
    engine(rank).end();
    return ended;
  }
  Status put(uint32_t from, uint32_t to, uint64_t offset, const void* src, size_t bytes) {
    Status failed;
    const bool ended = until(from, [&] {
      const Result<PutState> state = link(from, to).put(offset, src, bytes);
      if (!state.ok()) failed = state.status();
      return !state.ok() || *state == PutState::kDone;
    });
    return ended ? failed : error(moecclTimeout, "a put of {} bytes does not end", bytes);
  }
  void end(uint32_t r) {
    links[r].engine = nullptr;
    links[r].links.clear();
  }

  std::vector<std::shared_ptr<Segment>> segments;
  std::vector<Status> statuses;
  std::vector<transport::NetworkLinks> links;
  Status status;  // the first failure
  std::atomic<int64_t> took_ms{0};
};

std::vector<unsigned char> pattern(size_t bytes, uint32_t seed) {
  std::vector<unsigned char> v(bytes);
  std::minstd_rand random(seed + 1);
  for (unsigned char& b : v) b = static_cast<unsigned char>(random() >> 7);
  return v;
}

// Random puts in both directions. Each must be complete when its signal is seen.
void exchange(Ranks& ranks, int times, uint32_t seed) {
  std::atomic<int> wrong{0};
  const auto rank = [&](uint32_t me) {
    const uint32_t peer = 1 - me;
    std::mt19937 random(seed);  // both know all sizes
    for (uint32_t i = 1; i <= static_cast<uint32_t>(times); ++i) {
      const size_t sizes[] = {1 + random() % 64, 1 + random() % 20'000, 1 + random() % 300'000,
                              1 + random() % 1'500'000};
      const size_t bytes = sizes[random() % 4];
      const uint64_t offset = random() % (kStaging - bytes);
      const auto mine = pattern(bytes, i * 2 + me), theirs = pattern(bytes, i * 2 + peer);
      std::memset(ranks.segments[me]->staging() + offset, 0, bytes);
      // Both have cleared their memory before either puts.
      if (!ranks.link(me, peer).signal(1, i, 9).ok() ||
          !ranks.until(me, [&] { return ranks.word(me, peer, 1) == (uint64_t{9} << 32 | i); })) {
        ++wrong;
        return;
      }
      if (!ranks.put(me, peer, offset, mine.data(), bytes).ok() || !ranks.link(me, peer).signal(2, i, 9).ok() ||
          !ranks.until(me, [&] { return ranks.word(me, peer, 2) == (uint64_t{9} << 32 | i); }) ||
          std::memcmp(ranks.segments[me]->staging() + offset, theirs.data(), bytes) != 0) {
        ++wrong;
        return;
      }
    }
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  EXPECT_EQ(wrong, 0);
}

struct Nothing {
  long listens, sends, receives, registered, aborted, retried;
};
Nothing open_things(const FakeNet& f) {
  return {f.count("listen") - f.count("closeListen"),
          f.count("connected") - f.count("closeSend"),
          f.count("accepted") - f.count("closeRecv"),
          f.count("regMr") - f.count("deregMr"),
          f.count("aborted"),
          f.count("retried")};
}
void expect_nothing_left(const FakeNet& f, const Nothing& before) {
  const Nothing now = open_things(f);
  EXPECT_EQ(now.listens, before.listens);
  EXPECT_EQ(now.sends, before.sends);
  EXPECT_EQ(now.receives, before.receives);
  EXPECT_EQ(now.registered, before.registered);
  EXPECT_EQ(now.aborted, before.aborted) << "a comm was closed with requests under way";
  EXPECT_EQ(now.retried, before.retried) << "a comm was used after it had failed";
}

class LinkVersions : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(NetPluginLink, LinkVersions, ::testing::Values("v6", "v7", "v8", "v9", "v10", "v11", "v12"));

TEST_P(LinkVersions, MovesPutsAndSignalsAndLeavesNothingBehind) {
  const FakeNet fake(GetParam());
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.lists = {fake.file()}});
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    exchange(ranks, 25, 3);
  }
  expect_nothing_left(fake, before);
  EXPECT_LE(fake.count("requests"), 8);
}

// Whatever a script does, the bytes are the same.
class LinkTraps : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(NetPluginLink, LinkTraps,
                         ::testing::Values("null=3", "late=300", "untold", "accept=block", "devices=3",
                                           "null=2 late=100 untold devices=2 accept=block"));

TEST_P(LinkTraps, ChangesNothing) {
  for (const char* versions : {"v6", "v12"}) {
    const FakeNet fake(versions);
    fake.script(GetParam());
    const Nothing before = open_things(fake);
    {
      Ranks ranks({.lists = {fake.file()}});
      ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
      exchange(ranks, 15, 5);
    }
    expect_nothing_left(fake, before);
  }
}

transport::NetworkOptions many(uint32_t n) {
  transport::NetworkOptions o;
  for (uint32_t r = 0; r < n; ++r) o.host_of.push_back(r);
  return o;
}

// All ranks read the offers of all, so those must not hold what each peer alone needs.
TEST(NetPluginLink, AnOfferDoesNotGrowWithTheRanks) {
  const FakeNet fake("v12");
  std::vector<size_t> sizes;
  for (const uint32_t n : {3u, 30u}) {
    auto endpoint = open_with(many(n), {fake.file()}, abi::kPtrHost);
    ASSERT_TRUE(endpoint.ok()) << endpoint.status().message();
    const auto offer = (*endpoint)->offer();
    ASSERT_TRUE(offer.ok());
    sizes.push_back(offer->size());
    const auto rows = (*endpoint)->rows();
    ASSERT_EQ(rows.size(), n);
    EXPECT_TRUE(rows[0].empty());
    for (uint32_t r = 1; r < n; ++r) EXPECT_EQ(rows[r].size(), rows[1].size());
    EXPECT_GT(rows[1].size(), 0u);
  }
  EXPECT_EQ(sizes[0], sizes[1]);
}

TEST(NetPluginLink, MoreRanksThanTheMeetingPointServesAreAReasonForAnotherNetwork) {
  const FakeNet fake("v12");
  const Nothing before = open_things(fake);
  const auto endpoint = open_with(many(5000), {fake.file()}, abi::kPtrHost);
  EXPECT_EQ(endpoint.status().code(), moecclUnsupported);
  EXPECT_TRUE(says(endpoint.status(), "5000 ranks")) << endpoint.status().message();
  expect_nothing_left(fake, before);
}

// Three ranks have rows for each other, two have none.
TEST(NetPluginLink, ThreeRanksMeet) {
  const FakeNet fake("v12");
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.n = 3, .lists = {fake.file()}});
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    exchange(ranks, 5, 7);
  }
  expect_nothing_left(fake, before);
}

TEST(NetPluginLink, ARefusedConnectionIsAnErrorThatNamesTheCall) {
  const FakeNet fake("v12");
  fake.script("refuse");
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.lists = {fake.file()}});
    ASSERT_FALSE(ranks.status.ok());
    for (const char* part : {"connect returned 2", "Fake", "v12", "rank", "refused by script"})
      EXPECT_TRUE(says(ranks.status, part)) << part << ": " << ranks.status.message();
  }
  expect_nothing_left(fake, before);
}

// Only what was registered is deregistered. The first eight registrations of the two ranks are for their proofs.
TEST(NetPluginLink, MemoryThatCannotBeRegisteredIsAnErrorThatLeavesNothing) {
  const FakeNet fake("v12");
  for (const int i : {1, 9, 11, 14}) {
    SCOPED_TRACE(i);
    fake.script(("apart locked=" + std::to_string(i)).c_str());
    const Nothing before = open_things(fake);
    {
      Ranks ranks({.lists = {fake.file()}, .deadline_ms = patient_ms(1500)});
      ASSERT_FALSE(ranks.status.ok());
      EXPECT_TRUE(says(ranks.statuses[0], "regMr") || says(ranks.statuses[1], "regMr")) << ranks.status.message();
    }
    expect_nothing_left(fake, before);
  }
}

TEST(NetPluginLink, ConnectionsThatNeverComeEndAtTheDeadline) {
  const FakeNet fake("v12");
  fake.script("never");
  Ranks ranks({.n = 3, .lists = {fake.file()}, .deadline_ms = 400});
  ASSERT_EQ(ranks.status.code(), moecclTimeout) << ranks.status.message();
  EXPECT_TRUE(says(ranks.statuses[0], "missing: ranks 1-2")) << ranks.statuses[0].message();
  EXPECT_LT(ranks.took_ms, 400 + patient_ms(1500));
}

// The plugin waits in accept for a rank that never comes.
TEST(NetPluginLink, APluginThatWaitsIsLeftBehindAtTheDeadline) {
  const FakeNet fake("v12");
  fake.script("accept=block");
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.lists = {fake.file()}, .deadline_ms = 400, .absent = 1});
    ASSERT_EQ(ranks.statuses[0].code(), moecclTimeout) << ranks.statuses[0].message();
    EXPECT_TRUE(says(ranks.statuses[0], "it waits in connect or accept")) << ranks.statuses[0].message();
    EXPECT_LT(ranks.took_ms, 400 + patient_ms(1500));
    fake.script("");  // lets the call return
  }
  for (const Deadline d = Deadline::after_ms(patience_ms());
       !d.passed() && open_things(fake).listens != before.listens;)
    std::this_thread::yield();
  expect_nothing_left(fake, before);
}

TEST(NetPluginLink, AStrangerIsNotBelieved) {
  const FakeNet fake("v12");
  fake.script("apart");
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.lists = {fake.file()}, .deadline_ms = 1000, .keys = {1, 2}});
    // The first rank to notice reports it. The other may only find that its peer does not come.
    EXPECT_FALSE(ranks.statuses[0].ok() || ranks.statuses[1].ok());
    EXPECT_TRUE(says(ranks.statuses[0], "does not hold this communicator's key") ||
                says(ranks.statuses[1], "does not hold this communicator's key"))
        << ranks.statuses[0].message() << "\n"
        << ranks.statuses[1].message();
  }
  expect_nothing_left(fake, before);
}

TEST(NetPluginLink, RanksWithDifferentPluginsAreTold) {
  const FakeNet one("v12"), other("v8");
  Ranks ranks({.lists = {one.file(), other.file()}, .deadline_ms = 2000});
  ASSERT_FALSE(ranks.statuses[0].ok());
  EXPECT_TRUE(says(ranks.statuses[0], "rank 1 has the net plugin FakeOverwritten") &&
              says(ranks.statuses[0], "MOECCL_NET=plugin:NAME"))
      << ranks.statuses[0].message();
}

TEST(NetPluginLink, AMessageThatBreaksInTheMiddleEndsTheLink) {
  for (const int nth : {1, 4, 20}) {
    const FakeNet fake("v12");
    const Nothing before = open_things(fake);
    {
      Ranks ranks({.lists = {fake.file()}});
      ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
      fake.script(format("apart fail={}", nth).c_str());
      const auto data = pattern(700'000, 1);
      const auto lost = [&] { return !ranks.link(0, 1).check_peer().ok(); };
      for (int i = 0; i < 20 && !lost(); ++i) {
        ASSERT_TRUE(ranks.put(0, 1, 0, data.data(), data.size()).ok());
        ASSERT_TRUE(ranks.link(0, 1).signal(1, 1, 9).ok());
      }
      ASSERT_TRUE(ranks.until(0, lost));
      ASSERT_TRUE(ranks.until(1, [&] { return !ranks.link(1, 0).check_peer().ok(); }));
      const Status s = ranks.link(1, 0).check_peer();
      EXPECT_EQ(s.code(), moecclRemoteError);
      for (const char* part : {"lost the connection to rank 0", "test returned 2", "the connection broke"})
        EXPECT_TRUE(says(s, part)) << part << ": " << s.message();
      // Puts from here on are lost, and wait for no peer.
      EXPECT_TRUE(ranks.put(0, 1, 0, data.data(), data.size()).ok());
      fake.script("apart");
    }
    expect_nothing_left(fake, before);
  }
}

// Only the rank whose send failed hears of it from the plugin. Its peer must not wait until that rank has ended.
TEST(NetPluginLink, AFailureOfOneSideEndsBoth) {
  for (const int nth : {1, 4, 20}) {
    SCOPED_TRACE(nth);
    const FakeNet fake("v12");
    const Nothing before = open_things(fake);
    {
      Ranks ranks({.n = 3, .lists = {fake.file()}});
      ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
      fake.script(format("apart fail={} quiet", nth).c_str());
      const auto data = pattern(700'000, 1);
      const auto lost = [&] { return !ranks.link(0, 1).check_peer().ok(); };
      for (int i = 0; i < 20 && !lost(); ++i) {
        ASSERT_TRUE(ranks.put(0, 1, 0, data.data(), data.size()).ok());
        ASSERT_TRUE(ranks.link(0, 1).signal(1, 1, 9).ok());
      }
      // Meanwhile there is news for all peers.
      ASSERT_TRUE(ranks.until(0, [&] {
        ranks.segments[0]->board().progress.completed.fetch_add(1);
        ranks.engine(0).board_changed(true);
        return lost();
      }));
      ASSERT_TRUE(ranks.until(
          1, [&] { return !ranks.link(1, 0).check_peer().ok(); }, patient_ms(5000)));
      fake.script("apart");
      // The others go on, with all of the pieces that the lost link held.
      for (uint32_t i = 1; i <= 3; ++i) {
        ASSERT_TRUE(ranks.put(0, 2, 0, data.data(), data.size()).ok());
        ASSERT_TRUE(ranks.link(0, 2).signal(1, i, 9).ok());
        ASSERT_TRUE(ranks.until(0, [&] { return ranks.word(2, 0, 1) == (uint64_t{9} << 32 | i); }));
        EXPECT_EQ(std::memcmp(ranks.segments[2]->staging(), data.data(), data.size()), 0);
      }
    }
    expect_nothing_left(fake, before);
  }
}

// A rank that has finished leaves while no thread reads its last messages.
TEST(NetPluginLink, LastWordsAreHeard) {
  const FakeNet fake("v12");
  for (int turn = 0; turn < 10; ++turn) {
    Ranks ranks({.lists = {fake.file()}});
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    const auto data = pattern(900'000, 3);
    ASSERT_TRUE(ranks.put(0, 1, 128, data.data(), data.size()).ok());
    ASSERT_TRUE(ranks.link(0, 1).signal(2, 7, 9).ok());
    ranks.segments[0]->board().health.state.store(static_cast<uint32_t>(RankState::kLeft));
    ranks.end(0);
    ASSERT_TRUE(ranks.until(1, [&] { return ranks.word(1, 0, 2) == (uint64_t{9} << 32 | 7); }));
    EXPECT_EQ(std::memcmp(ranks.segments[1]->staging() + 128, data.data(), data.size()), 0);
    ASSERT_TRUE(ranks.until(
        1, [&] { return ranks.link(1, 0).board().health.state.load() == static_cast<uint32_t>(RankState::kLeft); }));
    EXPECT_TRUE(ranks.link(1, 0).check_peer().ok()) << "its own word says more";
  }
}

// The comms of a process may share what a plugin gives up when one of them is closed with requests under way.
TEST_P(LinkVersions, ACommunicatorThatEndsTakesNoOtherAlong) {
  const FakeNet fake(GetParam());
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.lists = {fake.file()}});
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    const auto data = pattern(900'000, 3);
    for (const int first : {0, 1, 2, 3}) {
      SCOPED_TRACE(first);
      Ranks others({.lists = {fake.file()}});
      ASSERT_TRUE(others.status.ok()) << others.status.message();
      exchange(others, 3, 11);
      if (first == 3) {  // the receiver of a put that is under way
        ASSERT_TRUE(others.put(0, 1, 0, data.data(), data.size()).ok());
        others.end(1);
        continue;
      }
      if (first < 2) {
        others.end(static_cast<uint32_t>(first));
        continue;
      }
      std::thread other([&] { others.end(1); });  // both say that they leave
      others.end(0);
      other.join();
    }
    exchange(ranks, 5, 13);
  }
  expect_nothing_left(fake, before);
}

TEST(NetPluginLink, CudaMemoryIsFlushedBeforeItsSignal) {
  const FakeNet fake("v12");
  fake.script("cuda late=100");
  const Nothing before = open_things(fake);
  {
    Ranks ranks({.lists = {fake.file()}, .memory_type = abi::kPtrCuda});
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    long flushed = fake.count("flushed");
    for (uint32_t i = 1; const size_t bytes : {8u, 5000u, 400'000u}) {
      const auto data = pattern(bytes, i);
      ASSERT_TRUE(ranks.put(0, 1, 64, data.data(), bytes).ok());
      ASSERT_TRUE(ranks.link(0, 1).signal(2, i, 9).ok());
      ASSERT_TRUE(ranks.until(1, [&] { return ranks.word(1, 0, 2) == (uint64_t{9} << 32 | i); }));
      flushed += static_cast<long>(bytes);
      EXPECT_EQ(fake.count("flushed"), flushed) << "all of it, before the signal is seen";
      EXPECT_EQ(std::memcmp(ranks.segments[1]->staging() + 64, data.data(), bytes), 0);
      ++i;
    }
  }
  expect_nothing_left(fake, before);
}

TEST(NetPluginLink, AHostThatDoesNotAnswerIsNoticed) {
  const FakeNet fake("v12");
  Ranks ranks({.lists = {fake.file()}});
  ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
  ASSERT_TRUE(ranks.link(0, 1).signal(1, 1, 9).ok());
  EXPECT_TRUE(ranks.until(0, [&] { return ranks.link(0, 1).unacknowledged_ms() == 0; })) << "its engine answers";
  // The driving thread does not look at its engine.
  ranks.engine(1).begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_TRUE(ranks.link(0, 1).signal(1, 2, 9).ok());
  // After 250 ms without an answer to its own question, the engine looks itself.
  EXPECT_TRUE(ranks.until(0, [&] { return ranks.link(0, 1).unacknowledged_ms() > 150; }));
  ranks.engine(1).progress();
  ranks.engine(1).end();
  EXPECT_TRUE(ranks.until(0, [&] { return ranks.link(0, 1).unacknowledged_ms() == 0; }));
}

}  // namespace
}  // namespace moeccl::tests
