// SPDX-License-Identifier: Apache-2.0
// The words of a link: signals, and what keeps the peer's copy of this rank's board up to date.
#include <algorithm>

#include "src/base/clock.h"
#include "src/base/device_order.h"
#include "transport/verbs/verbs_engine.h"
#include "transport/verbs/verbs_link.h"

namespace moeccl::transport::verbs {
namespace {

constexpr uint64_t offset_of_entry(uint64_t seq) {
  return offsetof(PeerCopy, board) + offsetof(Board, entries) + (seq % kEntries) * sizeof(Entry);
}

// Both are in one word of 8 bytes, so that the state is never seen without its code.
static_assert(offsetof(decltype(Board::health), state) == 0 && offsetof(decltype(Board::health), code) == 4);
static_assert(offsetof(Entry, seq) == 0);
static_assert(sizeof(BlockWord) == 24);

// The words of an Entry behind its seq are those of a WireEntry.
constexpr size_t kBodyBytes = sizeof(Entry) - sizeof(uint64_t);
static_assert(offsetof(WireEntry, block_count) - offsetof(WireEntry, signature) == kBodyBytes);

const std::byte* bytes_at(const void* p) { return static_cast<const std::byte*>(p); }

}  // namespace

Status VerbsLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  const std::lock_guard lock(engine_.mutex_);
  if (down_) return {};
  // A failed rank's puts are dropped, see put_some(), so none of its signals may claim that they arrived.
  if (failed_here()) return {};
  if (told_.lacks(*s_.own.board)) tell_board();  // a rank that sees a signal can compare what both ranks run
  if (s_.peer.records != 0) set_word(kPuts, n_records_);
  set_word(static_cast<Word>(kSignal0 + sig), static_cast<uint64_t>(tag) << 32 | number);
  send_words();
  return {};
}

void VerbsLink::set_word(Word w, uint64_t value) {
  words_[w] = value;
  pending_ |= 1u << w;
  for (size_t i = 0; i < lanes_.size(); ++i) marks_[w][i] = lanes_[i].pair->posted();
}

QueuePair::Target VerbsLink::target_of(Word w, const Lane& lane) const {
  if (w >= kSignal0) return {s_.peer.signals + (w - kSignal0) * sizeof(SignalLine), lane.keys.signals};
  uint64_t at = offset_of_entry(w - kSeq0);
  if (w == kCompleted) at = offsetof(PeerCopy, board) + offsetof(Board, progress);
  if (w == kHealth) at = offsetof(PeerCopy, board) + offsetof(Board, health);
  if (w == kPuts) at = offsetof(PeerCopy, n_puts);
  return in_copy(at, lane);
}

// Returns a lane that may carry what must come after the marks. Null: none yet, and completions are asked for.
Lane* VerbsLink::lane_for(const Marks& marks, uint32_t slots) {
  for (Lane& lane : lanes_) {
    if (lane.pair->room() < slots) continue;
    bool free = true;
    for (size_t i = 0; i < lanes_.size() && free; ++i) {
      const bool keeps_order = s_.ordered && &lanes_[i] == &lane;
      free = keeps_order || lanes_[i].pair->completed() >= marks[i];
    }
    if (free) return &lane;
  }
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].pair->completed() < marks[i]) ask_for(lanes_[i], marks[i]);
  }
  return nullptr;
}

void VerbsLink::send_words() {
  bool held = false;  // a word that later ones may not overtake
  for (uint32_t w = 0; w < kWords && pending_ >> w != 0 && !down_; ++w) {
    if ((pending_ >> w & 1u) == 0) continue;
    // Signals wait for the board of their time, if that is still to be told.
    if (held || (w >= kSignal0 && board_waits_)) break;
    Lane* const lane = lane_for(marks_[w], 1);
    if (lane == nullptr) {
      held = w < kSignal0;
      continue;
    }
    lane->pair->write_small(target_of(static_cast<Word>(w), *lane), &words_[w], sizeof(uint64_t));
    pending_ &= ~(1u << w);
    for (uint32_t later = w + 1; w < kSignal0 && later < kWords; ++later)
      marks_[later][index_of(*lane)] = lane->pair->posted();
  }
  flush();
  if (pending_ != 0 && !down_) engine_.queue(*this);
}

void VerbsLink::write_all(Lane& lane, QueuePair::Target to, const std::byte* from, size_t bytes) {
  const size_t most = lane.pair->inline_bytes() / sizeof(uint64_t) * sizeof(uint64_t);
  for (size_t at = 0; at < bytes; at += most) {
    const auto n = static_cast<uint32_t>(std::min(most, bytes - at));
    lane.pair->write_small({to.address + at, to.key}, from + at, n);
  }
}

