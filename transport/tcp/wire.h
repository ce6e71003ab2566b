// SPDX-License-Identifier: Apache-2.0
// Frames between two ranks after the handshake; encrypted connections carry them in records (record.h). All numbers are
// little-endian. A frame is a head followed by its payload:
//
//   put      `bytes` bytes for `offset` of the receiver's staging; on any stream
//   signals  for each stream u64: put bytes that went before, then n times {sig u64, word u64}; on stream 0
//   board    what BoardNews writes (common/board_wire.h), with n entries and, with kHealth, a state; on stream 0
//
// What a frame announces is checked against the receiver's own bounds before a byte of it is used.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "transport/common/board_wire.h"
#include "transport/transport.h"

namespace moeccl::transport::tcp {

static_assert(std::endian::native == std::endian::little, "frames are copied as they are");

inline constexpr uint32_t kMaxStreams = 16;  // to one peer, over all interfaces
inline constexpr uint16_t kWireVersion = 3;

enum class FrameType : uint8_t { kPut = 1, kSignals = 2, kBoard = 3 };
inline constexpr uint16_t kHealth = 1;  // FrameHead::parts

struct FrameHead {
  uint8_t type;
  uint8_t n;
  uint16_t parts;
  uint32_t bytes;  // of the payload
  uint64_t offset;
};
static_assert(sizeof(FrameHead) == 16);

inline constexpr size_t kMaxPutBytes = size_t{1} << 30;  // of one frame; longer puts are several
inline constexpr size_t kMaxSmallFrame = sizeof(FrameHead) + kMaxBoardBytes + kMaxStreams * 8;
static_assert(kMaxSmallFrame >= sizeof(FrameHead) + kMaxStreams * 8 + kSigsPerPeer * sizeof(WireSignal));

// What a client sends on each of its connections once it is authenticated, in a sealed control frame.
struct StreamGreeting {
  uint16_t wire_version;
  uint16_t stream, n_streams;
  uint16_t cipher;      // the client's best (record.h); 0: what follows is not encrypted
  uint64_t mbit_per_s;  // of the slower of the two interfaces
};
static_assert(sizeof(StreamGreeting) == 16);
inline constexpr uint16_t kGreetingType = 32;  // of the control frame
// The type of the server's answer, a control frame without payload, to which the cipher of the data is added.
inline constexpr uint16_t kWelcomeType = 33;

}  // namespace moeccl::transport::tcp
