// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/handshake.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "src/base/random.h"
#include "src/bootstrap/control.h"
#include "src/driver/socket.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

constexpr Party kClient = {Role::kMember, 3, 8};
constexpr Party kServer = {Role::kRoot, 0, 0};

Nonce fresh_nonce() {
  Nonce nonce;
  EXPECT_TRUE(random_bytes(nonce.data(), nonce.size()).ok());
  return nonce;
}

// One honest run, with all frames that were exchanged.
struct Transcript {
  Key key = random_key().value();
  ClientHandshake client{key, kClient, fresh_nonce()};
  ServerHandshake server{key, kServer, fresh_nonce()};
  HandshakeFrame hello = client.hello();
  HandshakeFrame challenge = {};
  HandshakeFrame proof = {};

  Transcript() {
    challenge = server.on_hello(hello, Role::kMember).reply;
    proof = client.answer(challenge, Role::kRoot).value();
  }
};

TEST(Handshake, BothSidesAgreeOnWhoTheyAreAndOnKeys) {
  Transcript t;
  ASSERT_TRUE(t.server.on_proof(t.proof));
  EXPECT_EQ(t.server.result().peer.rank, 3u);
  EXPECT_EQ(t.server.result().peer.n_ranks, 8u);
  EXPECT_EQ(t.server.result().peer.role, Role::kMember);
  EXPECT_EQ(t.client.result().peer.role, Role::kRoot);
  EXPECT_EQ(t.server.result().keys.send, t.client.result().keys.receive);
  EXPECT_EQ(t.server.result().keys.receive, t.client.result().keys.send);
  EXPECT_NE(t.server.result().keys.send, t.server.result().keys.receive);
}

TEST(Handshake, EveryFlippedBitOfEveryFrameIsRefused) {
  int accepted = 0;
  for (size_t bit = 0; bit < kHandshakeFrameBytes * 8; ++bit) {
    const auto flip = [bit](HandshakeFrame frame) {
      frame[bit / 8] ^= std::byte{1} << (bit % 8);
      return frame;
    };
    Transcript t;
    ServerHandshake server(t.key, kServer, fresh_nonce());
    accepted += server.on_hello(flip(t.hello), Role::kMember).verdict == ServerHandshake::Verdict::kContinue;
    ClientHandshake client(t.key, kClient, fresh_nonce());
    const HandshakeFrame challenge =
        ServerHandshake(t.key, kServer, fresh_nonce()).on_hello(client.hello(), Role::kMember).reply;
    accepted += client.answer(flip(challenge), Role::kRoot).ok();
    accepted += t.server.on_proof(flip(t.proof));
    accepted += t.server.on_proof(t.proof);  // one try per challenge
  }
  EXPECT_EQ(accepted, 0);
}

// An attacker may have seen any number of runs, but does not have the key.
TEST(Handshake, TenThousandForgedReflectedAndReplayedHandshakesAreRefused) {
  SplitMix64 random(7);
  const Key key = random_key().value();
  const Key wrong_key = random_key().value();
  const auto honest = [&key] {
    ClientHandshake client(key, kClient, fresh_nonce());
    ServerHandshake server(key, kServer, fresh_nonce());
    const HandshakeFrame challenge = server.on_hello(client.hello(), Role::kMember).reply;
    return std::array<HandshakeFrame, 3>{client.hello(), challenge, client.answer(challenge, Role::kRoot).value()};
  };
  std::vector<std::array<HandshakeFrame, 3>> seen;
  for (int i = 0; i < 16; ++i) seen.push_back(honest());

  int accepted_by_server = 0;
  int accepted_by_client = 0;
  for (int i = 0; i < 10'000; ++i) {
    const auto& past = seen[random.below(seen.size())];
    ServerHandshake server(key, kServer, fresh_nonce());
    HandshakeFrame proof = past[random.below(3)];
    HandshakeFrame hello = past[random.below(3)];
    switch (random.below(4)) {
      case 0:  // forged with another key
        hello = ClientHandshake(wrong_key, kClient, fresh_nonce()).hello();
        break;
      case 1:  // the old hello and the old proof
        hello = past[0];
        proof = past[2];
        break;
      case 2: {  // a valid hello of the past, and the server's own challenge reflected
        proof = server.on_hello(past[0], Role::kMember).reply;
        break;
      }
      default:
        for (std::byte& b : proof) b = static_cast<std::byte>(random());
    }
    server.on_hello(hello, Role::kMember);
    accepted_by_server += server.on_proof(proof);

    ClientHandshake client(key, kClient, fresh_nonce());
    HandshakeFrame challenge = past[random.below(3)];
    if (random.below(4) == 0) challenge = client.hello();  // reflected
    if (random.below(4) == 0) {
      challenge = ServerHandshake(wrong_key, kServer, fresh_nonce()).on_hello(client.hello(), Role::kMember).reply;
    }
    accepted_by_client += client.answer(challenge, Role::kRoot).ok();
  }
  EXPECT_EQ(accepted_by_server, 0);
  EXPECT_EQ(accepted_by_client, 0);
}

