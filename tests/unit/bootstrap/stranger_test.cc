// SPDX-License-Identifier: Apache-2.0
// Strangers at a root's door are never let in and delay no rank.
#include <poll.h>

#include <algorithm>
#include <atomic>

#include "src/base/random.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/socket.h"
#include "tests/support/sockets.h"
#include "tests/unit/bootstrap/group.h"

namespace moeccl::bootstrap {
namespace {

Deadline soon() { return Deadline::after_ms(patient_ms(20'000)); }

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

constexpr std::string_view kHttp = "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner\r\nAccept: */*\r\n\r\n";
constexpr std::string_view kTls("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x12\x34\x56\x78\x9a", 16);

// Connects and misbehaves in the i-th way. Keeps the connection if that is part of the misbehaviour.
void annoy(const driver::SocketAddress& address, int i, std::vector<Fd>* kept) {
  Result<Fd> fd = driver::connect_to(address, Deadline::after_ms(patient_ms(3000)));
  if (!fd.ok()) return;  // the door is closed: the group has met
  switch (i % 5) {
    case 0:
      break;  // silent
    case 1:
      static_cast<void>(driver::send_now(fd->get(), bytes_of("MoE")));
      break;  // begins well, then slow
    case 2:
      static_cast<void>(driver::send_now(fd->get(), bytes_of(kHttp)));
      break;
    case 3:
      static_cast<void>(driver::send_now(fd->get(), bytes_of(kTls)));
      break;
    default: {
      const linger reset = {1, 0};
      ::setsockopt(fd->get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
      fd->reset();  // RST on TCP
      return;
    }
  }
  kept->push_back(std::move(*fd));
}

class Strangers : public testing::TestWithParam<const char*> {};

TEST_P(Strangers, AThousandDelayInitByLessThanASecond) {
  std::unique_ptr<Root> root = start_root(patient_ms(20'000), GetParam());
  ASSERT_NE(root, nullptr);
  Result<UniqueId> id = decode_unique_id(root->id());
  ASSERT_TRUE(id.ok());
  std::vector<Fd> kept;
  std::atomic<int> n_started = 0;
  std::thread strangers([&] {
    for (int i = 0; i < 1000; ++i) {
      annoy(id->address, i, &kept);
      ++n_started;
    }
  });
  // The ranks join among them.
  EXPECT_TRUE(eventually([&] { return n_started >= 400; }, patient_ms(10'000)));
  const Stopwatch watch;
  const std::vector<Status> results = run_threads(4, [&](int rank) -> Status {
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 4, soon()));
    MOECCL_TRY(session->barrier(soon()));
    session->close();
    return {};
  });
  MOECCL_EXPECT_WITHIN(watch, 1000);
  const int64_t ms = watch.ms();
  strangers.join();
  for (const Status& s : results) EXPECT_TRUE(s.ok()) << s.message();
  std::printf("4 ranks joined among 1000 strangers in %ld ms\n", static_cast<long>(ms));
}

// Ranks come after strangers have taken all places.
TEST_P(Strangers, AFullWaitingRoomMakesWay) {
  std::unique_ptr<Root> root = start_root(patient_ms(20'000), GetParam());
  Result<UniqueId> id = decode_unique_id(root->id());
  ASSERT_TRUE(id.ok());
  std::vector<Fd> kept;
  for (int i = 0; i < 1000; ++i) annoy(id->address, i % 2, &kept);  // all of them are silent or slow
  const Stopwatch watch;
  for (const Status& s : run_threads(2, [&](int rank) -> Status {
         MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 2, soon()));
         session->close();
         return {};
       })) {
    EXPECT_TRUE(s.ok()) << s.message();
  }
  MOECCL_EXPECT_WITHIN(watch, 1000);
}
INSTANTIATE_TEST_SUITE_P(Sockets, Strangers, testing::Values("", "127.0.0.1"));

// Over real sockets: captured, forged and bit-flipped hellos and proofs. None may take rank 0's place.
TEST(Attackers, HundredsOfForgedHandshakesOverRealSocketsAreRefused) {
  std::unique_ptr<Root> root = start_root();
  Result<UniqueId> id = decode_unique_id(root->id());
  ASSERT_TRUE(id.ok());
  SplitMix64 random(11);
  const Party party = {Role::kMember, 0, 2};
  Nonce nonce = {};
  ClientHandshake seen(id->key, party, nonce);  // data that an attacker may have overheard
  const Key wrong_key = derive_key(id->key, "another");
  int challenged = 0;
  int admitted = 0;
  for (int i = 0; i < 500; ++i) {
    Result<Fd> fd = driver::connect_to(id->address, soon());
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    HandshakeFrame hello = seen.hello();
    if (i % 4 == 1) hello[random.below(hello.size())] ^= std::byte{1};
    if (i % 4 == 2) hello = ClientHandshake(wrong_key, party, nonce).hello();
    static_cast<void>(driver::send_now(fd->get(), hello));
    HandshakeFrame challenge;
    if (!driver::recv_exact(fd->get(), challenge, Deadline::after_ms(patient_ms(3000))).ok()) continue;
    if (i % 4 == 1) continue;  // a flipped version is answered with the root's version, and nothing else
    ++challenged;
    // Without the key, the proof can only be the challenge itself, the hello, or noise.
    HandshakeFrame proof = i % 8 == 0 ? challenge : seen.hello();
    if (i % 16 == 0) {
      for (std::byte& b : proof) b = static_cast<std::byte>(random());
    }
    static_cast<void>(driver::send_now(fd->get(), proof));
    std::byte answer;
    admitted += driver::recv_exact(fd->get(), std::span(&answer, 1), Deadline::after_ms(patient_ms(3000))).ok();
  }
  EXPECT_EQ(challenged, 250);  // the replayed hellos, and no forged one
  EXPECT_EQ(admitted, 0);
  // No place has been taken.
  for (const Status& s : run_threads(2, [&](int rank) -> Status {
         MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Session> session, Session::join(root->id(), rank, 2, soon()));
         session->close();
         return {};
       })) {
    EXPECT_TRUE(s.ok()) << s.message();
  }
}

TEST(Attackers, AServerWithoutTheKeyGetsNoProof) {
  Result<Fd> listener = driver::listen_at(driver::parse_ip_address("127.0.0.1").value());
  ASSERT_TRUE(listener.ok());
  UniqueId id;
  id.address = driver::local_address(listener->get()).value();
  id.key = random_key().value();
  std::thread impostor([&] {
    Result<Fd> fd = tests::accept_until(listener->get(), soon());
    HandshakeFrame frame;
    ASSERT_TRUE(driver::recv_exact(fd->get(), frame, soon()).ok());
    const Key wrong_key = derive_key(id.key, "another");
    ClientHandshake other(wrong_key, {Role::kRoot, 0, 0}, Nonce{});
    static_cast<void>(driver::send_now(fd->get(), other.hello()));
    EXPECT_FALSE(driver::recv_exact(fd->get(), frame, soon()).ok());  // the connection is closed without a proof
  });
  const Status s = Session::join(encode_unique_id(id).value(), 0, 1, soon()).status();
  impostor.join();
  EXPECT_EQ(s.code(), moecclInvalidUsage);
  EXPECT_TRUE(contains(s.message(), "key")) << s.message();
}

// A man in the middle cannot change, drop or repeat a control frame unnoticed.
TEST(Attackers, ChangedControlFramesEndTheGroup) {
  std::unique_ptr<Root> root = start_root(patient_ms(20'000), "127.0.0.1");
  Result<UniqueId> real = decode_unique_id(root->id());
  ASSERT_TRUE(real.ok());
  Result<Fd> listener = driver::listen_at(driver::parse_ip_address("127.0.0.1").value());
  ASSERT_TRUE(listener.ok());
  UniqueId tapped = *real;
  tapped.address = driver::local_address(listener->get()).value();
  std::thread middle([&] {
    Result<Fd> client = tests::accept_until(listener->get(), soon());
    Result<Fd> server = driver::connect_to(real->address, soon());
    ASSERT_TRUE(client.ok() && server.ok());
    size_t n_up = 0;
    const Deadline end = Deadline::after_ms(patient_ms(5000));
    pollfd both[2] = {{client->get(), POLLIN, 0}, {server->get(), POLLIN, 0}};
    while (::poll(both, 2, end.remaining_ms()) > 0) {
      for (const bool up : {true, false}) {
        std::byte buffer[512];
        Result<driver::IoStep> got = driver::recv_now(up ? client->get() : server->get(), buffer);
        if (!got.ok() || (got->n == 0 && !got->would_block)) return;
        if (got->n == 0) continue;
        // Flips one bit of the join, after hello and proof.
        if (up && n_up + got->n > 2 * kHandshakeFrameBytes) buffer[got->n - 1] ^= std::byte{1};
        if (up) n_up += got->n;
        static_cast<void>(driver::send_now(up ? server->get() : client->get(), std::span(buffer).first(got->n)));
      }
    }
  });
  Result<moecclUniqueId> through_middle = encode_unique_id(tapped);
  ASSERT_TRUE(through_middle.ok());
  const std::vector<Status> results = run_threads(2, [&](int rank) -> Status {
    const Deadline deadline = Deadline::after_ms(patient_ms(1500));
    return Session::join(rank == 0 ? root->id() : *through_middle, rank, 2, deadline).status();
  });
  middle.join();
  for (const Status& s : results) EXPECT_FALSE(s.ok());
  EXPECT_TRUE(contains(results[0].message(), "rank 1 (at 127.0.0.1) was cut off")) << results[0].message();
}

}  // namespace
}  // namespace moeccl::bootstrap
