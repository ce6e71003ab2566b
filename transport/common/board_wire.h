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

// What one peer knows of the own board. One thread at a time.
class BoardNews {
 public:
  bool any(const Board& own) const;
  // Writes what is new for `peer` to `out` (kMaxBoardBytes), and how many bytes that are to *bytes; from now on the
  // peer knows it.
  BoardParts write(const LocalMemory& own, uint32_t peer, std::byte* out, size_t* bytes);

 private:
  uint64_t told_completed_ = 0, told_entry_ = 0;
  uint32_t told_state_ = 0;
};

// A peer's board as it told it. take() in one thread at a time; any thread reads the words.
struct BoardCopy {
  Board board = {};  // all words are 0, as in a new segment
  BlockWord blocks[2] = {};
  // False: this is no payload of these parts, and nothing was taken.
  bool take(const BoardParts& parts, std::span<const std::byte> payload);
};

}  // namespace moeccl::transport
