#include "transport/common/board_wire.h"

#include <algorithm>
#include <cstring>

namespace moeccl::transport {
namespace {

uint64_t word(const std::atomic<uint64_t>& w) { return w.load(std::memory_order_relaxed); }

}  // namespace

bool BoardNews::any(const Board& b) const {
  if (b.health.state.load(std::memory_order_acquire) != told_state_) return true;
  if (b.progress.completed.load(std::memory_order_acquire) != told_completed_) return true;
  for (const Entry& e : b.entries) {
    if (e.seq.load(std::memory_order_acquire) > told_entry_) return true;
  }
  return false;
}

BoardParts BoardNews::write(const LocalMemory& own, uint32_t peer, std::byte* out, size_t* bytes) {
  const Board& b = *own.board;
  BoardParts parts;
  size_t n = 0;
  const auto add = [&](const auto& value) {
    std::memcpy(out + n, &value, sizeof(value));
    n += sizeof(value);
  };
  // The state is read first: with a failure goes everything that was finished before it.
  const uint32_t state = b.health.state.load(std::memory_order_acquire);
  const uint64_t completed = b.progress.completed.load(std::memory_order_acquire);
  add(completed);
  told_completed_ = completed;
  // Entries in their order; one that is being written now goes with the next frame.
  uint64_t newest = told_entry_;
  for (const Entry& e : b.entries) newest = std::max(newest, e.seq.load(std::memory_order_acquire));
  const uint64_t first = std::max(told_entry_ + 1, newest >= kEntries ? newest - kEntries + 1 : 1);
  for (uint64_t seq = first; seq <= newest; ++seq) {
    const Entry& e = b.entries[seq % kEntries];
    if (e.seq.load(std::memory_order_acquire) != seq) continue;
    const BlockWord& block = own.blocks[seq % 2][peer];
    const WireEntry entry{seq,
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
    if (e.seq.load(std::memory_order_relaxed) != seq) continue;
    add(entry);
    ++parts.n_entries;
    told_entry_ = seq;
  }
  if (state != told_state_) {
    WireHealth health{state, b.health.code.load(std::memory_order_relaxed), {}};
    for (size_t i = 0; i < kFailureText / 8; ++i) {
      const uint64_t text = word(b.health.text[i]);
      std::memcpy(health.text + 8 * i, &text, 8);
    }
    add(health);
    parts.health = true;
    told_state_ = state;
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
  board.health.code.store(health.code, std::memory_order_relaxed);
  // Pairs with the acquire load in exec::check_peer_state(): code and sentence are visible there.
  board.health.state.store(health.state, std::memory_order_seq_cst);
  return true;
}

}  // namespace moeccl::transport
