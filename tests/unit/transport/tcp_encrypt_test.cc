// SPDX-License-Identifier: Apache-2.0
// Two ranks with an attacker between them. It sees nothing of the data, and cannot change, repeat, drop or cut anything
// without ending the link with a sentence.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "tests/support/relay.h"
#include "tests/support/tcp_fabrics.h"
#include "tests/support/timing.h"

namespace moeccl::tests {
namespace {

using transport::PutState;
using transport::tcp::best_cipher;
using transport::tcp::Cipher;
using transport::tcp::RecordHead;
using Bytes = Relay::Bytes;

constexpr std::string_view kSecret = "what the ranks say to each other";
constexpr size_t kBeforeRecords =
    2 * bootstrap::kHandshakeFrameBytes + bootstrap::kControlHeadBytes + sizeof(transport::tcp::StreamGreeting);

std::vector<Cipher> ciphers() {
  if (best_cipher() == Cipher::kAes256Gcm) return {Cipher::kChaCha20Poly1305, Cipher::kAes256Gcm};
  return {Cipher::kChaCha20Poly1305};
}

// Rank 0 accepts, and rank 1 reaches it through the relay.
struct RelayedPair {
  explicit RelayedPair(Cipher cipher, Relay::Change change = {})
      : fabrics(2, 1, 4 << 20, nullptr, {cipher, [&](uint32_t reader, uint32_t of, transport::Nic& nic) {
                                           if (reader != 1 || of != 0) return;
                                           relay.emplace(nic.address, kBeforeRecords, std::move(change));
                                           nic.address = relay->address();
                                         }}) {}
  std::optional<Relay> relay;
  TcpFabrics fabrics;

