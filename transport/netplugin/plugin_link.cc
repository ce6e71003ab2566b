// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/plugin_link.h"

#include <algorithm>
#include <cstring>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "transport/common/presence.h"
#include "transport/netplugin/plugin_engine.h"

namespace moeccl::transport::netplugin {
namespace {

// How long a received message may stay unacknowledged.
constexpr int64_t kAnswer_ns = 50'000'000;
// This many messages under way keep the peer busy.
constexpr uint32_t kUnderWay = 2;
// The most pieces that one rail may have under way, so that one put does not take the whole pool.
constexpr uint32_t kPiecesPerRail = CommQueue::kDepth;

}  // namespace

PluginLink::PluginLink(const LocalMemory& own, PeerComms peer, int memory_type, PluginEngine& engine)
    : OrderedLink(engine, format("the connection to rank {} at {}", peer.rank, peer.where)),
      name_("plugin " + engine.api().name()),
      own_(own),
      peer_(std::move(peer)),
      engine_(engine),
      memory_type_(memory_type),
      copy_(std::make_unique<BoardCopy>()),
      out_(engine.api(), peer_.pairs[0].out, CommQueue::Way::kSends),
      in_(engine.api(), peer_.pairs[0].in, CommQueue::Way::kReceives) {
  for (size_t i = 1; i < peer_.pairs.size(); ++i) {
    const PeerComms::Pair& p = peer_.pairs[i];
    rails_.push_back({CommQueue(engine.api(), p.out, CommQueue::Way::kSends),
                      CommQueue(engine.api(), p.in, CommQueue::Way::kReceives)});
    rails_.back().weight = p.weight;
  }
  peer_words_ = {&copy_->board, {&copy_->blocks[0], &copy_->blocks[1]}};
}

Status PluginLink::open() {
  NetApi& api = engine_.api();
  constexpr size_t kHalf = kBuffers * kMessageBytes;
  MOECCL_ASSIGN_OR_RETURN(buffers_, driver::private_memory(2 * kHalf));
  MOECCL_ASSIGN_OR_RETURN(out_memory_, api.register_memory(out_.comm(), buffers_.data(), kHalf, abi::kPtrHost));
  MOECCL_ASSIGN_OR_RETURN(in_memory_, api.register_memory(in_.comm(), buffers_.data() + kHalf, kHalf, abi::kPtrHost));
  for (Rail& r : rails_) {
    const BouncePool& pool = engine_.pool();
    MOECCL_ASSIGN_OR_RETURN(r.pool, api.register_memory(r.out.comm(), pool.base(), pool.bytes(), abi::kPtrHost));
    Result<Memory> staging = api.register_memory(r.in.comm(), own_.staging, own_.staging_bytes, memory_type_);
    if (!staging.ok()) {
      return std::move(staging).status().with_context(
          format("{} bytes of staging (MOECCL_STAGING_BYTES, ulimit -l)", own_.staging_bytes));
    }
    r.staging = *staging;
  }
  for (uint32_t i = 0; i < kBuffers; ++i)
    in_.add({buffers_.data() + kHalf + i * kMessageBytes, kMessageBytes, in_memory_, i});
  return in_.post();
}

void PluginLink::close() {
  if (closed_) return;
  closed_ = true;
  NetApi& api = engine_.api();
  const auto note = [&](const Status& s) {
    if (!s.ok()) log(LogLevel::kInfo, "closing the link to rank {}: {}", peer_.rank, s.message());
  };
  if (buffers_.data() != nullptr) {
    note(api.deregister(out_.comm(), out_memory_));
    note(api.deregister(in_.comm(), in_memory_));
    for (const Rail& r : rails_) {
      note(api.deregister(r.out.comm(), r.pool));
      note(api.deregister(r.in.comm(), r.staging));
    }
  }
  for (const PeerComms::Pair& p : peer_.pairs) {
    note(api.close_send(p.out));
    note(api.close_receive(p.in));
  }
  peer_.pairs.clear();
  for (Rail& r : rails_) r.out.drop([&](uint32_t piece) { engine_.pool().give(piece); });
  down_ = true;
}

void PluginLink::end(const Status& why) {
  if (ending_ || down_) return;
  ending_ = true;
  why_ = why;
  n_open_ = 0;
  end_by_ns_ = now_ns() + kLastWords_ns;
}

Result<PutState> PluginLink::put_some(uint64_t offset, const void* src, size_t bytes) {
  const std::lock_guard lock(engine_.mutex_);
  // A put to a lost rank is dropped; a caller that needs that rank asks check_peer().
  if (down_ || ending_ || bye_taken_ || bytes == 0) return PutState::kDone;
  const auto* from = static_cast<const std::byte*>(src);
  OpenPut* open = nullptr;
  for (uint32_t i = 0; i < n_open_; ++i) {
    if (open_[i].offset == offset && open_[i].src == from && open_[i].bytes == bytes) open = &open_[i];
  }
  if (open == nullptr) {
    if (own_.board->health.state.load(std::memory_order_relaxed) != 0) return PutState::kDone;
    if (bytes <= kInlinePut && !engine_.pieces_only(peer_.rank)) {
      if (!room(sizeof(FrameHead) + bytes)) {
        bool moved = false;
        if (Status s = turn_sends(&moved); !s.ok()) end(s);
        if (ending_) return PutState::kDone;
        if (!room(sizeof(FrameHead) + bytes)) return PutState::kFull;
      }
      append({static_cast<uint8_t>(FrameType::kPut), 0, 0, 0, static_cast<uint32_t>(bytes), offset}, src);
      return PutState::kDone;
    }
    if (n_open_ == kOpenPuts) return PutState::kFull;
    open_[n_open_] = {offset, from, bytes, 0};
    open = &open_[n_open_++];
  }
  bool moved = false;
  if (Status s = turn_sends(&moved); !s.ok()) end(s);
  if (ending_ || down_) return PutState::kDone;
  const bool assigned = assign_pieces(*open);
  if (assigned) {
    // While messages are under way, the next one may as well gather more; a turn sends it when they are done.
    if (out_.size() < kUnderWay) flush();
    if (Status s = turn_sends(&moved); !s.ok()) end(s);
    if (ending_ || down_) return PutState::kDone;
  }
  if (open->assigned == open->bytes) {
    *open = open_[--n_open_];
    return PutState::kDone;
  }
  return assigned ? PutState::kMoved : PutState::kFull;
}

// Returns the rail for the next piece: of those with room, the one that has carried least for its weight.
PluginLink::Rail* PluginLink::next_rail() {
  Rail* best = nullptr;
  const auto carried = [](const Rail& r) { return static_cast<double>(r.sent_bytes) / r.weight; };
  for (Rail& r : rails_) {
    if (r.out.size() >= kPiecesPerRail) continue;
    if (best == nullptr || carried(r) < carried(*best)) best = &r;
  }
  return best;
}

bool PluginLink::assign_pieces(OpenPut& p) {
  const size_t before = p.assigned;
  while (p.assigned < p.bytes) {
    Rail* const r = next_rail();
    if (r == nullptr || engine_.pool().empty() || !room(sizeof(FrameHead))) break;
    // The last pieces of a put share the rest, so that no rail waits long for another.
    const size_t left = p.bytes - p.assigned;
    const size_t n = std::min(kPieceBytes, rails_.size() == 1 ? left : std::max(left / rails_.size(), kInlinePut));
    const size_t bytes = std::min(n, left);
    const uint32_t piece = engine_.pool().take();
    std::byte* const at = engine_.pool().piece(piece);
    std::memcpy(at, p.src + p.assigned, bytes);
    r->out.add({at, bytes, r->pool, piece});
    r->sent_bytes += bytes;
    append({static_cast<uint8_t>(FrameType::kPiece), 0, static_cast<uint8_t>(r - rails_.data()), 0,
            static_cast<uint32_t>(bytes), p.offset + p.assigned},
           nullptr);
    p.assigned += bytes;
  }
  return p.assigned > before;
}

Status PluginLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  const std::lock_guard lock(engine_.mutex_);
  if (down_ || ending_ || bye_taken_) return {};
  // A failed rank's puts are dropped, see put_some(), so none of its signals may claim that they arrived.
  if (own_.board->health.state.load(std::memory_order_relaxed) != 0) return {};
  words_[sig] = static_cast<uint64_t>(tag) << 32 | number;
  new_words_ |= 1u << sig;
  send_small();
  bool moved = false;
  if (Status s = turn_sends(&moved); !s.ok()) end(s);
  return {};
}

