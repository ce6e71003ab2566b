// SPDX-License-Identifier: Apache-2.0
// What host and device share for Send and Recv between ranks of one host, each with its own device memory: a box for
// every pair of ranks, and the arguments of a launch.
#pragma once

#include "kernels/cuda/walk_args.h"

namespace moeccl::cuda {

// A message of more than one slot is dealt over the ways, which different blocks serve side by side.
inline constexpr uint32_t kMessageWays = 8, kMessageBuffers = 4;
// What the arguments of a launch have room for, within 4 KiB. More messages are passed in memory.
inline constexpr uint32_t kMessageChannels = 2 * kMaxSources + 1, kMessagesInside = 176;
inline constexpr uint32_t kMostMessages = 0xfff0;
// The most works (ways of channels) of a block.
inline constexpr uint32_t kMessageWorks = 320;

// What a sender says of the message in a slot. `address` is where the whole message is, for a receiver that reads it
// there; 0: the slot holds the bytes.
struct MessagePost {
  uint64_t bytes, type, address;
};
// In a rank's memory, for each rank of its host; initially zero. Numbers count rounds of a way since the beginning.
struct MessageBox {
  uint64_t posted[kMessageWays];                     // stored by the peer: filled for us
  uint64_t taken[kMessageWays];                      // ours, read by the peer: of what it has filled
  uint64_t sent[kMessageWays];                       // ours, of what we have filled for the peer
  MessagePost posts[kMessageWays][kMessageBuffers];  // stored by the peer
};
// The slots follow the boxes of all ranks of the host: [n_here][kMessageWays][kMessageBuffers] of slot_bytes.
inline constexpr size_t message_boxes_bytes(size_t n_here) { return (n_here * sizeof(MessageBox) + 255) / 256 * 256; }
inline constexpr size_t message_area_bytes(size_t n_here, size_t slot_bytes) {
  return message_boxes_bytes(n_here) + n_here * kMessageWays * kMessageBuffers * slot_bytes;
}

// Both ends of a pair as this rank's device reaches them. Only the sender uses the other end.
struct MessagePair {
  MessageBox* own;
  const uint8_t* own_slots;
  MessageBox* theirs;
  uint8_t* their_slots;
};

inline constexpr uint8_t kMessageSends = 1;
inline constexpr uint8_t kMessageDirect = 2;  // the receiver reads messages of several slots from the sender's buffer
inline constexpr uint8_t kMessageSelf = 4;    // pairs of messages: what is received, and what is sent
// The messages of one peer in one direction, in the order of their calls.
struct MessageChannel {
  uint16_t peer, first, count;
  uint8_t flags, ways;
};
struct MessageBuffer {
  uint8_t* data;
  uint64_t size;  // bytes, and the type in the highest byte
};
inline constexpr uint32_t kMessageTypeShift = 56;

struct MessagesArgs {
  WalkHeader* header;  // `failed` is the communicator's
  // `step` is 1 for a send, `expected` its bytes, `own.signature` its type, `seen` what the peer says of either.
  WalkReport* report;
  const MessagePair* pairs;   // [n_ranks]
  const MessageBuffer* more;  // the messages, if they are not in `messages`
  // Page-locked: they get `number` when the launch has begun, when it has ended, and in between channel_ended[2 * peer
  // + sends]. Null in a graph.
  uint64_t *begun, *ended, *channel_ended;
  uint64_t number;
  uint32_t* left;  // blocks that have ended; behind it, of each channel, ways that have
  uint64_t slot_bytes, timeout_ns;
  uint32_t n_channels, padding;
  MessageChannel channels[kMessageChannels];
  MessageBuffer messages[kMessagesInside];
};
static_assert(sizeof(MessagesArgs) <= 4096);

MOECCL_BOTH constexpr uint64_t message_bytes(const MessageBuffer& m) {
  return m.size & ((uint64_t{1} << kMessageTypeShift) - 1);
}
// Returns how many ways a message takes.
MOECCL_BOTH constexpr uint32_t message_ways(uint64_t bytes, uint64_t slot_bytes) {
  return bytes > slot_bytes ? kMessageWays : 1;
}

}  // namespace moeccl::cuda
