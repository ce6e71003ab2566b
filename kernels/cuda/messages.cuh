// SPDX-License-Identifier: Apache-2.0
// One launch moves all messages of a rank's group, to and from ranks of its host. A block serves some ways of some
// channels and does in turn whatever can be done, so messages of a group never wait for each other. Sender and receiver
// of a pair need not have the same launches: a way's rounds are counted since the beginning, in both ranks' memory.
//
//   posted[way]  stored by the sender, acquired by the receiver: the slot, or the sender's buffer, holds the round.
//   taken[way]   stored by the receiver, acquired by the sender, in the receiver's memory: the round has been taken. A
//                receiver thus needs nothing of a sender that has gone.
#pragma once

#include "kernels/cuda/messages_args.h"
#include "kernels/cuda/walk_base.cuh"

namespace moeccl::cuda {

enum class MessageState : uint8_t {
  kMoves,
  kMovesDirect,  // the receiver still reads some of what was posted
  kDrains,       // everything is posted
  kEnded
};
// One way of a channel, as its block remembers it.
struct MessageWork {
  uint64_t turn;   // rounds of the way since the beginning
  uint32_t round;  // of the message
  uint16_t channel, message;
  uint8_t way;
  MessageState state;
};
struct MessageShared {
  uint32_t n_works, n_left, chosen, failed;
  // What all threads copy.
  uint8_t* dst;
  const uint8_t* src;
  uint64_t bytes;
  MessageWork works[kMessageWorks];
};

MOECCL_DEVICE const MessageBuffer& message_of(const MessagesArgs& a, uint32_t number) {
  return (a.more != nullptr ? a.more : a.messages)[number];
}
// Returns whether the message is copied in one round of each of its ways, from where the sender has it.
MOECCL_DEVICE bool message_whole(const MessagesArgs& a, const MessageChannel& c, uint64_t bytes) {
  return (c.flags & kMessageSelf) != 0 || ((c.flags & kMessageDirect) != 0 && bytes > a.slot_bytes);
}
// Returns how many rounds a way has for a message; 0: the message does not use the way.
MOECCL_DEVICE uint32_t message_rounds(const MessagesArgs& a, const MessageChannel& c, uint32_t way, uint64_t bytes) {
  if (way >= message_ways(bytes, a.slot_bytes)) return 0;
  if (bytes <= a.slot_bytes || message_whole(a, c, bytes)) return 1;
  const uint64_t at_once = a.slot_bytes * kMessageWays;
  return static_cast<uint32_t>((bytes + at_once - 1) / at_once);
}
// Goes on to the channel's next message that uses the way, from work.message on. Returns false if there is none.
MOECCL_DEVICE bool message_find(const MessagesArgs& a, MessageWork& work) {
  const MessageChannel& c = a.channels[work.channel];
  const uint32_t step = (c.flags & kMessageSelf) != 0 ? 2 : 1;
  for (uint32_t m = work.message; m < static_cast<uint32_t>(c.first) + c.count; m += step) {
    work.message = static_cast<uint16_t>(m);
    if (message_rounds(a, c, work.way, message_bytes(message_of(a, m))) > 0) return true;
  }
  return false;
}

// Gives the block its works: it takes every grid_blocks()-th way.
MOECCL_DEVICE void message_works(const MessagesArgs& a, MessageShared& s) {
  uint32_t n = 0, number = 0;
  for (uint32_t i = 0; i < a.n_channels; ++i) {
    const MessageChannel& c = a.channels[i];
    for (uint32_t way = 0; way < c.ways; ++way) {
      if (number++ % grid_blocks() != block_index() || n == kMessageWorks) continue;
      MessageWork& work = s.works[n];
      work = {0, 0, static_cast<uint16_t>(i), c.first, static_cast<uint8_t>(way), MessageState::kMoves};
      if ((c.flags & kMessageSelf) == 0) {
        const MessageBox& own = *a.pairs[c.peer].own;
        work.turn = (c.flags & kMessageSends) != 0 ? own.sent[way] : own.taken[way];
      }
      n += message_find(a, work) ? 1 : 0;
    }
  }
  s.n_works = s.n_left = n;
}

MOECCL_DEVICE void message_fail(const MessagesArgs& a, WalkFailure kind, const MessageWork& work, uint64_t seen) {
  if (atomic_or(&a.header->failed, 1) != 0) return;
  const MessageChannel& c = a.channels[work.channel];
  const MessageBuffer& m = message_of(a, work.message);
  WalkReport& r = *a.report;
  store_relaxed_system(&r.peer, c.peer);
  store_relaxed_system(&r.step, c.flags & kMessageSends);
  store_relaxed_system(&r.expected, message_bytes(m));
  store_relaxed_system(&r.seen, seen);
  store_relaxed_system(&r.own.signature, m.size >> kMessageTypeShift);
  // Release: pairs with the acquire in exec::PersistentKernel::failure().
  store_release_system(&r.kind, static_cast<uint64_t>(kind));
}

// Sets what all threads of the block copy for a round: a part of the message.
MOECCL_DEVICE void message_part(const MessagesArgs& a, MessageShared& s, const MessageWork& work, uint8_t* dst,
                                const uint8_t* src, bool in_slot, bool to_slot, uint64_t bytes) {
  constexpr uint64_t kLine = 128;
  uint64_t most = a.slot_bytes, first = (static_cast<uint64_t>(work.round) * kMessageWays + work.way) * most;
  if (!in_slot && message_ways(bytes, a.slot_bytes) > 1) {
    most = (bytes + kMessageWays * kLine - 1) / (kMessageWays * kLine) * kLine;
    first = work.way * most;
  } else if (!in_slot) {
    most = bytes;
  }
  s.bytes = first >= bytes ? 0 : bytes - first < most ? bytes - first : most;
  s.dst = dst + (in_slot && to_slot ? 0 : first);
  s.src = src + (in_slot && !to_slot ? 0 : first);
}

// Returns whether the work can go on; what its next round copies is then in `s`. Called by one thread.
MOECCL_DEVICE bool message_ready(const MessagesArgs& a, MessageShared& s, const MessageWork& work) {
  const MessageChannel& c = a.channels[work.channel];
  const MessageBuffer& m = message_of(a, work.message);
  const uint64_t bytes = message_bytes(m);
  const bool whole = message_whole(a, c, bytes);
  s.bytes = 0;
  if ((c.flags & kMessageSelf) != 0) {
    message_part(a, s, work, m.data, message_of(a, work.message + 1u).data, false, false, bytes);
    if (s.dst == s.src) s.bytes = 0;
    return true;
  }
  const MessagePair& pair = a.pairs[c.peer];
  const auto buffer = static_cast<uint32_t>(work.turn % kMessageBuffers);
  const uint64_t slot = (static_cast<uint64_t>(work.way) * kMessageBuffers + buffer) * a.slot_bytes;
  if ((c.flags & kMessageSends) != 0) {
    const bool drains = work.state == MessageState::kDrains;
    const uint64_t needs = drains ? work.turn : work.turn < kMessageBuffers ? 0 : work.turn + 1 - kMessageBuffers;
    const uint64_t* const taken = &pair.theirs->taken[work.way];
    if (needs > 0 && (load_relaxed_system(taken) < needs || load_acquire_system(taken) < needs)) return false;
    if (!drains && !whole) message_part(a, s, work, pair.their_slots + slot, m.data, true, true, bytes);
    return true;
  }
  const uint64_t* const posted = &pair.own->posted[work.way];
  if (load_relaxed_system(posted) <= work.turn || load_acquire_system(posted) <= work.turn) return false;
  const MessagePost& post = pair.own->posts[work.way][buffer];
  const uint64_t sent = load_relaxed_system(&post.bytes), type = load_relaxed_system(&post.type);
  if (sent != bytes || type != m.size >> kMessageTypeShift) {
    const bool size = sent != bytes;
    message_fail(a, size ? WalkFailure::kMessageSize : WalkFailure::kMessageType, work, size ? sent : type);
    s.failed = 1;
    return false;
  }
  if (whole) {
    const auto* const from = reinterpret_cast<const uint8_t*>(load_relaxed_system(&post.address));
    message_part(a, s, work, m.data, from, false, false, bytes);
  } else {
    message_part(a, s, work, m.data, pair.own_slots + slot, true, false, bytes);
  }
  return true;
}

// Tells the peer of the round that all threads have copied, and goes on to the next. Called by one thread.
MOECCL_DEVICE void message_done(const MessagesArgs& a, MessageShared& s, MessageWork& work) {
  const MessageChannel& c = a.channels[work.channel];
  const bool self = (c.flags & kMessageSelf) != 0, sends = (c.flags & kMessageSends) != 0;
  const MessageBuffer& m = message_of(a, work.message);
  const uint64_t bytes = message_bytes(m);
  const bool whole = message_whole(a, c, bytes);
  if (work.state != MessageState::kDrains) {
    if (!self && sends) {
      const MessagePair& pair = a.pairs[c.peer];
      MessagePost& post = pair.theirs->posts[work.way][work.turn % kMessageBuffers];
      store_relaxed_system(&post.bytes, bytes);
      store_relaxed_system(&post.type, m.size >> kMessageTypeShift);
      store_relaxed_system(&post.address, whole ? reinterpret_cast<uint64_t>(m.data) : 0);
      pair.own->sent[work.way] = ++work.turn;
      // Release: pairs with the acquire in message_ready() of the receiver.
      store_release_system(&pair.theirs->posted[work.way], work.turn);
      if (whole) work.state = MessageState::kMovesDirect;
    } else if (!self) {
      // Release: pairs with the acquire in message_ready() of the sender.
      store_release_system(&a.pairs[c.peer].own->taken[work.way], ++work.turn);
    }
    if (++work.round < message_rounds(a, c, work.way, bytes)) return;
    const uint16_t last = work.message;
    work.round = 0;
    work.message = static_cast<uint16_t>(work.message + (self ? 2 : 1));
    if (work.message < c.first + c.count && message_find(a, work)) return;
    work.message = last;  // a report may name it
    if (work.state == MessageState::kMovesDirect) {
      work.state = MessageState::kDrains;
      return;
    }
  }
  work.state = MessageState::kEnded;
  --s.n_left;
  if (c.ways > 1) {
    uint32_t* const ways = a.left + 1 + work.channel;
    if (add_release_device(ways, 1) + 1 < c.ways) return;
    store_relaxed_device(ways, 0);
  }
  // Release: pairs with the acquire in exec::PersistentKernel::messages_ended().
  if (a.channel_ended != nullptr) store_release_system(&a.channel_ended[2 * c.peer + (sends ? 1 : 0)], a.number);
}

// Looks for a work that can go on, from `first` on. Called by one thread.
MOECCL_DEVICE void message_choose(const MessagesArgs& a, MessageShared& s, uint32_t first) {
  constexpr uint32_t kPollsBetweenChecks = 64;
  uint64_t since = 0;
  for (uint32_t polls = 1;; ++polls) {
    uint32_t waits = 0;
    for (uint32_t i = 0; i < s.n_works; ++i) {
      const uint32_t at = (first + i) % s.n_works;
      if (s.works[at].state == MessageState::kEnded) continue;
      waits = at;
      if (message_ready(a, s, s.works[at])) {
        s.chosen = at;
        return;
      }
      if (s.failed != 0) return;
    }
    pause();
    if (polls % kPollsBetweenChecks != 0) continue;
    const uint64_t now = device_ns();
    if (since == 0) since = now;
    const uint64_t stop = load_relaxed_system(&a.report->stop);
    if (load_relaxed_device(&a.header->failed) != 0) {
      s.failed = 1;
    } else if (stop == kWalkStop || stop == walk_expired(a.number, true) || now - since > a.timeout_ns) {
      message_fail(a, stop == kWalkStop ? WalkFailure::kMessageStopped : WalkFailure::kMessageLate, s.works[waits], 0);
      s.failed = 1;
    }
    if (s.failed != 0) return;
  }
}

MOECCL_DEVICE void run_messages(const MessagesArgs& a) {
  MOECCL_SHARED MessageShared s;
  if (thread_index() == 0) {
    s.failed = load_acquire_device(&a.header->failed);
    s.n_works = s.n_left = s.chosen = 0;
    if (s.failed == 0) message_works(a, s);
    if (block_index() == 0 && a.begun != nullptr) store_relaxed_system(a.begun, a.number);
  }
  block_sync();
  while (s.n_left > 0 && s.failed == 0) {
    block_sync();  // all have read both
    if (thread_index() == 0) message_choose(a, s, s.chosen + 1);
    block_sync();
    if (s.failed == 0 && s.bytes > 0) copy_span(s.dst, s.src, s.bytes, thread_index(), block_threads());
    block_sync();
    if (thread_index() == 0 && s.failed == 0) message_done(a, s, s.works[s.chosen]);
    block_sync();
  }
  if (thread_index() != 0) return;
  if (grid_blocks() > 1) {
    if (add_release_device(a.left, 1) + 1 < grid_blocks()) return;
    store_relaxed_device(a.left, 0);
  }
  // Release: pairs with the acquire in exec::PersistentKernel::messages_ended().
  if (a.ended != nullptr) store_release_system(a.ended, a.number);
}

}  // namespace moeccl::cuda