bool PluginLink::room(size_t bytes) {
  if (writing_ < kBuffers && written_ + bytes <= kMessageBytes) return true;
  flush();
  if (free_buffers_ == 0) return false;
  writing_ = static_cast<uint32_t>(__builtin_ctz(free_buffers_));
  free_buffers_ &= free_buffers_ - 1;
  written_ = sizeof(MessageHead);
  return true;
}

void PluginLink::append(const FrameHead& head, const void* payload) {
  std::byte* const at = buffers_.data() + writing_ * kMessageBytes + written_;
  std::memcpy(at, &head, sizeof(head));
  written_ += sizeof(head);
  if (payload == nullptr) return;
  std::memcpy(at + sizeof(head), payload, head.bytes);
  written_ += head.bytes;
}

void PluginLink::flush() {
  if (writing_ < kBuffers && written_ > sizeof(MessageHead)) send_message();
}

void PluginLink::send_message() {
  std::byte* const at = buffers_.data() + writing_ * kMessageBytes;
  const auto bytes = static_cast<uint32_t>(written_ - sizeof(MessageHead));
  const MessageHead head{bytes, next_number_++, expected_number_, 0};
  std::memcpy(at, &head, sizeof(head));
  out_.add({at, written_, out_memory_, writing_});
  writing_ = kBuffers;
  owes_answer_ = false;
  if (bytes == 0) return;
  wants_answer_ = next_number_;
  if (unanswered_since_ns_ == 0) unanswered_since_ns_ = now_ns();
}

