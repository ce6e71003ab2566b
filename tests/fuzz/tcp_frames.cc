// SPDX-License-Identifier: Apache-2.0
// Frames of a peer whose connections are not encrypted, on one to three streams and in pieces of any size. Whatever
// arrives, nothing outside of the staging and of the peer's own signals is written.
#include "transport/tcp/tcp_engine.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/fuzz/fuzz.h"

using namespace moeccl;
using namespace moeccl::transport;
using namespace moeccl::transport::tcp;

namespace {

constexpr size_t kStaging = 512, kGuard = 512;
constexpr std::byte kUntouched{0xee};
constexpr uint32_t kRanks = 3, kSelf = 0, kPeer = 1;

struct Victim : Arrivals {
  Board board{};
  std::vector<SignalLine> signals{size_t{kRanks} * kSigsPerPeer};
  BlockWord blocks[2][kRanks]{};
  std::vector<std::byte> memory{kStaging + 2 * kGuard, kUntouched};
  std::vector<Fd> far;
  std::unique_ptr<TcpLink> link;
  std::unique_ptr<TcpEngine> engine;

  bool make(size_t n_streams) {
    TcpPeer peer;
    peer.rank = kPeer;
    for (size_t i = 0; i < n_streams; ++i) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) return false;
      far.emplace_back(ends[0]);
      peer.streams.emplace_back(Fd(ends[1]), 1.0);
    }
    LocalMemory m;
    m.rank = kSelf;
    m.board = &board;
    m.signals = signals.data();
    m.blocks[0] = blocks[0];
    m.blocks[1] = blocks[1];
    m.staging = memory.data() + kGuard;
    m.staging_bytes = kStaging;
    m.arrivals = this;
    auto made = TcpEngine::create();
    if (!made.ok()) return false;
    engine = std::move(*made);
    auto added = engine->add(m, std::move(peer));
    if (!added.ok()) return false;
    link = std::move(*added);
    return true;
  }
  ~Victim() { engine.reset(); }

  bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) override {
    FUZZ_CHECK(src_rank == kPeer && bytes > 0 && offset <= kStaging && bytes <= kStaging - offset);
    return true;
  }

  void check() const {
    const auto untouched = [](std::byte b) { return b == kUntouched; };
    FUZZ_CHECK(std::all_of(memory.begin(), memory.begin() + kGuard, untouched));
    FUZZ_CHECK(std::all_of(memory.end() - kGuard, memory.end(), untouched));
    for (uint32_t r = 0; r < kRanks; ++r)
      for (uint32_t s = 0; s < kSigsPerPeer && r != kPeer; ++s)
        FUZZ_CHECK(signals[r * kSigsPerPeer + s].word.load() == 0);
  }
};

}  // namespace

// Input: the number of streams, then pieces: a byte with the stream and flags, a byte that is its size, and its bytes.
// A head whose type and sizes fit is rare among random bytes, so flags ask for one before the piece.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t n_streams = 1 + data[0] % 3;
  Victim v;
  if (!v.make(n_streams)) return 0;
  const auto pass = [&](size_t stream, const void* bytes, size_t n) {
    (void)!send(v.far[stream].get(), bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  for (size_t at = 1; at + 1 < size && v.link->check_peer().ok();) {
    const uint8_t how = data[at];
    const size_t stream = how % n_streams, n = std::min<size_t>(data[at + 1], size - at - 2);
    const std::span<const uint8_t> piece(data + at + 2, n);
    at += 2 + n;
    if ((how & 0x30) == 0x10 && n > 0) {
      const FrameHead head{static_cast<uint8_t>(FrameType::kPut), 0, 0, static_cast<uint32_t>(n), piece[0]};
      pass(stream, &head, sizeof(head));
    } else if ((how & 0x30) == 0x20) {
      const auto type = (how & 0x40) != 0 ? FrameType::kSignals : FrameType::kBoard;
      const FrameHead head{static_cast<uint8_t>(type), static_cast<uint8_t>(how >> 2 & 3),
                           (how & 0x80) != 0 ? kHealth : uint16_t{0}, static_cast<uint32_t>(n), 0};
      pass(stream, &head, sizeof(head));
    }
    pass(stream, piece.data(), n);
    if ((how & 8) != 0 || stream > 0) v.engine->progress();
    v.check();
  }
  v.far.clear();
  for (int turn = 0; turn < 100 && v.link->check_peer().ok(); ++turn) v.engine->progress();
  FUZZ_CHECK(!v.link->check_peer().ok());
  v.check();
  return 0;
}
