// SPDX-License-Identifier: Apache-2.0
// What ranks of different builds would read in each other's bytes: the words of shared memory, frames, and encoded
// examples of what ranks tell each other. Handshakes compare only kProtocolVersion, so a change of any of these has to
// raise it. Not covered: structures of one source file, such as the greetings of MoE layers.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>

#include "kernels/codec.h"
#include "kernels/cuda/walk_args.h"
#include "src/base/format.h"
#include "src/base/hash.h"
#include "src/base/hex.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "src/exec/message.h"
#include "src/routing/routing.h"
#include "src/world/gpu_introduction.h"
#include "src/world/introduction.h"
#include "transport/common/board_wire.h"
#include "transport/netplugin/connecting.h"
#include "transport/netplugin/wire.h"
#include "transport/shm/segment.h"
#include "transport/tcp/record.h"
#include "transport/tcp/wire.h"
#include "transport/verbs/offer.h"

namespace moeccl {
namespace {

// Each protocol's layout, as the hash of layout(). Never change a row that has been on the main branch: raise
// kProtocolVersion and add one.
constexpr struct {
  uint16_t protocol;
  uint64_t hash;
} kLayouts[] = {
    {9, 0xce9e45c5868b5f36},
    {10, 0x68ef87512186e755},
    {11, 0x68ef87512186e755},  // another order of rounds
    {12, 0x2f58ceb46446bf51},
};

using bootstrap::Key;

// Bytes that differ from their neighbours, so that fields of one size cannot change places unseen.
template <class T>
T sample(unsigned first) {
  std::array<std::byte, sizeof(T)> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(first + i);
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

class Layout {
 public:
  void number(const char* name, uint64_t value) { text_ += format("{} {}\n", name, value); }
  void bytes(const char* name, std::span<const std::byte> example) { text_ += format("{} {}\n", name, hex(example)); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

#define SIZE(T) l.number("sizeof " #T, sizeof(T))
#define FIELD(T, f) \
  l.number(#T "." #f " at", offsetof(T, f)), l.number(#T "." #f " size", sizeof(static_cast<const T*>(nullptr)->f))

void words(Layout& l) {
  using namespace transport;
  SIZE(SignalLine), FIELD(SignalLine, word), FIELD(SignalLine, reserved), FIELD(SignalLine, visible_ns);
  SIZE(Entry), FIELD(Entry, seq), FIELD(Entry, signature), FIELD(Entry, count), FIELD(Entry, plan);
  FIELD(Entry, input), FIELD(Entry, output), FIELD(Entry, max_block), FIELD(Entry, history);
  SIZE(BlockWord), FIELD(BlockWord, count), FIELD(BlockWord, displacement), FIELD(BlockWord, expects);
  SIZE(Outbox), FIELD(Outbox, word), FIELD(Outbox, data);
  SIZE(UplinkWords), FIELD(UplinkWords, free_ns), FIELD(UplinkWords, claim_ns), FIELD(UplinkWords, owed_ns);
  SIZE(PaceWords), FIELD(PaceWords, egress), FIELD(PaceWords, ingress), FIELD(PaceWords, shared);
  SIZE(Board), FIELD(Board, progress.completed), FIELD(Board, progress.uses_buffers_of_operation);
  FIELD(Board, progress.reads_message_of), FIELD(Board, progress.walks_called), FIELD(Board, progress.walked);
  FIELD(Board, progress.core), FIELD(Board, progress.closed), FIELD(Board, progress.histories);
  FIELD(Board, walks.ns), FIELD(Board, health.state), FIELD(Board, health.code), FIELD(Board, health.text);
  FIELD(Board, entries);
  l.number("kSigsPerPeer", kSigsPerPeer);
  for (const RankState state : {RankState::kRunning, RankState::kLeft, RankState::kAborted, RankState::kFailed})
    l.number("RankState", static_cast<uint32_t>(state));
  using exec::MessageSlotHeader;
  SIZE(MessageSlotHeader), FIELD(MessageSlotHeader, bytes), FIELD(MessageSlotHeader, place);
  FIELD(MessageSlotHeader, kind), FIELD(MessageSlotHeader, type);
  l.number("kinds of messages", exec::kChunks | exec::kAddress << 8 | exec::kHeapOffset << 16);

  const auto segment =
      shm::Segment::create({.n_ranks = 3, .rank = 1, .staging_bytes = 1 << 20, .message_bytes = 1 << 16}, false);
  ASSERT_TRUE(segment.ok()) << segment.status().message();
  const shm::Segment& s = **segment;
  const auto at = [&](const char* name, const void* part) {
    l.number(name, static_cast<uint64_t>(static_cast<const std::byte*>(part) - s.base()));
  };
  l.bytes("segment, magic", {s.base(), 8});
  at("segment, board", &s.board()), at("segment, signal", &s.signal(2, 3)), at("segment, blocks", s.blocks(1));
  at("segment, outbox", s.outbox(1)), at("segment, pace", &s.pace(1)), at("segment, staging", s.staging());
  at("segment, message", s.message(2, 1)), l.number("segment, bytes", s.bytes());
}

void device_words(Layout& l) {
  using kernels::CodecHeader;
  SIZE(CodecHeader), FIELD(CodecHeader, magic), FIELD(CodecHeader, type), FIELD(CodecHeader, count);
  FIELD(CodecHeader, ratio);
  l.number("kCodecMagic", kernels::kCodecMagic), l.number("kCodecBlock", kernels::kCodecBlock);
  using cuda::WalkHeader, cuda::WalkEntry;
  SIZE(WalkHeader), FIELD(WalkHeader, seq), FIELD(WalkHeader, history), FIELD(WalkHeader, failed);
  FIELD(WalkHeader, entries);
  SIZE(WalkEntry), FIELD(WalkEntry, seq), FIELD(WalkEntry, history), FIELD(WalkEntry, signature);
  FIELD(WalkEntry, count), FIELD(WalkEntry, plan), FIELD(WalkEntry, input), FIELD(WalkEntry, output);
  FIELD(WalkEntry, largest);
  l.number("kWalkSigs", cuda::kWalkSigs), l.number("kWalkEntries", cuda::kWalkEntries);
}

void frames(Layout& l) {
  using namespace transport;
  SIZE(WireEntry), FIELD(WireEntry, seq), FIELD(WireEntry, signature), FIELD(WireEntry, count);
  FIELD(WireEntry, plan), FIELD(WireEntry, input), FIELD(WireEntry, output), FIELD(WireEntry, max_block);
  FIELD(WireEntry, history), FIELD(WireEntry, block_count), FIELD(WireEntry, block_displacement);
  FIELD(WireEntry, block_expects);
  SIZE(WireHealth), FIELD(WireHealth, state), FIELD(WireHealth, code), FIELD(WireHealth, text);
  SIZE(WireSignal), FIELD(WireSignal, sig), FIELD(WireSignal, word);
  SIZE(tcp::FrameHead), FIELD(tcp::FrameHead, type), FIELD(tcp::FrameHead, n), FIELD(tcp::FrameHead, parts);
  FIELD(tcp::FrameHead, bytes), FIELD(tcp::FrameHead, offset);
  for (const tcp::FrameType t : {tcp::FrameType::kPut, tcp::FrameType::kSignals, tcp::FrameType::kBoard})
    l.number("tcp::FrameType", static_cast<uint8_t>(t));
  l.number("tcp::kHealth", tcp::kHealth);
  SIZE(tcp::StreamGreeting), FIELD(tcp::StreamGreeting, wire_version), FIELD(tcp::StreamGreeting, stream);
  FIELD(tcp::StreamGreeting, n_streams), FIELD(tcp::StreamGreeting, cipher);
  FIELD(tcp::StreamGreeting, mbit_per_s);
  l.number("tcp::kGreetingType", tcp::kGreetingType), l.number("tcp::kWelcomeType", tcp::kWelcomeType);
  tcp::RecordSealer sealer(tcp::Cipher::kChaCha20Poly1305, sample<Key>(1));
  const auto text = sample<std::array<std::byte, 8>>(40);
  std::vector<std::byte> record(text.size() + tcp::kRecordOverhead);
  for (int i = 0; i < 2; ++i) sealer.seal(text, record.data()), l.bytes("record", record);
  using netplugin::MessageHead, netplugin::Proof;
  SIZE(MessageHead), FIELD(MessageHead, bytes), FIELD(MessageHead, number), FIELD(MessageHead, taken);
  SIZE(netplugin::FrameHead), FIELD(netplugin::FrameHead, type), FIELD(netplugin::FrameHead, n);
  FIELD(netplugin::FrameHead, rail), FIELD(netplugin::FrameHead, health), FIELD(netplugin::FrameHead, bytes);
  FIELD(netplugin::FrameHead, offset);
  using enum netplugin::FrameType;
  for (const netplugin::FrameType t : {kPut, kPiece, kSignals, kBoard, kBye, kSeen})
    l.number("netplugin::FrameType", static_cast<uint8_t>(t));
  SIZE(Proof), FIELD(Proof, magic), FIELD(Proof, version), FIELD(Proof, from), FIELD(Proof, to);
  FIELD(Proof, comm), FIELD(Proof, mac);
  l.bytes("mac of a proof", netplugin::proof_of(sample<Key>(1), sample<Key>(2), 3, 4, 5));
  l.number("kBuffers", netplugin::kBuffers), l.number("kMessageBytes", netplugin::kMessageBytes);
}

void bootstrap_frames(Layout& l) {
  using namespace bootstrap;
  const Key key = sample<Key>(1);
  const Party client{.role = Role::kMember, .rank = 3, .n_ranks = 5, .library_version = 7, .protocol = 0};
  const Party root{.role = Role::kRoot, .rank = 0, .n_ranks = 5, .library_version = 7, .protocol = 0};
  ClientHandshake asks(key, client, sample<Nonce>(50));
  ServerHandshake answers(key, root, sample<Nonce>(90));
  l.bytes("hello", asks.hello());
  const auto challenge = answers.on_hello(asks.hello(), Role::kMember);
  l.bytes("challenge", challenge.reply);
  const auto proof = asks.answer(challenge.reply, Role::kRoot);
  ASSERT_TRUE(proof.ok()) << proof.status().message();
  l.bytes("proof", *proof);
  l.bytes("key of a session", asks.result().keys.send);
  SealedPayload payload({std::byte{1}, std::byte{2}, std::byte{3}}, sample<Key>(20));
  l.bytes("payload", payload.bytes), l.bytes("control head", Sealer(key).seal(payload.head(0x1122, 0x33)));

  for (const MessageType t : {kJoin, kGather, kBarrier, kFds, kRows, kGone, kLeave, kAbandon, kDone, kFdsOf, kFailed})
    l.number("MessageType", t);
  l.bytes("failure", encode_failure(Status(moecclRemoteError, "why")));
  l.bytes("numbers", encode_numbers(std::vector<uint32_t>{0x01020304, 5}));
  Peer peer;
  peer.pid = 0x11223344, peer.uid = 0x55667788, peer.over_unix = true;
  Peer other;
  other.with_root = true;
  l.bytes("peers", encode_peers(std::vector{peer, other}));
  l.bytes("blobs", encode_blobs(std::vector<std::vector<std::byte>>{{std::byte{9}}, {}}));
  l.bytes("ranks", encode_ranks({true, false, false, true, false, false, false, false, true}));
}

void introductions(Layout& l) {
  comm::Introduction i;
  i.host = 0x0102030405060708, i.process = 0x1112131415161718, i.network = 0x2122232425262728, i.host_name = "host";
  i.pid = 0x31323334, i.heap_bytes = 0x4142434445464748, i.cores[0] = 0x5152535455565758;
  i.stamp.address = 0x6162636465666768, i.stamp.value = 0x7172737475767778, i.cpu_quota = 0x01828384;
  i.has_profile = true, i.calibrate_ms = 0x0192939495969798, i.trials = false, i.encrypt = true;
  i.config.deterministic = true, i.config.priority = 5, i.config.graph_mixing = true;
  i.config.staging_bytes = 0x0203040506070809, i.config.topology = "node:2", i.config.plan = "allreduce:ring";
  l.bytes("Introduction", i.encode());
  comm::GpuIntroduction g;
  g.asked = true, g.mps = false, g.pci = "0000:1b:00.0", g.uuid = sample<driver::cuda::Uuid>(1);
  g.staging = {.way = comm::StagingOffer::kByHandle,
               .device = 0x01020304,
               .address = 0x1112131415161718,
               .mapped = 0x2122232425262728,
               .slot = 0x3132333435363738,
               .handle = sample<driver::cuda::IpcHandle>(60)};
  g.answer.able = true, g.answer.kernel_staging = 0x4142434445464748, g.answer.why = "why";
  l.bytes("GpuIntroduction, by handle", g.encode());
  g.staging.way = comm::StagingOffer::kByDescriptor;
  l.bytes("GpuIntroduction, by descriptor", g.encode());
  l.bytes("GpuAnswer", g.answer.encode());
}

void offers(Layout& l) {
  using namespace transport;
  verbs::Offer v;
  v.n_queues = 2, v.ordered = false;
  v.memory = {.staging = 0x0102030405060708,
              .staging_bytes = 0x1112131415161718,
              .signals = 0x2122232425262728,
              .copy = 0x3132333435363738,
              .records = 0x4142434445464748,
              .device = 0x5152535455565758,
              .device_bytes = 1};
  verbs::OfferedRail& rail = v.rails.emplace_back();
  rail.info.device = "mlx5_0", rail.info.port = 2, rail.info.ethernet = true, rail.info.mtu_code = 4;
  rail.info.gid.kind = verbs::GidKind::kRoceV2, rail.info.lid = 0x0506, rail.info.gbit = 100;
  for (size_t i = 0; i < sizeof(rail.info.gid.gid.raw); ++i) rail.info.gid.gid.raw[i] = static_cast<uint8_t>(i);
  rail.keys = {
      .staging = 0x01020304, .signals = 0x11121314, .copy = 0x21222324, .records = 0x31323334, .device = {0x41424344}};
  l.bytes("verbs offer", verbs::write_offer(v));
  l.bytes("verbs row",
          verbs::write_row(std::vector<verbs::QueueAddress>{{.number = 0x010203, .first_packet = 0x1112}}));
  SIZE(verbs::PutRecord), FIELD(verbs::PutRecord, offset), FIELD(verbs::PutRecord, bytes);
  SIZE(verbs::PeerCopy), FIELD(verbs::PeerCopy, board), FIELD(verbs::PeerCopy, blocks);
  FIELD(verbs::PeerCopy, n_puts);
  l.number("verbs::kPutRecords", verbs::kPutRecords);
  netplugin::Offer p;
  p.plugin = "Socket", p.presence = "10.0.0.1:4711", p.mbit_per_s = 0x0102030405060708, p.pieces_only = true,
  p.nonce = sample<Key>(1);
  p.rails = {1.5, 2.5};
  l.bytes("net plugin's offer", p.write());
  l.number("net plugin's handle", sizeof(netplugin::Handle));
}

void routing_records(Layout& l) {
  const size_t n = algo::message_words(3, 5, 2);
  l.number("words of routing records", n);
  std::vector<uint32_t> message(n);
  message[0] = 3, message[1] = 5, message[2] = 2;
  const auto view = algo::read_records(message.data(), n * sizeof(uint32_t), true);
  ASSERT_TRUE(view.ok()) << view.status().message();
  const auto at = [&](const char* name, const void* part) {
    l.number(name, static_cast<uint64_t>(static_cast<const std::byte*>(part) -
                                         reinterpret_cast<const std::byte*>(message.data())));
  };
  at("routing, token", view->token), at("routing, n_experts", view->n_experts), at("routing, expert", view->expert);
  at("routing, weight", view->weight);
}

std::string layout() {
  Layout l;
  words(l), device_words(l), frames(l), bootstrap_frames(l), introductions(l), offers(l), routing_records(l);
  return l.text();
}

TEST(WireLayout, ChangesOnlyWithTheProtocolsNumber) {
  const std::string text = layout();
  const uint64_t hash = hash_string(text);
  const auto& last = kLayouts[std::size(kLayouts) - 1];
  ASSERT_EQ(last.protocol, bootstrap::kProtocolVersion)
      << "add {" << bootstrap::kProtocolVersion << ", " << format("0x{:016x}", hash) << "} to kLayouts";
  EXPECT_EQ(last.hash, hash) << "ranks of this build and of earlier ones of protocol " << last.protocol
                             << " would run on each other's bytes: raise kProtocolVersion (src/bootstrap/handshake.h) "
                                "and add {"
                             << last.protocol + 1 << ", " << format("0x{:016x}", hash)
                             << "} to kLayouts, unless the last row is yours. The layout of this build:\n"
                             << text;
}

}  // namespace
}  // namespace moeccl