TEST(Handshake, AMemberIsNotTakenForALinkNorTheReverse) {
  const Key key = random_key().value();
  ClientHandshake client(key, kClient, fresh_nonce());
  ServerHandshake link(key, {Role::kLinkServer, 1, 8}, fresh_nonce());
  EXPECT_EQ(link.on_hello(client.hello(), Role::kLinkClient).verdict, ServerHandshake::Verdict::kStranger);
  ServerHandshake root(key, kServer, fresh_nonce());
  const ServerHandshake::Answer answer = root.on_hello(client.hello(), Role::kMember);
  EXPECT_FALSE(client.answer(answer.reply, Role::kLinkServer).ok());
}

TEST(Handshake, TruncatedHandshakesAreRefused) {
  const Key key = random_key().value();
  for (size_t kept = 0; kept < kHandshakeFrameBytes; kept += 3) {
    auto pair = make_pair_of_sockets();
    ClientHandshake client(key, kClient, fresh_nonce());
    ASSERT_TRUE(
        driver::send_all(pair.first.get(), std::span(client.hello()).first(kept), Deadline::after_ms(patient_ms(1000)))
            .ok());
    pair.first.reset();
    EXPECT_FALSE(
        server_handshake(pair.second.get(), key, kServer, Role::kMember, Deadline::after_ms(patient_ms(1000))).ok());
  }
}

TEST(Handshake, WorksOverASocketAndEndsAtItsDeadline) {
  const Key key = random_key().value();
  auto pair = make_pair_of_sockets();
  std::thread server([&] {
    Result<Authenticated> r =
        server_handshake(pair.second.get(), key, kServer, Role::kMember, Deadline::after_ms(patient_ms(5000)));
    EXPECT_TRUE(r.ok()) << r.status().message();
  });
  Result<Authenticated> client =
      client_handshake(pair.first.get(), key, kClient, {Role::kRoot}, Deadline::after_ms(patient_ms(5000)));
  server.join();
  EXPECT_TRUE(client.ok()) << client.status().message();

  auto silent = make_pair_of_sockets();
  const Stopwatch watch;
  EXPECT_EQ(client_handshake(silent.first.get(), key, kClient, {Role::kRoot}, Deadline::after_ms(50)).status().code(),
            moecclTimeout);
  MOECCL_EXPECT_WITHIN(watch, 1000);
}

TEST(Handshake, AnotherVersionIsNamedOnBothSides) {
  const Key key = random_key().value();
  Party newer = kClient;
  newer.protocol = kProtocolVersion + 1;
  newer.library_version = 20304;
  auto pair = make_pair_of_sockets();
  Status seen_by_server;
  std::thread server([&] {
    seen_by_server =
        server_handshake(pair.second.get(), key, kServer, Role::kMember, Deadline::after_ms(patient_ms(5000))).status();
  });
  const Status seen_by_client =
      client_handshake(pair.first.get(), key, newer, {Role::kRoot}, Deadline::after_ms(patient_ms(5000))).status();
  server.join();
  for (const Status& status : {seen_by_server, seen_by_client}) {
    EXPECT_EQ(status.code(), moecclUnsupported);
    EXPECT_TRUE(contains(status.message(), format("protocol {} ", kProtocolVersion))) << status.message();
    EXPECT_TRUE(contains(status.message(), format("protocol {} (library 2.3.4)", kProtocolVersion + 1)))
        << status.message();
  }
}

TEST(Control, FramesAreAcceptedOnceInOrderAndUnchanged) {
  const Key key = random_key().value();
  Sealer sealer(key);
  Opener opener(key);
  ControlHead head;
  head.n_bytes = 10;
  head.type = 2;
  const ControlHeadBytes first = sealer.seal(head);
  const ControlHeadBytes second = sealer.seal(head);
  EXPECT_FALSE(opener.open(second, 100).ok());  // a lost frame
  ASSERT_TRUE(opener.open(first, 100).ok());
  EXPECT_FALSE(opener.open(first, 100).ok());  // a replay
  for (size_t bit = 0; bit < kControlHeadBytes * 8; ++bit) {
    ControlHeadBytes bad = second;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(opener.open(bad, 100).ok());
  }
  ASSERT_TRUE(opener.open(second, 100).ok());
  EXPECT_FALSE(opener.open(sealer.seal(head), 9).ok());  // larger than any receiver accepts
  EXPECT_FALSE(Opener(random_key().value()).open(first, 100).ok());
}

}  // namespace
}  // namespace moeccl::bootstrap
