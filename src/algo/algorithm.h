// SPDX-License-Identifier: Apache-2.0
// An algorithm is a row: its needs, its staging, its chunk size, and the steps of a rank. All are pure functions of the
// shape and the tree; src/plan/cost.h computes the cost of a plan from its steps. To add one, write a new file with its
// rows and add one line to families.h; tests/unit/algo/proof_test.cc proves it. See docs/contributing.md.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "src/base/status.h"
#include "src/plan/plan.h"

namespace moeccl::algo {

class ProgramBuilder;

// The staging of an algorithm for a shape, on which its chunking and its programs must agree.
struct Layout {
  uint32_t n_slots = 0;
  uint32_t depth = 1;
  uint32_t n_part_slots = 0, slot_parts = 1;  // as in Program
};

// What an algorithm on several ranks needs, as bits.
enum Needs : uint32_t {
  kNothing = 0,
  kNodes = 1,         // at least two groups of ranks, one of them with two ranks or more
  kStagingViews = 2,  // peers' staging can be read
  kViews = 4,         // peers' buffers can be read and written
  kReads = 8,         // peers' buffers can be read
  kUnscaled = 16,     // peers may read inputs as they are
  kAnyOrder = 32,     // partial results may be summed in another order than by rank
};

inline constexpr uint64_t kWhole = UINT64_MAX;  // one chunk, whatever its length

struct Algorithm {
  moecclOp_t op;
  const char* name;     // "staged", "ring", ...: unique for the operation
  const char* summary;  // one line for explain
  uint32_t needs;
  Layout (*layout)(const plan::Shape&, const plan::LevelTree&);
  uint64_t chunk_bytes;  // the most of one chunk of one block, or kWhole
  // Writes the program of one of several ranks; a single rank copies, or stores its input as the result.
  void (*steps)(ProgramBuilder&, const plan::Shape&, const plan::LevelTree&, uint32_t rank);
  // Replaces chunk_bytes where the chunk depends on the shape.
  uint64_t (*chunk_bytes_for)(const plan::Shape&, const plan::LevelTree&) = nullptr;

  // Returns success, or why it cannot run this shape ("needs buffers that peers can read: moecclMemAlloc or thread
  // ranks").
  Status applies(const plan::Shape&, const plan::LevelTree&) const;
  plan::Chunking chunking(const plan::Shape&, const plan::LevelTree&) const;
  plan::Program build(const plan::Shape&, const plan::LevelTree&, uint32_t rank) const;
};

// Returns the algorithms of all standard collectives; those of one operation are in the order in which ties are broken.
std::span<const Algorithm> algorithms();
const Algorithm* find(moecclOp_t op, std::string_view name);  // null if there is none
// Returns their names in that order, or those that a routing or a placement chooses among.
std::string names_of(moecclOp_t op, const char* separator);

// Builds the programs of all ranks (for readers), or only `rank`'s.
plan::Plan build_all(const Algorithm&, const plan::Shape&, const plan::LevelTree&);
plan::Plan build_for(const Algorithm&, const plan::Shape&, const plan::LevelTree&, uint32_t rank);
// Checks that the plan for this shape leaves the right bytes on every rank, in every order that its signals allow
// (src/plan/checker.h); moecclInternalError names rank, lane and step. The cost grows with pairs of ranks, so use it
// seldom.
Status prove(const Algorithm&, const plan::Shape&, const plan::LevelTree&);
// Equal on ranks that would build the same plan: covers names, shape, chunking and tree, but not one rank's steps.
uint64_t plan_hash(const Algorithm&, const plan::Shape&, const plan::Chunking&, const plan::LevelTree&);

}  // namespace moeccl::algo
