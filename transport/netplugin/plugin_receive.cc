// SPDX-License-Identifier: Apache-2.0
// The receiving half of a link. What arrives is checked against this rank's own bounds before a byte of it is used.
#include <algorithm>
#include <cstring>

#include "src/base/clock.h"
#include "transport/netplugin/plugin_engine.h"
#include "transport/netplugin/plugin_link.h"

namespace moeccl::transport::netplugin {
namespace {

// The most that one link may take before others have their turn.
constexpr uint32_t kTurnMessages = 4 * CommQueue::kDepth;

}  // namespace

Status PluginLink::turn_receives(bool* moved) {
  for (uint32_t messages = 0; messages < kTurnMessages;) {
    MOECCL_TRY(turn_rails(moved));
    if (apply_due()) *moved = true;
    if (stalled_) MOECCL_TRY(parse());
    if (stalled_ || in_ended_) return {};
    if (reading_ == kBuffers) {
      CommQueue::Transfer t;
      size_t bytes = 0;
      Status status = in_.post();
      bool done = false;
      if (status.ok()) {
        Result<bool> taken = in_.take_done(&t, &bytes);
        status = taken.status();
        done = taken.ok() && *taken;
      }
      if (!status.ok()) {
        in_ended_ = true;
        if (!bye_taken_ && !bye_seen_) end(status);  // else the peer has said all
        continue;                                    // what the rails still bring counts
      }
      if (!done) return {};
      *moved = true;
      ++messages;
      reading_ = t.tag;
      MessageHead head;
      std::memcpy(&head, t.data, sizeof(head));
      if (head.number != expected_number_++ || head.bytes > kMessageBytes - sizeof(head) ||
          (bytes != 0 && bytes != head.bytes + sizeof(head))) {
        return protocol_error(peer_.rank, "a malformed message");
      }
      if (head.bytes > 0 && (bye_taken_ || bye_seen_)) return protocol_error(peer_.rank, "frames after its last one");
      take_answer(head);
      read_ = sizeof(head);
      read_end_ = sizeof(head) + head.bytes;
    }
    MOECCL_TRY(parse());
  }
  return {};
}

void PluginLink::take_answer(const MessageHead& head) {
  if (head.bytes > 0 && !owes_answer_) {
    owes_answer_ = true;
    owed_since_ns_ = now_ns();
  }
  if (head.taken == answered_) return;
  answered_ = head.taken;
  unanswered_since_ns_ = static_cast<int32_t>(wants_answer_ - answered_) > 0 ? now_ns() : 0;
}

// Parses the message that is being read, up to its end or to a frame that must wait.
Status PluginLink::parse() {
  std::byte* const base = buffers_.data() + (kBuffers + reading_) * kMessageBytes;
  stalled_ = false;
  while (read_ < read_end_) {
    FrameHead head;
    if (read_end_ - read_ < sizeof(head)) return protocol_error(peer_.rank, "half a frame");
    std::memcpy(&head, base + read_, sizeof(head));
    const bool has_payload = head.type != static_cast<uint8_t>(FrameType::kPiece);
    const size_t payload = has_payload ? head.bytes : 0;
    if (payload > read_end_ - read_ - sizeof(head)) return protocol_error(peer_.rank, "half a frame");
    MOECCL_TRY(take_frame(head, {base + read_ + sizeof(head), payload}, &stalled_));
    if (stalled_) return {};
    read_ += sizeof(head) + payload;
  }
  if (!bye_taken_ && !bye_seen_) in_.add({base, kMessageBytes, in_memory_, reading_});
  reading_ = kBuffers;
  return {};
}

Status PluginLink::take_frame(const FrameHead& head, std::span<const std::byte> payload, bool* stalled) {
  switch (static_cast<FrameType>(head.type)) {
    case FrameType::kPut:
      return take_put(head, payload);
    case FrameType::kPiece:
      return take_piece(head, stalled);
    case FrameType::kSignals:
      return take_signals(head, payload, stalled);
    case FrameType::kBoard:
      // Must come after the signals that were sent before it, because it may say that its rank has left.
      if (n_awaiting_ > 0) {
        *stalled = true;
        return {};
      }
      if (head.n <= kEntries && copy_->take({head.n, head.health != 0}, payload)) return {};
      return protocol_error(peer_.rank, "a bad board frame");
    case FrameType::kBye:
    case FrameType::kSeen:
      // Its sender's last frame. Pieces that it has announced come on other comms, where receives wait for them.
      for (const Rail& r : rails_) *stalled = *stalled || r.arrived < r.announced;
      *stalled = *stalled || n_awaiting_ > 0;
      if (*stalled) return {};
      if (head.type == static_cast<uint8_t>(FrameType::kSeen)) {
        bye_seen_ = true;
        return {};
      }
      bye_taken_ = true;
      end_by_ns_ = now_ns() + kLastWords_ns;
      // If both leave at once, neither waits for an answer, and the peer may be gone before it comes.
      seen_waits_ = !bye_said_;
      return {};
  }
  return protocol_error(peer_.rank, "a frame of an unknown type");
}

Status PluginLink::take_put(const FrameHead& head, std::span<const std::byte> payload) {
  if (head.bytes == 0 || head.offset > own_.staging_bytes || head.bytes > own_.staging_bytes - head.offset) {
    return protocol_error(peer_.rank, "a put outside of the staging");
  }
  if (memory_type_ != abi::kPtrHost) return protocol_error(peer_.rank, "a small put for CUDA memory");
  std::memcpy(own_.staging + head.offset, payload.data(), payload.size());
  return tell_arrivals(head.offset, head.bytes);
}

Status PluginLink::take_piece(const FrameHead& head, bool* stalled) {
  if (head.bytes == 0 || head.bytes > kPieceBytes || head.rail >= rails_.size() || head.offset > own_.staging_bytes ||
      head.bytes > own_.staging_bytes - head.offset) {
    return protocol_error(peer_.rank, "a piece outside of the staging");
  }
  Rail& r = rails_[head.rail];
  // A flush may follow each receive.
  if (r.in.size() + 2 > CommQueue::kCapacity) {
    *stalled = true;
    return {};
  }
  r.in.add({own_.staging + head.offset, head.bytes, r.staging, 0});
  ++r.announced;
  return r.in.post();
}

Status PluginLink::take_signals(const FrameHead& head, std::span<const std::byte> payload, bool* stalled) {
  if (payload.size() != head.n * sizeof(WireSignal)) return protocol_error(peer_.rank, "a bad signal frame");
  if (n_awaiting_ == kAwaiting) {
    *stalled = true;
    return {};
  }
  Awaiting a;
  for (size_t i = 0; i < rails_.size(); ++i) a.pieces[i] = rails_[i].announced;
  for (size_t i = 0; i < head.n; ++i) {
    WireSignal signal;
    std::memcpy(&signal, payload.data() + i * sizeof(signal), sizeof(signal));
    if (signal.sig >= kSigsPerPeer) return protocol_error(peer_.rank, "a signal of an unknown number");
    a.words[signal.sig] = signal.word;
    a.mask |= 1u << signal.sig;
  }
  if (n_awaiting_ == 0 && pieces_there(a)) {
    apply(a);
  } else {
    awaiting_[(first_awaiting_ + n_awaiting_++) % kAwaiting] = a;
  }
  return {};
}

bool PluginLink::pieces_there(const Awaiting& a) const {
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (rails_[i].arrived < a.pieces[i]) return false;
  }
  return true;
}

