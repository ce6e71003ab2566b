// SPDX-License-Identifier: Apache-2.0
// Data from the network is not trusted: strangers, wrong keys, frames that lie.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "src/bootstrap/handshake.h"
#include "src/driver/socket.h"
#include "tests/support/ranks.h"
#include "tests/support/sockets.h"
#include "tests/support/timing.h"
#include "tests/support/two_meshes.h"
#include "transport/tcp/tcp_engine.h"

namespace moeccl::transport::tcp {
namespace {

TEST(TcpMesh, StrangersDoNotDisturbThePeers) {
  const MeshOptions a = options_of(0), b = options_of(1);
  auto mesh_a = listen(a), mesh_b = listen(b);
  const driver::SocketAddress at = mesh_a->nics()[0].address;
  std::vector<Fd> strangers;
  // One is silent, one sends nonsense, and one knows the protocol but not the key.
  for (int i = 0; i < 3; ++i) strangers.push_back(std::move(*driver::connect_to(at, a.deadline)));
  const std::vector<std::byte> nonsense(500, std::byte{'x'});
  (void)driver::send_now(strangers[1].get(), nonsense);
  bootstrap::Key wrong = a.key;
  wrong[0] = std::byte{1};
  bootstrap::Nonce nonce{};
  bootstrap::ClientHandshake forged(wrong, {bootstrap::Role::kLinkClient, 1, 2}, nonce);
  ASSERT_TRUE(driver::send_all(strangers[2].get(), forged.hello(), a.deadline).ok());
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  std::thread other([&] { got_a = mesh_a->connect({{1, nics_of(*mesh_b)}}); });
  auto got_b = mesh_b->connect({{0, nics_of(*mesh_a)}});
  other.join();
  ASSERT_TRUE(got_a.ok()) << got_a.status().message();
  ASSERT_TRUE(got_b.ok()) << got_b.status().message();
  EXPECT_EQ((*got_a)[0].rank, 1u);
  // No answer without the key.
  std::byte answer[1];
  const auto end = driver::recv_now(strangers[2].get(), answer);
  EXPECT_TRUE(!end.ok() || end->n == 0);
}

// More silent strangers than the process may have descriptors are at the port before the peers come.
TEST(TcpMesh, AFloodOfStrangersTakesNoDescriptorsFromTheRank) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "it forks and starts threads, beside threads that a net plugin has left behind";
#endif
  constexpr int kStrangers = 600, kDescriptors = 256;
  auto port = std::move(*tests::socket_pair());
  auto go = std::move(*tests::socket_pair());
  const Deadline deadline = Deadline::after_ms(tests::patient_ms(20'000));
  const pid_t child = fork();
  if (child == 0) {
    const rlimit few = {kDescriptors, kDescriptors};
    const MeshOptions a = options_of(0), b = options_of(1);
    auto mesh_a = listen(a), mesh_b = listen(b);
    const uint16_t number = mesh_a->nics()[0].address.port();
    std::byte one{};
    if (setrlimit(RLIMIT_NOFILE, &few) != 0) _exit(2);
    if (!driver::send_all(port.second.get(), std::as_bytes(std::span(&number, 1)), deadline).ok()) _exit(3);
    if (!driver::recv_exact(go.second.get(), {&one, 1}, deadline).ok()) _exit(4);
    const tests::Stopwatch watch;
    bool ok = false;
    std::thread other([&] { ok = mesh_a->connect({{1, nics_of(*mesh_b)}}).ok(); });
    const auto got = mesh_b->connect({{0, nics_of(*mesh_a)}});
    other.join();
    _exit(!ok || !got.ok() ? 5 : watch.fair_ms() <= tests::patient_ms(2000) ? 0 : 6);
  }
  uint16_t number = 0;
  ASSERT_TRUE(driver::recv_exact(port.first.get(), std::as_writable_bytes(std::span(&number, 1)), deadline).ok());
  driver::SocketAddress at = *driver::parse_ip_address("127.0.0.1");
  at.set_port(number);
  std::vector<Fd> strangers;
  for (int i = 0; i < kStrangers; ++i) {
    if (auto fd = driver::connect_to(at, deadline); fd.ok()) strangers.push_back(std::move(*fd));
  }
  EXPECT_GT(strangers.size(), size_t{kDescriptors});
  const std::byte one{};
  ASSERT_TRUE(driver::send_all(go.first.get(), {&one, 1}, deadline).ok());
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// The first of the two ways to the peer ends at a stranger that accepts connections and says nothing. The second serves
// even if it is too slow to be used besides the first.
void give_up_the_first_rail(int64_t first_rate, int64_t second_rate) {
  MeshOptions a = options_of(0), b = options_of(1);
  a.deadline = b.deadline = Deadline::after_ms(8'000);
  const auto two_nics = [&](const MeshOptions& o) {
    std::vector<Nic> nics;
    for (const int net : {1, 2}) {
      const std::string address = format("127.{}.0.{}", net, o.rank + 1);
      nics.push_back(
          {format("lo{}", net), *driver::parse_ip_address(address), 16, net == 1 ? first_rate : second_rate});
    }
    return std::move(*Mesh::listen(o, nics));
  };
  auto mesh_a = two_nics(a), mesh_b = two_nics(b);
  const Result<Fd> silent = driver::listen_at(*driver::parse_ip_address("127.1.0.1"));
  std::vector<Nic> seen = nics_of(*mesh_a);
  seen[0].address = *driver::local_address(silent->get());
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  std::thread other([&] { got_a = mesh_a->connect({{1, nics_of(*mesh_b)}}); });
  const auto got_b = mesh_b->connect({{0, seen}});
  other.join();
  ASSERT_TRUE(got_a.ok()) << got_a.status().message();
  ASSERT_TRUE(got_b.ok()) << got_b.status().message();
  EXPECT_EQ((*got_b)[0].streams.size(), 1u);
  EXPECT_EQ((*got_b)[0].mbit_per_s, second_rate);
  EXPECT_EQ((*got_a)[0].mbit_per_s, 0) << "only the side that connects knows the rails";
  EXPECT_GT(a.deadline.remaining_ms(), 4'000);
}

TEST(TcpMesh, ASilentRailIsGivenUpInTime) { give_up_the_first_rail(10'000, 10'000); }

TEST(TcpMesh, ASlowRailServesWhereTheFastOneIsSilent) { give_up_the_first_rail(40'000, 1'000); }

// Set before the connection exists, because it would stay paced otherwise.
TEST(TcpMesh, BothEndsHaveTheCongestionControlThatIsAskedFor) {
  for (const char* asked : {"reno", "system", "pigeons"}) {
    MeshOptions a = options_of(0), b = options_of(1);
    a.congestion = b.congestion = asked;
    Result<std::unique_ptr<Mesh>> mesh_a = Mesh::listen(a, {{"lo", *driver::parse_ip_address("127.0.0.1"), 8, 0}});
    if (std::string_view(asked) == "pigeons") {
      ASSERT_FALSE(mesh_a.ok());
      EXPECT_NE(mesh_a.status().message().find("MOECCL_SOCKET_CONGESTION"), std::string::npos);
      continue;
    }
    ASSERT_TRUE(mesh_a.ok()) << mesh_a.status().message();
    auto mesh_b = listen(b);
    const Result<Fd> plain = driver::listen_at(*driver::parse_ip_address("127.0.0.1"));
    const std::string system = driver::congestion_control(plain->get()).value();
    Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
    std::thread other([&] { got_a = (*mesh_a)->connect({{1, nics_of(*mesh_b)}}); });
    const auto got_b = mesh_b->connect({{0, nics_of(**mesh_a)}});
    other.join();
    ASSERT_TRUE(got_a.ok()) << got_a.status().message();
    ASSERT_TRUE(got_b.ok()) << got_b.status().message();
    const std::string expected = std::string_view(asked) == "system" ? system : asked;
    EXPECT_EQ(driver::congestion_control((*got_a)[0].streams[0].fd()).value(), expected);
    EXPECT_EQ(driver::congestion_control((*got_b)[0].streams[0].fd()).value(), expected);
  }
}

TEST(TcpMesh, AWrongKeyIsRefusedAndTheMissingRankNamed) {
  MeshOptions a = options_of(0), b = options_of(1);
  a.deadline = b.deadline = Deadline::after_ms(500);
  b.key[9] = std::byte{3};
  auto mesh_a = listen(a), mesh_b = listen(b);
  Result<std::vector<TcpPeer>> got_a = error(moecclInternalError, "not run");
  std::thread other([&] { got_a = mesh_a->connect({{1, nics_of(*mesh_b)}}); });
  const auto got_b = mesh_b->connect({{0, nics_of(*mesh_a)}});
  other.join();
  EXPECT_FALSE(got_b.ok());
  ASSERT_FALSE(got_a.ok());
  EXPECT_EQ(got_a.status().code(), moecclTimeout);
  const std::string& why = got_a.status().message();
  const std::string from = "from rank 1 at " + mesh_a->nics()[0].address.str() + ":";
  EXPECT_NE(why.find(from), std::string::npos) << why;
  EXPECT_NE(why.find("MOECCL_PORT_RANGE"), std::string::npos) << why;
}

// Rank 0 with a link, and the bytes that its authenticated peer writes to it by hand.
struct Victim {
  static constexpr size_t kStaging = 4096, kGuard = 4096;
  Board board{};
  std::vector<SignalLine> signals{2 * kSigsPerPeer};
  BlockWord blocks[2][2]{};
  std::vector<std::byte> memory{kStaging + 2 * kGuard, std::byte{0xee}};
  std::unique_ptr<TcpLink> link;
  std::unique_ptr<TcpEngine> engine;
  std::vector<TcpPeer> attacker;

  explicit Victim(int streams) {
    MeshOptions a = options_of(0), b = options_of(1);
    a.streams_per_rail = b.streams_per_rail = streams;
    auto mesh_a = listen(a), mesh_b = listen(b);
    std::vector<TcpPeer> peers;
    std::thread other([&] { peers = std::move(*mesh_a->connect({{1, nics_of(*mesh_b)}})); });
    attacker = std::move(*mesh_b->connect({{0, nics_of(*mesh_a)}}));
    other.join();
    LocalMemory m;
    m.board = &board;
    m.signals = signals.data();
    m.blocks[0] = blocks[0];
    m.blocks[1] = blocks[1];
    m.staging = memory.data() + kGuard;
    m.staging_bytes = kStaging;
    engine = std::move(*TcpEngine::create());
    link = std::move(*engine->add(m, std::move(peers[0])));
  }
  ~Victim() { engine.reset(); }
  void send(size_t stream, const void* bytes, size_t n) {
    const auto* at = static_cast<const std::byte*>(bytes);
    (void)driver::send_all(attacker[0].streams[stream].fd(), {at, n}, Deadline::after_ms(5000));
  }
  bool lost() {
    for (const Deadline d = Deadline::after_ms(10'000); !d.passed();) {
      engine->progress();
      if (!link->check_peer().ok()) return true;
      std::this_thread::yield();
    }
    return false;
  }
  void expect_untouched() const {
    for (size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(memory[i], std::byte{0xee}) << i;
      ASSERT_EQ(memory[kGuard + kStaging + i], std::byte{0xee}) << i;
    }
  }
};

TEST(TcpFrames, ThatLieLoseTheLinkAndTouchNothingOutside) {
  struct Lie {
    const char* what;
    FrameHead head;
    size_t stream;
  };
  const auto type = [](FrameType t) { return static_cast<uint8_t>(t); };
  const Lie lies[] = {
      {"a put that ends outside", {type(FrameType::kPut), 0, 0, 100, Victim::kStaging - 99}, 0},
      {"a put that begins outside", {type(FrameType::kPut), 0, 0, 1, Victim::kStaging}, 0},
      {"a put far outside", {type(FrameType::kPut), 0, 0, 0xffffffff, ~uint64_t{0} - 10}, 0},
      {"a put before the staging", {type(FrameType::kPut), 0, 0, 64, ~uint64_t{0} - 63}, 0},
      {"an empty put", {type(FrameType::kPut), 0, 0, 0, 0}, 0},
      {"a frame without a type", {0, 0, 0, 16, 0}, 0},
      {"a frame of another type", {9, 0, 0, 16, 0}, 0},
      {"signals without marks", {type(FrameType::kSignals), 1, 0, 16, 0}, 0},
      {"too many signals", {type(FrameType::kSignals), 255, 0, 600, 0}, 0},
      {"a long small frame", {type(FrameType::kBoard), 0, 0, 1 << 20, 0}, 0},
      {"too many entries", {type(FrameType::kBoard), 5, 0, 8 + 5 * sizeof(WireEntry), 0}, 0},
      {"health that is not there", {type(FrameType::kBoard), 0, kHealth, 8, 0}, 0},
      {"a board on another stream", {type(FrameType::kBoard), 0, 0, 8, 0}, 1},
  };
  for (const Lie& lie : lies) {
    Victim v(2);
    v.send(lie.stream, &lie.head, sizeof(lie.head));
    const std::vector<std::byte> zeros(1024);
    v.send(lie.stream, zeros.data(), zeros.size());
    EXPECT_TRUE(v.lost()) << lie.what;
    v.expect_untouched();
  }
}

TEST(TcpFrames, OfUnknownSignalsAndFalseMarksLoseTheLink) {
  for (const auto& [mark, sig] : {std::pair<uint64_t, uint64_t>{0, kSigsPerPeer}, {0, ~uint64_t{0}}, {1, 0}}) {
    Victim v(1);
    const FrameHead head{static_cast<uint8_t>(FrameType::kSignals), 1, 0, 24, 0};
    const WireSignal signal{sig, 1};
    v.send(0, &head, sizeof(head));
    v.send(0, &mark, sizeof(mark));
    v.send(0, &signal, sizeof(signal));
    EXPECT_TRUE(v.lost()) << mark << " " << sig;
  }
}

// The rest of the put would come when the memory is the program's again. `first_ends`: or it never comes, because the
// connection has ended before this rank looks.
void signal_in_front_of_its_put(bool first_ends) {
  constexpr size_t kBytes = 1000, kFirst = 10;
  Victim v(1);
  std::vector<std::byte> dst(kBytes);
  v.link->landings()->land(0, kBytes, dst.data());
  const FrameHead signals{static_cast<uint8_t>(FrameType::kSignals), 1, 0, 24, 0};
  const FrameHead put{static_cast<uint8_t>(FrameType::kPut), 0, 0, kBytes, 0};
  const uint64_t mark = 0;
  const WireSignal signal{2, 7};
  const std::vector<std::byte> data(kBytes, std::byte{0x55});
  v.send(0, &signals, sizeof(signals));
  v.send(0, &mark, sizeof(mark));
  v.send(0, &signal, sizeof(signal));
  v.send(0, &put, sizeof(put));
  v.send(0, data.data(), kFirst);
  const SignalLine& line = v.signals[kSigsPerPeer + signal.sig];
  for (const Deadline d = Deadline::after_ms(10'000); !d.passed();) {
    v.engine->progress();
    if (line.word.load() == signal.word && dst[kFirst - 1] == std::byte{0x55}) break;
  }
  ASSERT_EQ(line.word.load(), signal.word);
  ASSERT_EQ(dst[kFirst - 1], std::byte{0x55});
  if (first_ends) {
    v.attacker.clear();
    EXPECT_TRUE(v.lost());
  }
  const Result<bool> landed = v.link->landings()->landed(0);
  ASSERT_FALSE(landed.ok()) << "only a part of the put has come";
  EXPECT_EQ(landed.status().code(), moecclRemoteError);
  EXPECT_NE(landed.status().message().find("rank 1"), std::string::npos) << landed.status().message();
  if (!first_ends) v.send(0, data.data(), kBytes - kFirst);
  EXPECT_TRUE(v.lost());
  EXPECT_TRUE(std::all_of(dst.begin() + kFirst, dst.end(), [](std::byte b) { return b == std::byte{0}; }));
  v.expect_untouched();
}

TEST(TcpFrames, ASignalInFrontOfItsPutLeavesTheDestinationAlone) { signal_in_front_of_its_put(false); }
TEST(TcpFrames, ASignalInFrontOfAPutThatNeverEndsIsAnError) { signal_in_front_of_its_put(true); }

// The engine's lock is held meanwhile, and no timeout of an operation is looked at.
TEST(TcpFrames, ThatGoOnBesideAStreamThatHasEndedDoNotHoldUpTheRank) {
  Victim v(2);
  std::vector<std::byte> many;
  const FrameHead put{static_cast<uint8_t>(FrameType::kPut), 0, 0, 1, 0};
  const auto head = std::as_bytes(std::span(&put, 1));
  while (many.size() < 256 << 10) {
    many.insert(many.end(), head.begin(), head.end());
    many.push_back(std::byte{0});
  }
  std::atomic<bool> enough = false, given_up = false;
  std::thread flood([&] {
    const Deadline end = Deadline::after_ms(tests::patient_ms(8000));
    while (!enough && !end.passed()) v.send(0, many.data(), many.size());
    given_up = !enough;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  v.send(1, &put, sizeof(put) / 2);
  EXPECT_EQ(::shutdown(v.attacker[0].streams[1].fd(), SHUT_WR), 0);
  EXPECT_TRUE(v.lost());
  EXPECT_FALSE(given_up);
  enough = true;
  v.engine.reset();  // the flood would wait for a reader
  flood.join();
}

TEST(TcpFrames, RandomBytesNeverReachOutside) {
  std::mt19937_64 random(testing::test_seed());
  for (int round = testing::scaled(40); round > 0; --round) {
    Victim v(1);
    std::vector<std::byte> bytes(64 + random() % 4000);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    // Usually a type that exists, so that more than the first check is reached.
    bytes[0] = static_cast<std::byte>(random() % 5);
    if (random() % 2 == 0) std::memset(bytes.data() + 2, 0, 14 - random() % 10);
    v.send(0, bytes.data(), bytes.size());
    v.attacker.clear();
    EXPECT_TRUE(v.lost());
    v.expect_untouched();
  }
}

}  // namespace
}  // namespace moeccl::transport::tcp