// A signal takes the board with it, so that a rank that sees it can compare what both ranks run.
void PluginLink::send_small() {
  if (down_ || ending_) return;
  std::byte payload[kMaxSmallFrame];
  if (bye_taken_) {  // the peer hears nothing but the answer
    new_words_ = 0;
    board_waits_ = false;
  }
  if ((new_words_ != 0 || board_waits_) && news_.any(*own_.board)) {
    if (!room(kMaxSmallFrame)) return;
    size_t n = 0;
    const BoardParts parts = news_.write(own_, peer_.rank, payload, &n);
    append({static_cast<uint8_t>(FrameType::kBoard), parts.n_entries, 0, parts.health ? uint8_t{1} : uint8_t{0},
            static_cast<uint32_t>(n), 0},
           payload);
  }
  board_waits_ = false;
  if (new_words_ != 0) {
    if (!room(kMaxSmallFrame)) return;
    FrameHead head{static_cast<uint8_t>(FrameType::kSignals), 0, 0, 0, 0, 0};
    for (uint32_t sig = 0; sig < kSigsPerPeer; ++sig) {
      if ((new_words_ >> sig & 1u) == 0) continue;
      const WireSignal s{sig, words_[sig]};
      std::memcpy(payload + head.bytes, &s, sizeof(s));
      head.bytes += sizeof(s);
      ++head.n;
    }
    new_words_ = 0;
    append(head, payload);
  }
  for (const auto& [waits, type] : {std::pair{&bye_waits_, FrameType::kBye}, {&seen_waits_, FrameType::kSeen}}) {
    if (!*waits) continue;
    if (!room(sizeof(FrameHead))) return;
    append({static_cast<uint8_t>(type), 0, 0, 0, 0, 0}, nullptr);
    *waits = false;
    said_last_ = true;
    n_empty_last_ = kBuffers - 1;
  }
  flush();
  for (; n_empty_last_ > 0 && room(0); --n_empty_last_) send_message();
}

void PluginLink::answer() {
  if (!owes_answer_ || said_last_) return;
  if (now_ns() - owed_since_ns_ >= kAnswer_ns && room(0)) send_message();
}

