// SPDX-License-Identifier: Apache-2.0
// How a rank's signals and board travel to a peer that cannot read them in memory, and the peer's copy of the board.
// Only changes of a board are sent. A payload consists of
//
//   completed u64; n entries, each with its block word; with `health`: state, code and text
//
// All numbers are little-endian. Received payloads are checked before they are used.
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
struct WireSignal {
  uint64_t sig, word;
};
inline constexpr size_t kMaxBoardBytes = sizeof(uint64_t) + kEntries * sizeof(WireEntry) + sizeof(WireHealth);

// The contents of a payload, as announced in the frame's head.
struct BoardParts {
  uint8_t n_entries = 0;
  bool health = false;
};

// Returns the state of a board's health and, above it, the code: a rank that has failed may be revoked later.
uint32_t health_word(const Board& board);
inline uint32_t state_in(uint32_t health) { return health & 0xff; }

// The parts of this rank's board that one peer already knows.
struct Told {
  uint64_t completed = 0, entry = 0;
  uint32_t health = 0;  // health_word()

  bool lacks(const Board& own) const;
  // Entries that the peer does not know and that are still on the board: [first, last].
  struct Entries {
    uint64_t first, last;
  };
  Entries missing(const Board& own) const;
};
// Copies entry `seq` and the block word for `peer`. Returns false while the entry is being written; it then goes with
// the next payload.
bool snapshot(const LocalMemory& own, uint64_t seq, uint32_t peer, WireEntry* out);
// state: the value that was read before everything else.
WireHealth snapshot(const Board& own, uint32_t state);

// The changes of this rank's board that one peer has yet to be told. Used by one thread at a time.
class BoardNews {
 public:
  bool any(const Board& own) const { return told_.lacks(own); }
  // Writes the changes for `peer` to `out` (kMaxBoardBytes) and their size to *bytes. From then on they count as known
  // to the peer.
  BoardParts write(const LocalMemory& own, uint32_t peer, std::byte* out, size_t* bytes);

 private:
  Told told_;
};

// A peer's board as received from it. One thread at a time calls take(); any thread may read the words.
struct BoardCopy {
  Board board = {};  // all words are 0, as in a new segment
  BlockWord blocks[2] = {};
  // Returns false, and takes nothing, if the payload does not have these parts.
  bool take(const BoardParts& parts, std::span<const std::byte> payload);
};

}  // namespace moeccl::transport
