// SPDX-License-Identifier: Apache-2.0
// How a rank's board travels to a peer that cannot read it in memory, and the peer's copy of it. Only what is new is
// sent; a payload is
//
//   completed u64; n entries with their block word; with `health` state, code and sentence
//
// All numbers little-endian. What comes is checked before it is used.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/words.h"

namespace moeccl::transport {

static_assert(std::endian::native == std::endian::little, "entries are copied as they are");

struct WireEntry {
  uint64_t seq, signature, count, plan, input, output, max_block, history;
  uint64_t block_count, block_displacement, block_expects;
};
static_assert(sizeof(WireEntry) == 88);
struct WireHealth {
  uint32_t state, code;
  char text[kFailureText];
};
static_assert(sizeof(WireHealth) == 8 + kFailureText);
inline constexpr size_t kMaxBoardBytes = sizeof(uint64_t) + kEntries * sizeof(WireEntry) + sizeof(WireHealth);

// What a payload holds, told in the frame's head.
struct BoardParts {
  uint8_t n_entries = 0;
  bool health = false;
};

// What one peer knows of the own board.
struct Told {
  uint64_t completed = 0, entry = 0;
  uint32_t state = 0;

  bool lacks(const Board& own) const;
  // Entries that it does not know and that are still there: [first, last].
  struct Entries {
    uint64_t first, last;
  };
  Entries missing(const Board& own) const;
};
// Entry `seq` and the block word towards `peer`. False: it is being written now, and goes the next time.
bool snapshot(const LocalMemory& own, uint64_t seq, uint32_t peer, WireEntry* out);
// state: as it was read before all else.
WireHealth snapshot(const Board& own, uint32_t state);

// What is new of the own board for one peer. One thread at a time.
class BoardNews {
 public:
  bool any(const Board& own) const { return told_.lacks(own); }
  // Writes what is new for `peer` to `out` (kMaxBoardBytes), and how many bytes that are to *bytes; from now on the
  // peer knows it.
  BoardParts write(const LocalMemory& own, uint32_t peer, std::byte* out, size_t* bytes);

 private:
  Told told_;
};

// A peer's board as it told it. take() in one thread at a time; any thread reads the words.
struct BoardCopy {
  Board board = {};  // all words are 0, as in a new segment
  BlockWord blocks[2] = {};
  // False: this is no payload of these parts, and nothing was taken.
  bool take(const BoardParts& parts, std::span<const std::byte> payload);
};

}  // namespace moeccl::transport
