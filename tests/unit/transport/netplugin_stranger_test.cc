// SPDX-License-Identifier: Apache-2.0
// A peer that holds the key but lies: its announcements are checked against this rank's own limits.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/support/fake_nets.h"
#include "tests/support/timing.h"
#include "transport/netplugin/connecting.h"
#include "transport/netplugin/plugin_network.h"
#include "transport/shm/segment.h"

namespace moeccl::tests {
namespace {

using namespace transport::netplugin;

constexpr uint64_t kStaging = 1 << 20;

struct Lie {
  const char* what;
  const char* says;  // part of the sentence of check_peer()
  MessageHead head;
  std::vector<std::byte> frames;
  std::vector<std::byte> piece = {};  // sent on the rail after it
  bool twice = false;
};

std::vector<std::byte> frame(FrameHead head, size_t payload = 0) {
  std::vector<std::byte> out(sizeof(head) + payload, std::byte{0xff});
  std::memcpy(out.data(), &head, sizeof(head));
  return out;
}
constexpr uint8_t type(FrameType t) { return static_cast<uint8_t>(t); }

std::vector<Lie> lies() {
  std::vector<Lie> all;
  const auto add = [&](const char* what, const char* says, std::vector<std::byte> frames) -> Lie& {
    all.push_back({what, says, {static_cast<uint32_t>(frames.size()), 0, 0, 0}, std::move(frames)});
    return all.back();
  };
  const auto segment_end = 64u << 20;  // beyond any staging and message slots here
  add("a number that is not its turn", "a malformed message", frame({type(FrameType::kSeen), 0, 0, 0, 0, 0}))
      .head.number = 3;
  add("more bytes than a message has", "a malformed message", frame({type(FrameType::kSeen), 0, 0, 0, 0, 0}))
      .head.bytes = ~0u;
  add("another size than came", "a malformed message", frame({type(FrameType::kSeen), 0, 0, 0, 0, 0})).head.bytes = 8;
  add("half a head", "half a frame", std::vector<std::byte>(7));
  add("a payload beyond the message", "half a frame", frame({type(FrameType::kPut), 0, 0, 0, 4096, 0}, 8));
  add("no bytes", "a put outside of the staging", frame({type(FrameType::kPut), 0, 0, 0, 0, 0}));
  add("an offset beyond the staging", "a put outside of the staging",
      frame({type(FrameType::kPut), 0, 0, 0, 8, segment_end}, 8));
  add("an offset that wraps", "a put outside of the staging",
      frame({type(FrameType::kPut), 0, 0, 0, 8, ~uint64_t{3}}, 8));
  add("a piece beyond the staging", "a piece outside of the staging",
      frame({type(FrameType::kPiece), 0, 0, 0, 4096, segment_end}));
  add("a piece that is too large", "a piece outside of the staging",
      frame({type(FrameType::kPiece), 0, 0, 0, kPieceBytes + 1, 0}));
  add("a rail that is none", "a piece outside of the staging", frame({type(FrameType::kPiece), 0, 9, 0, 4096, 0}));
  add("a piece of another size", "a piece of another size", frame({type(FrameType::kPiece), 0, 0, 0, 4096, 0}))
      .piece.resize(100);
  add("a signal frame of another size", "a bad signal frame", frame({type(FrameType::kSignals), 3, 0, 0, 16, 0}, 16));
  add("a signal that is none", "a signal of an unknown number", frame({type(FrameType::kSignals), 1, 0, 0, 16, 0}, 16));
  add("more entries than a board has", "a bad board frame", frame({type(FrameType::kBoard), 200, 0, 0, 8, 0}, 8));
  add("a board of another size", "a bad board frame", frame({type(FrameType::kBoard), 1, 0, 1, 8, 0}, 8));
  add("a type that is none", "a frame of an unknown type", frame({77, 0, 0, 0, 0, 0}));
  add("a word after the last", "frames after its last one", frame({type(FrameType::kSeen), 0, 0, 0, 0, 0})).twice =
      true;
  return all;
}

class LyingPeer {
 public:
  LyingPeer(const FakeNet& fake, transport::shm::Segment& own) {
    transport::NetworkOptions o;
    o.host_of = {0, 1};
    o.key[0] = std::byte{42};
    o.deadline = Deadline::after_ms(patient_ms(20'000));
    auto honest = open_with(o, {fake.file()}, abi::kPtrHost);
    o.rank = 1;
    use_ = std::make_shared<PluginUse>(std::move(*use_plugin({fake.file()})));
    connecting_ = std::make_shared<Connecting>(use_, o);
    EXPECT_TRUE(honest.ok() && connecting_->listen().ok());
    const std::vector<std::vector<std::byte>> offers = {*(*honest)->offer(), connecting_->offer()};
    std::thread other([&] { comms_ = std::move((*connecting_->connect(offers))[0]); });
    links_ = std::move(*(*honest)->connect(own.memory(0), {}, offers));
    other.join();
  }
  ~LyingPeer() {
    links_.engine = nullptr;
    for (const PeerComms::Pair& p : comms_.pairs) {
      (void)use_->api().close_send(p.out);
      (void)use_->api().close_receive(p.in);
    }
  }
  void send(size_t comm, std::vector<std::byte>& message) {
    NetApi& api = use_->api();
    const Comm out = comms_.pairs[comm].out;
    const auto memory = api.register_memory(out, message.data(), message.size(), abi::kPtrHost);
    Request request = nullptr;
    while (request == nullptr) request = *api.send(out, message.data(), message.size(), memory.value());
    size_t bytes = 0;
    for (const Deadline d = Deadline::after_ms(patient_ms(10'000)); !d.passed();) {
      const Result<bool> done = api.test(request, &bytes);
      if (!done.ok() || done.value()) break;
    }
    EXPECT_TRUE(api.deregister(out, memory.value()).ok());
  }
  transport::Link& link() { return *links_.links[1]; }

 private:
  std::shared_ptr<PluginUse> use_;
  std::shared_ptr<Connecting> connecting_;
  PeerComms comms_;
  transport::NetworkLinks links_;
};

TEST(NetPluginStranger, LiesEndTheLinkAndWriteNothing) {
  const FakeNet fake("v12");
  fake.script("apart");
  for (Lie& lie : lies()) {
    SCOPED_TRACE(lie.what);
    const auto own = *transport::shm::Segment::create({2, 0, kStaging, 4096}, false);
    LyingPeer peer(fake, *own);
    std::vector<std::byte> message(sizeof(MessageHead));
    std::memcpy(message.data(), &lie.head, sizeof(lie.head));
    message.insert(message.end(), lie.frames.begin(), lie.frames.end());
    peer.send(0, message);
    if (lie.twice) {
      ++lie.head.number;
      std::memcpy(message.data(), &lie.head, sizeof(lie.head));
      peer.send(0, message);
    }
    if (!lie.piece.empty()) peer.send(1, lie.piece);
    Status s;
    for (const Deadline d = Deadline::after_ms(patient_ms(10'000)); s.ok() && !d.passed();)
      s = peer.link().check_peer();
    ASSERT_FALSE(s.ok());
    EXPECT_NE(s.message().find(lie.says), std::string::npos) << s.message();
    for (size_t i = 0; i < kStaging && lie.piece.empty(); ++i) ASSERT_EQ(own->staging()[i], std::byte{0}) << i;
  }
}

}  // namespace
}  // namespace moeccl::tests