int64_t PluginLink::unacknowledged_ms() {
  const std::lock_guard lock(engine_.mutex_);
  return unanswered_since_ns_ == 0 || down_ ? 0 : (now_ns() - unanswered_since_ns_) / 1'000'000;
}

std::string PluginLink::why_silent() {
  return transport::why_silent(peer_.presence,
                               "it is stopped (SIGSTOP, a debugger), or the plugin's network between the two does not "
                               "pass messages");
}

// A rank that only waits sends nothing, and would not notice the end of its peer.
void PluginLink::ask_for_answer() {
  if (down_ || ending_ || bye_taken_ || unanswered_since_ns_ != 0 || !room(sizeof(FrameHead))) return;
  append({static_cast<uint8_t>(FrameType::kSignals), 0, 0, 0, 0, 0}, nullptr);
  flush();
  bool moved = false;
  if (Status s = turn_sends(&moved); !s.ok()) end(s);
}

void PluginLink::lose_ended_process() {
  const Result<driver::SocketAddress> at = driver::parse_ip_address(peer_.presence);
  if (silent_since_ns() == 0) return;
  gone_ = true;
  // What the plugin still sends from the pool goes to no process, so other links may use it.
  for (Rail& r : rails_) r.out.drop([&](uint32_t piece) { engine_.pool().give(piece); });
  lose(process_gone(at.ok() ? at->host() : peer_.presence));
}

void PluginLink::say_bye() {
  if (bye_taken_) return;
  bye_said_ = bye_waits_ = true;
  board_waits_ = true;
  send_small();
}

Status PluginLink::turn_sends(bool* moved) {
  const auto drain = [&](CommQueue& queue, auto&& give) -> Status {
    MOECCL_TRY(queue.post());
    CommQueue::Transfer t;
    size_t bytes = 0;
    for (;;) {
      MOECCL_ASSIGN_OR_RETURN(const bool done, queue.take_done(&t, &bytes));
      if (!done) return {};
      give(t.tag);
      *moved = true;
      MOECCL_TRY(queue.post());
    }
  };
  MOECCL_TRY(drain(out_, [&](uint32_t buffer) { free_buffers_ |= 1u << buffer; }));
  for (Rail& r : rails_) {
    if (r.out.size() == 0) continue;
    MOECCL_TRY(drain(r.out, [&](uint32_t piece) { engine_.pool().give(piece); }));
  }
  return {};
}

bool PluginLink::unsent() const {
  if (down_ || ending_) return false;
  const bool pieces = std::any_of(rails_.begin(), rails_.end(), [](const Rail& r) { return r.out.size() > 0; });
  return pieces || out_.size() > 0 || new_words_ != 0 || board_waits_ || bye_waits_ || seen_waits_ ||
         n_empty_last_ > 0 || (writing_ < kBuffers && written_ > sizeof(MessageHead));
}

bool PluginLink::drained() const {
  const bool read = in_ended_ || (in_.size() == 0 && reading_ == kBuffers);
  return (bye_taken_ || bye_seen_) && read && !unsent();
}

bool PluginLink::turn() {
  if (down_) {
    // The peer learns it from its comms, even where only this rank's calls failed. Those to a process that is gone have
    // requests under way, and a plugin may then serve no other comm of this process: they stay open, see leave_open().
    if (!gone_) close();
    return false;
  }
  bool moved = false;
  if (Status s = turn_receives(&moved); !s.ok()) lose(s);
  if (down_) return true;
  if (!ending_) {
    send_small();
    if (out_.size() < kUnderWay) flush();
    answer();
    if (Status s = turn_sends(&moved); !s.ok()) end(s);
  }
  if (bye_taken_ && (drained() || now_ns() >= end_by_ns_)) {
    lose(error(moecclRemoteError, "it has left"));
  }
  if (ending_) {
    const bool read = in_ended_ && !stalled_ && n_awaiting_ == 0;
    if (read || now_ns() >= end_by_ns_) lose(why_);
  }
  return moved;
}

}  // namespace moeccl::transport::netplugin
