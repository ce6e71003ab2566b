// SPDX-License-Identifier: Apache-2.0
#include "transport/common/board_wire.h"

#include <algorithm>
#include <cstring>

namespace moeccl::transport {
namespace {

uint64_t word(const std::atomic<uint64_t>& w) { return w.load(std::memory_order_relaxed); }

}  // namespace

uint32_t health_word(const Board& b) {
  const uint32_t state = b.health.state.load(std::memory_order_acquire);
  // Acquire: pairs with the release in Fabric::publish_state(). If this is a later failure's, so is the text. A rank
  // that runs may have a code too.
  return state | b.health.code.load(std::memory_order_acquire) << 8;
}

bool Told::lacks(const Board& b) const {
  if (health_word(b) != health) return true;
  if (b.progress.completed.load(std::memory_order_acquire) != completed) return true;
  return std::any_of(std::begin(b.entries), std::end(b.entries),
                     [&](const Entry& e) { return e.seq.load(std::memory_order_acquire) > entry; });
}

Told::Entries Told::missing(const Board& b) const {
  uint64_t newest = entry;
  for (const Entry& e : b.entries) newest = std::max(newest, e.seq.load(std::memory_order_acquire));
  return {std::max(entry + 1, newest >= kEntries ? newest - kEntries + 1 : 1), newest};
}

bool snapshot(const LocalMemory& own, uint64_t seq, uint32_t peer, WireEntry* out) {
  const Entry& e = own.board->entries[seq % kEntries];
  if (e.seq.load(std::memory_order_acquire) != seq) return false;
  const BlockWord& block = own.blocks[seq % 2][peer];
  *out = {seq,
          word(e.signature),
          word(e.count),
          word(e.plan),
          word(e.input),
          word(e.output),
          word(e.max_block),
          word(e.history),
          word(block.count),
          word(block.displacement),
          word(block.expects)};
  std::atomic_thread_fence(std::memory_order_acquire);
  return e.seq.load(std::memory_order_relaxed) == seq;
}

WireHealth snapshot(const Board& own, uint32_t state) {
  WireHealth health{state, own.health.code.load(std::memory_order_relaxed), {}};
  for (size_t i = 0; i < kFailureText / 8; ++i) {
    const uint64_t text = word(own.health.text[i]);
    std::memcpy(health.text + 8 * i, &text, 8);
  }
  return health;
}

BoardParts BoardNews::write(const LocalMemory& own, uint32_t peer, std::byte* out, size_t* bytes) {
  const Board& b = *own.board;
  BoardParts parts;
  size_t n = 0;
  const auto add = [&](const auto& value) {
    std::memcpy(out + n, &value, sizeof(value));
    n += sizeof(value);
  };
  // The state is read first, so that a failure is sent together with everything that was finished before it.
  const uint32_t health = health_word(b);
  told_.completed = b.progress.completed.load(std::memory_order_acquire);
  add(told_.completed);
  const Told::Entries missing = told_.missing(b);
  for (uint64_t seq = missing.first; seq <= missing.last; ++seq) {
    WireEntry entry;
    if (!snapshot(own, seq, peer, &entry)) continue;
    add(entry);
    ++parts.n_entries;
    told_.entry = seq;
  }
  if (health != told_.health) {
    add(snapshot(b, state_in(health)));
    parts.health = true;
    told_.health = health;
  }
  *bytes = n;
  return parts;
}

bool BoardCopy::take(const BoardParts& parts, std::span<const std::byte> payload) {
  const size_t expected =
      sizeof(uint64_t) + parts.n_entries * sizeof(WireEntry) + (parts.health ? sizeof(WireHealth) : 0);
  if (parts.n_entries > kEntries || payload.size() != expected) return false;
  const std::byte* at = payload.data();
  uint64_t completed = 0;
  std::memcpy(&completed, at, sizeof(completed));
  at += sizeof(completed);
  for (size_t i = 0; i < parts.n_entries; ++i, at += sizeof(WireEntry)) {
    WireEntry in;
    std::memcpy(&in, at, sizeof(in));
    blocks[in.seq % 2].count.store(in.block_count, std::memory_order_relaxed);
    blocks[in.seq % 2].displacement.store(in.block_displacement, std::memory_order_relaxed);
    blocks[in.seq % 2].expects.store(in.block_expects, std::memory_order_relaxed);
    Entry& e = board.entries[in.seq % kEntries];
    e.signature.store(in.signature, std::memory_order_relaxed);
    e.count.store(in.count, std::memory_order_relaxed);
    e.plan.store(in.plan, std::memory_order_relaxed);
    e.input.store(in.input, std::memory_order_relaxed);
    e.output.store(in.output, std::memory_order_relaxed);
    e.max_block.store(in.max_block, std::memory_order_relaxed);
    e.history.store(in.history, std::memory_order_relaxed);
    // Release: pairs with the acquire loads of `seq` in exec::Execution.
    e.seq.store(in.seq, std::memory_order_release);
  }
  // Release: pairs with the acquire in exec::Execution::enter().
  board.progress.completed.store(completed, std::memory_order_release);
  if (!parts.health) return true;
  WireHealth health;
  std::memcpy(&health, at, sizeof(health));
  for (size_t i = 0; i < kFailureText / 8; ++i) {
    uint64_t text = 0;
    std::memcpy(&text, health.text + 8 * i, 8);
    board.health.text[i].store(text, std::memory_order_relaxed);
  }
  board.health.code.store(health.code, std::memory_order_release);
  // Pairs with the acquire load in exec::check_peer_state(): code and text are visible there.
  board.health.state.store(health.state, std::memory_order_seq_cst);
  return true;
}

}  // namespace moeccl::transport