  bool put(uint32_t from, uint64_t offset, const void* src, size_t bytes) {
    for (const Deadline d = Deadline::after_ms(patient_ms(10'000)); !d.passed();) {
      const auto state = fabrics[from].link(1 - from).put(offset, src, bytes);
      if (!state.ok()) return false;
      if (*state == PutState::kDone) return true;
      fabrics[from].engine->progress();
    }
    return false;
  }
  uint32_t number_seen(uint32_t at) {
    return static_cast<uint32_t>(fabrics[at].own->signal(1 - at, 2).word.load(std::memory_order_acquire));
  }
};

bool wait_until(const std::function<bool()>& done) {
  for (const Deadline d = Deadline::after_ms(patient_ms(10'000)); !d.passed();) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(TcpEncryption, HidesPutsSignalsAndSentences) {
  std::string text;
  while (text.size() < 200'000) text += kSecret;
  std::vector<Cipher> all = ciphers();
  all.push_back(Cipher::kNone);  // here the relay must see the data, which shows that it looks in the right place
  for (const Cipher cipher : all) {
    RelayedPair ranks(cipher);
    ASSERT_TRUE(ranks.fabrics.status.ok()) << ranks.fabrics.status.message();
    for (const uint32_t from : {0u, 1u}) {
      uint64_t offset = 64;
      for (const size_t bytes : {size_t{64}, size_t{9'000}, text.size()}) {
        ASSERT_TRUE(ranks.put(from, offset, text.data(), bytes));
        offset += bytes;
      }
      ASSERT_TRUE(ranks.fabrics[from].link(1 - from).signal(2, 7, 9).ok());
      ASSERT_TRUE(wait_until([&] { return ranks.number_seen(1 - from) == 7; }));
      const std::byte* at = ranks.fabrics[1 - from].own->staging() + 64;
      for (const size_t bytes : {size_t{64}, size_t{9'000}, text.size()}) {
        EXPECT_EQ(std::memcmp(at, text.data(), bytes), 0) << bytes;
        at += bytes;
      }
    }
    EXPECT_GT(ranks.relay->n_seen(), 2 * text.size());
    EXPECT_EQ(ranks.relay->has_seen(kSecret), cipher == Cipher::kNone);
    ranks.fabrics[1].publish_state(transport::RankState::kFailed, moecclInvalidArgument, "a sentence of its own");
    ASSERT_TRUE(wait_until([&] { return ranks.fabrics[0].link(1).board().health.state.load() != 0; }));
    EXPECT_EQ(ranks.relay->has_seen("a sentence of its own"), cipher == Cipher::kNone);
  }
}

TEST(TcpEncryption, AnAttackOnTheWayEndsTheLinkAndNeverGivesWrongData) {
  struct Attack {
    const char* what;
    const char* said;
    std::function<std::optional<std::vector<Bytes>>(const Bytes& record, Bytes& held, const Relay& relay)> act;
  };
  const auto flip = [](Bytes record, size_t at) {
    record[at] ^= std::byte{0x10};
    return std::vector<Bytes>{std::move(record)};
  };
  const Attack attacks[] = {
      {"a number", "not authentic", [&](const Bytes& r, Bytes&, const Relay&) { return flip(r, 0); }},
      {"a length", "not authentic", [&](const Bytes& r, Bytes&, const Relay&) { return flip(r, 9); }},
      {"the text", "not authentic",
       [&](const Bytes& r, Bytes&, const Relay&) { return flip(r, sizeof(RecordHead) + 3); }},
      {"the tag", "not authentic", [&](const Bytes& r, Bytes&, const Relay&) { return flip(r, r.size() - 1); }},
      {"replayed", "came where",
       [](const Bytes& r, Bytes&, const Relay&) {
         return std::vector<Bytes>{r, r};
       }},
      {"dropped", "came where", [](const Bytes&, Bytes&, const Relay&) { return std::vector<Bytes>{}; }},
      {"reordered", "came where",
       [](const Bytes& r, Bytes& held, const Relay&) {
         held = r;
         return std::vector<Bytes>{};
       }},
      {"reflected", "not authentic",
       [](const Bytes&, Bytes&, const Relay& relay) {
         return std::vector<Bytes>{relay.came_back(bootstrap::kHandshakeFrameBytes + bootstrap::kControlHeadBytes)};
       }},
      {"cut inside", "cut off inside",
       [](const Bytes& r, Bytes& held, const Relay&) {
         held = {std::byte{1}};
         return std::vector<Bytes>{{r.begin(), r.end() - 9}};
       }},
      {"cut between", "closed by", [](const Bytes&, Bytes&, const Relay&) { return std::nullopt; }},
  };
  constexpr uint32_t kRounds = 6;
  constexpr size_t kBytes = 50'000;  // several records each
  for (const Cipher cipher : ciphers()) {
    for (const Attack& a : attacks) {
      for (const size_t at : {size_t{0}, size_t{1}, size_t{5}}) {
        SCOPED_TRACE(format("{} {} record {}", transport::tcp::cipher_name(cipher), a.what, at));
        Bytes held;
        std::atomic<bool> attacked{false};
        RelayedPair ranks(cipher,
                          [&](const Relay& relay, size_t n, const Bytes& r) -> std::optional<std::vector<Bytes>> {
                            if (n == at) {
                              attacked = true;
                              return a.act(r, held, relay);
                            }
                            if (held.size() == 1) return std::nullopt;
                            if (n < at || held.empty()) return std::vector<Bytes>{r};
                            return std::vector<Bytes>{r, std::exchange(held, {})};
                          });
        ASSERT_TRUE(ranks.fabrics.status.ok()) << ranks.fabrics.status.message();
        ASSERT_TRUE(ranks.fabrics[0].link(1).signal(1, 1, 1).ok());  // something to reflect
        ASSERT_TRUE(wait_until([&] { return ranks.fabrics[1].own->signal(0, 1).word.load() != 0; }));
        Bytes data(kBytes);
        for (uint32_t round = 0; round < kRounds; ++round) {
          std::fill(data.begin(), data.end(), static_cast<std::byte>(round + 1));
          (void)ranks.put(1, round * kBytes, data.data(), data.size());
          (void)ranks.fabrics[1].link(0).signal(2, round + 1, 1);
        }
        EXPECT_TRUE(wait_until([&] { return !ranks.fabrics[0].link(1).check_peer().ok(); }));
        EXPECT_TRUE(attacked);
        const std::string why = ranks.fabrics[0].link(1).check_peer().message();
        for (const char* part : {"rank 1", a.said}) EXPECT_NE(why.find(part), std::string::npos) << why;
        // The other side hears of it at its next look.
        EXPECT_TRUE(wait_until([&] { return !ranks.fabrics[1].link(0).check_peer().ok(); }));
        const uint32_t seen = ranks.number_seen(0);
        EXPECT_LT(seen, kRounds);
        for (uint32_t round = 0; round < seen; ++round)
          for (size_t i = 0; i < kBytes; ++i)
            ASSERT_EQ(ranks.fabrics[0].own->staging()[round * kBytes + i], static_cast<std::byte>(round + 1));
      }
    }
  }
}

TEST(TcpEncryption, OfOneSideOnlyNeverFallsBackToNone) {
  for (const uint32_t encrypts : {0u, 1u}) {
    TcpFabrics ranks(2, 1, 1 << 20, nullptr, {Cipher::kNone, {}, [&](transport::tcp::MeshOptions& o) {
                                                if (o.rank == encrypts) o.cipher = best_cipher();
                                                o.deadline = Deadline::after_ms(1000);
                                              }});
    EXPECT_FALSE(ranks.status.ok());
    const std::string said = ranks.statuses[1].message();
    EXPECT_NE(said.find("MOECCL_ENCRYPT"), std::string::npos) << said;
    EXPECT_NE(said.find("rank 0"), std::string::npos) << said;
  }
}

// One processor has no AES instructions, the others do.
TEST(TcpEncryption, TakesTheCipherThatBothHave) {
  for (const uint32_t lacks : {0u, 1u}) {
    TcpFabrics ranks(2, 2, 1 << 20, nullptr, {best_cipher(), {}, [&](transport::tcp::MeshOptions& o) {
                                                if (o.rank == lacks) o.cipher = Cipher::kChaCha20Poly1305;
                                              }});
    ASSERT_TRUE(ranks.status.ok()) << ranks.status.message();
    const std::vector<std::byte> data(100'000, std::byte{3});
    for (const Deadline d = Deadline::after_ms(patient_ms(10'000)); !d.passed();) {
      if (*ranks[0].link(1).put(0, data.data(), data.size()) == PutState::kDone) break;
      ranks[0].engine->progress();
    }
    ASSERT_TRUE(ranks[0].link(1).signal(2, 1, 1).ok());
    EXPECT_TRUE(wait_until([&] { return ranks[1].own->signal(0, 2).word.load(std::memory_order_acquire) != 0; }));
    EXPECT_EQ(std::memcmp(ranks[1].own->staging(), data.data(), data.size()), 0);
  }
}

}  // namespace
}  // namespace moeccl::tests