void PluginLink::apply(const Awaiting& a) {
  for (uint32_t sig = 0; sig < kSigsPerPeer; ++sig) {
    if ((a.mask >> sig & 1u) == 0) continue;
    // Release: pairs with the acquire load of `word` in exec::Wait; puts that came before it are visible there.
    own_.signals[size_t{peer_.rank} * kSigsPerPeer + sig].word.store(a.words[sig], std::memory_order_release);
  }
}

bool PluginLink::apply_due() {
  bool any = false;
  while (n_awaiting_ > 0 && pieces_there(awaiting_[first_awaiting_])) {
    apply(awaiting_[first_awaiting_]);
    first_awaiting_ = (first_awaiting_ + 1) % kAwaiting;
    --n_awaiting_;
    any = true;
  }
  return any;
}

// Takes the pieces that have come. In CUDA memory, a piece counts only when its flush is done as well.
Status PluginLink::turn_rails(bool* moved) {
  for (Rail& r : rails_) {
    if (r.in.size() == 0) continue;
    MOECCL_TRY(r.in.post());
    CommQueue::Transfer t;
    for (size_t bytes = 0;;) {
      MOECCL_ASSIGN_OR_RETURN(const bool done, r.in.take_done(&t, &bytes));
      if (!done) break;
      *moved = true;
      if (!t.flush && bytes != 0 && bytes != t.bytes)
        return protocol_error(peer_.rank, "a piece of another size than it said");
      if (!t.flush && memory_type_ == abi::kPtrCuda) {
        r.in.add({t.data, t.bytes, t.memory, 0, true});
      } else {
        ++r.arrived;
        MOECCL_TRY(tell_arrivals(static_cast<uint64_t>(static_cast<std::byte*>(t.data) - own_.staging), t.bytes));
      }
      MOECCL_TRY(r.in.post());
    }
  }
  return {};
}

Status PluginLink::tell_arrivals(uint64_t offset, uint64_t bytes) {
  if (own_.arrivals == nullptr || own_.arrivals->arrived(peer_.rank, offset, bytes)) return {};
  return protocol_error(peer_.rank, "more puts than an operation has");
}

}  // namespace moeccl::transport::netplugin