void VerbsLink::tell_board() {
  const Board& b = *s_.own.board;
  const uint32_t slots = std::min(24u, reserve_);
  Lane* lane = lane_for({}, slots);
  board_waits_ = lane == nullptr;
  if (board_waits_) return engine_.queue(*this);
  // The state is read first, so that a failure is sent together with everything that was finished before it.
  const uint32_t health_now = health_word(b);
  const uint64_t completed = b.progress.completed.load(std::memory_order_acquire);
  const Told::Entries missing = told_.missing(b);
  for (uint64_t seq = missing.first; seq <= missing.last; ++seq) {
    WireEntry entry;
    if (!snapshot(s_.own, seq, s_.far.rank, &entry)) continue;
    // Earlier writes to the same places must not come after these: the body of the operation four before, whose word
    // may still be waiting, and the blocks of the one two before.
    Marks before = bodies_[seq % kEntries];
    for (size_t i = 0; i < lanes_.size(); ++i) before[i] = std::max(before[i], bodies_[(seq + 2) % kEntries][i]);
    Lane* const behind = lane_for(before, slots);
    if (behind == nullptr) {
      board_waits_ = true;
      return engine_.queue(*this);
    }
    lane = behind;
    // That word would announce this operation's body as its own.
    pending_ &= ~(1u << (kSeq0 + seq % kEntries));
    write_all(*lane, in_copy(offset_of_entry(seq) + sizeof(uint64_t), *lane), bytes_at(&entry.signature), kBodyBytes);
    const std::array<uint64_t, 3> blocks = {entry.block_count, entry.block_displacement, entry.block_expects};
    if (blocks != told_blocks_[seq % 2]) {
      write_all(*lane, in_copy(offsetof(PeerCopy, blocks) + (seq % 2) * sizeof(BlockWord), *lane),
                bytes_at(blocks.data()), sizeof(blocks));
      told_blocks_[seq % 2] = blocks;
    }
    bodies_[seq % kEntries][index_of(*lane)] = lane->pair->posted();
    set_word(static_cast<Word>(kSeq0 + seq % kEntries), seq);
    told_.entry = seq;
  }
  if (completed != told_.completed) {
    set_word(kCompleted, completed);
    told_.completed = completed;
  }
  if (health_now != told_.health) {
    const WireHealth health = snapshot(b, state_in(health_now));
    write_all(*lane, in_copy(offsetof(PeerCopy, board) + offsetof(Board, health) + sizeof(uint64_t), *lane),
              bytes_at(health.text), sizeof(health.text));
    set_word(kHealth, health.state | static_cast<uint64_t>(health.code) << 32);
    told_.health = health_now;
  }
}

// A peer whose process is gone is noticed only when something is sent to it.
void VerbsLink::keep_alive() {
  if (down_ || asked_since_ns_ != 0) return;
  Lane& lane = lanes_[next_asked_++ % lanes_.size()];
  ask_for(lane, lane.pair->posted() + 1);
}

// The record is covered by kPuts, which a signal sends before itself.
bool VerbsLink::record(const OpenPut& p) {
  Lane& lane = lanes_[0];
  if (lane.pair->room() <= reserve_ / 2) return false;
  const uint64_t words[2] = {p.offset, p.bytes};
  const uint64_t at = n_records_ % kPutRecords * sizeof(PutRecord);
  write_all(lane, {s_.peer.records + at, lane.keys.records}, bytes_at(words), sizeof(words));
  ++n_records_;
  return true;
}

Status VerbsLink::catch_up() {
  Status status = read_records();
  if (status.ok()) return status;
  const std::lock_guard lock(engine_.mutex_);
  lose(status);  // its later signals would announce data that is not there
  return status;
}

Status VerbsLink::read_records() {
  // Acquire: what was put before the count was written is visible.
  const uint64_t n = load_from_device(s_.copy->n_puts);
  if (n - records_taken_ > kPutRecords) {
    return error(moecclRemoteError, "rank {} made {} puts that this rank has not looked at: it keeps {}", s_.far.rank,
                 n - records_taken_, kPutRecords);
  }
  for (; records_taken_ < n; ++records_taken_) {
    const PutRecord& r = s_.records[records_taken_ % kPutRecords];
    const uint64_t offset = r.offset.load(std::memory_order_relaxed), bytes = r.bytes.load(std::memory_order_relaxed);
    const bool inside = offset <= s_.own.staging_bytes && bytes <= s_.own.staging_bytes - offset;
    if (!inside || !s_.own.arrivals->arrived(s_.far.rank, offset, bytes)) {
      return error(moecclRemoteError, "rank {} sent {}: do all ranks run the same MoECCL?", s_.far.rank,
                   inside ? "more puts than an operation has" : "a put outside of the staging");
    }
  }
  return {};
}

}  // namespace moeccl::transport::verbs
