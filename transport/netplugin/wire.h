// SPDX-License-Identifier: Apache-2.0
// The messages that two ranks exchange through a net plugin, whose connections carry messages one way. In each
// direction there is one comm for messages of frames and one for each rail; each comm begins with a Proof.
//
// A message of frames is a MessageHead followed by frames; a frame is a FrameHead followed by its payload:
//
//   put      `bytes` bytes for `offset` of the receiver's staging
//   piece    the next message of rail `rail` is `bytes` bytes for `offset`; no payload
//   signals  n times {sig u64, word u64}; all puts and pieces before it count first; with n = 0 it only asks for an
//            answer
//   board    what BoardNews writes, with n entries and, with kHealth, a state
//   bye      the sender leaves; answered by
//   seen     everything before the bye has been taken
//
// A bye or a seen is the last frame of its sender. Its receiver posts no more receives, and the sender follows up with
// an empty message for each receive that is still posted (kBuffers - 1, because the message itself took one): a plugin
// may refuse to serve a whole process after a comm was closed with requests under way, as aws-ofi-nccl does.
//
// All numbers are little-endian. What a frame announces is checked against the receiver's own bounds before it is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/bootstrap/unique_id.h"
#include "transport/common/board_wire.h"
#include "transport/netplugin/loader.h"

namespace moeccl::transport::netplugin {

inline constexpr uint16_t kWireVersion = 4;

inline constexpr size_t kMessageBytes = 24 << 10;
inline constexpr uint32_t kBuffers = 8;  // receives that a rank keeps posted for messages of frames
// Up to this size a put travels in a frame: the copy at the receiver costs less than a second message.
inline constexpr size_t kInlinePut = 17 << 10;

struct MessageHead {
  uint32_t bytes;  // of the frames behind it; 0: the message only says what was taken
  uint32_t number;
  uint32_t taken;  // how many of the peer's messages were taken
  uint32_t reserved;
};

enum class FrameType : uint8_t { kPut = 1, kPiece = 2, kSignals = 3, kBoard = 4, kBye = 5, kSeen = 6 };
struct FrameHead {
  uint8_t type;
  uint8_t n;
  uint8_t rail;
  uint8_t health;
  uint32_t bytes;
  uint64_t offset;
};
static_assert(sizeof(FrameHead) == 16);
inline constexpr size_t kMaxSmallFrame = sizeof(FrameHead) + kMaxBoardBytes;
static_assert(kMaxSmallFrame >= sizeof(FrameHead) + kSigsPerPeer * sizeof(WireSignal));
static_assert(kMessageBytes >= sizeof(MessageHead) + sizeof(FrameHead) + kInlinePut + kMaxSmallFrame);

// The first message of a comm. It proves that its sender holds the communicator's key and means this comm of this
// receiver.
struct Proof {
  char magic[8];
  uint32_t version, from, to, comm;
  bootstrap::Key mac;
};
static_assert(sizeof(Proof) == 56);

}  // namespace moeccl::transport::netplugin
