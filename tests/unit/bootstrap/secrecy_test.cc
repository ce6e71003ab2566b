// SPDX-License-Identifier: Apache-2.0
// Data that ranks exchange between hosts before they are connected. No observer on the way can read it, and neither can
// one that has recorded it and later obtains the shared key.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "tests/support/relay.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

constexpr Party kClient = {Role::kMember, 3, 8};
constexpr Party kServer = {Role::kRoot, 0, 0};

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

TEST(Secrecy, BlobsAndSentencesOverTcpAreNotSeenOnTheWay) {
  RootOptions options;
  options.timeout_ms = patient_ms(20'000);
  options.socket_addr = "127.0.0.1";
  const auto root = Root::start(options);
  ASSERT_TRUE(root.ok()) << root.status().message();
  UniqueId id = decode_unique_id((*root)->id()).value();
  tests::Relay relay(id.address);
  id.address = relay.address();
  const moecclUniqueId by_relay = encode_unique_id(id).value();
  std::string text;
  while (text.size() < 20'000) text += "a topology of the user's own";
  std::thread ranks[2];
  for (int r = 0; r < 2; ++r) {
    ranks[r] = std::thread([&, r] {
      auto session = Session::join(by_relay, r, 2, soon());
      ASSERT_TRUE(session.ok()) << session.status().message();
      const auto blobs = (*session)->all_gather(std::as_bytes(std::span(text)), soon());
      ASSERT_TRUE(blobs.ok()) << blobs.status().message();
      for (const auto& b : *blobs) {
        EXPECT_EQ(std::string_view(reinterpret_cast<const char*>(b.data()), b.size()), text);
      }
      if (r == 0) return (*session)->abandon(Status(moecclInvalidArgument, "a sentence with the user's own words"));
      const Status told = (*session)->barrier(soon());
      EXPECT_NE(told.message().find("the user's own words"), std::string::npos) << told.message();
    });
  }
  for (std::thread& t : ranks) t.join();
  EXPECT_GT(relay.n_seen(), 4 * text.size());
  for (const char* part : {"a topology", "user's own", "own words"}) EXPECT_FALSE(relay.has_seen(part)) << part;
}

SessionKeys keys_of_client(const Key& key, const Fresh& fresh, HandshakeFrameView challenge) {
  ClientHandshake client(key, kClient, fresh);
  EXPECT_TRUE(client.answer(challenge, Role::kRoot).ok());
  return client.result().keys;
}

TEST(Secrecy, TheSharedKeyAndAllThatWasSaidDoNotGiveTheKeysOfASession) {
  for (const bool exchange : {true, false}) {
    const Key key = random_key().value();
    Fresh client_side = Fresh::make(exchange).value();
    client_side.publish();
    const Fresh server_side = Fresh::make(exchange).value();
    ClientHandshake client(key, kClient, client_side);
    ServerHandshake server(key, kServer, server_side);
    const HandshakeFrame challenge = server.on_hello(client.hello(), Role::kMember).reply;
    const Result<HandshakeFrame> proof = client.answer(challenge, Role::kRoot);
    ASSERT_TRUE(proof.ok() && server.on_proof(*proof));
    EXPECT_EQ(client.result().keys.send, server.result().keys.receive);
    EXPECT_EQ(client.result().keys.receive, server.result().keys.send);
    EXPECT_NE(client.result().keys.send, client.result().keys.receive);
    // Later: an attacker has the key and the frames, but neither secret.
    Fresh recorded = client_side;
    recorded.secret = Fresh::make(true).value().secret;
    EXPECT_EQ(keys_of_client(key, recorded, challenge).send == client.result().keys.send, !exchange);
    EXPECT_EQ(keys_of_client(key, client_side, challenge).send, client.result().keys.send) << "what the test compares";
  }
}

TEST(Secrecy, ThatOnlyOneSideWantsIsRefused) {
  const Key key = random_key().value();
  for (const bool clients : {true, false}) {
    ClientHandshake client(key, kClient, Fresh::make(clients).value());
    ServerHandshake server(key, kServer, Fresh::make(!clients).value());
    const HandshakeFrame challenge = server.on_hello(client.hello(), Role::kMember).reply;
    const Result<HandshakeFrame> proof = client.answer(challenge, Role::kRoot);
    EXPECT_EQ(proof.status().code(), moecclMismatch) << proof.status().message();
  }
}

// All of X25519's points of small order give every party the same secret.
TEST(Secrecy, APublicKeyOfSmallOrderIsRefused) {
  const Key key = random_key().value();
  Fresh weak;
  weak.exchanges_keys = true;
  weak.nonce[0] = std::byte{1};
  ClientHandshake client(key, kClient, Fresh::make(true).value());
  ServerHandshake server(key, kServer, weak);
  EXPECT_EQ(client.answer(server.on_hello(client.hello(), Role::kMember).reply, Role::kRoot).status().code(),
            moecclInvalidUsage);
}

TEST(Secrecy, PayloadsOfControlFramesAreOpenedByTheirHeadAlone) {
  const Key key = random_key().value();
  PayloadKeys keys(random_key().value());
  std::vector<std::byte> plain(100, std::byte{'x'});
  const SealedPayload first(plain, keys.next()), second(plain, keys.next());
  EXPECT_NE(first.bytes, plain);
  EXPECT_NE(first.bytes, second.bytes);
  const ControlHead head = first.head(2);
  Sealer sealer(key);
  const ControlHeadBytes a = sealer.seal(head), b = sealer.seal(head);
  EXPECT_NE(std::vector(a.begin() + 48, a.begin() + 80), std::vector(b.begin() + 48, b.begin() + 80)) << "masked alike";
  Opener opener(key);
  const ControlHead read = opener.open(a, 1000).value();
  std::vector<std::byte> there = first.bytes;
  ASSERT_TRUE(open_payload(read, there));
  EXPECT_EQ(there, plain);
  there = second.bytes;
  EXPECT_FALSE(open_payload(read, there));
  there = first.bytes;
  there[5] ^= std::byte{1};
  EXPECT_FALSE(open_payload(read, there));
}

}  // namespace
}  // namespace moeccl::bootstrap
