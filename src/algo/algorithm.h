// An algorithm answers: does it apply, how does it cut the data, what are the steps. All are pure functions of the
// shape and the tree; what a plan costs is computed from its steps by src/plan/cost.h. To add one: a new file with its
// Algorithm, one line in registry.cc, and it is proved by tests/unit/algo/proof_test.cc.
#pragma once

#include <span>
#include <string_view>

#include "src/plan/plan.h"

namespace moeccl::algo {

struct Algorithm {
  moecclOp_t op;
  const char* name;     // "staged", "ring", ...: unique for the operation
  const char* summary;  // one line for explain
  // Success, or why it cannot run this shape ("needs buffers that peers can read: moecclMemAlloc or thread ranks").
  Status (*applies)(const plan::Shape&, const plan::LevelTree&);
  plan::Chunking (*chunking)(const plan::Shape&, const plan::LevelTree&);
  plan::Program (*build)(const plan::Shape&, const plan::LevelTree&, uint32_t rank);
};

// All standard collectives' algorithms; those of one operation in the order in which ties are broken.
std::span<const Algorithm> algorithms();
const Algorithm* find(moecclOp_t op, std::string_view name);  // null when there is none

// Builds the programs of all ranks (for readers), or only `rank`'s.
plan::Plan build_all(const Algorithm&, const plan::Shape&, const plan::LevelTree&);
plan::Plan build_for(const Algorithm&, const plan::Shape&, const plan::LevelTree&, uint32_t rank);
// Equal on ranks that would build the same plan: over names, shape, chunking and tree, not over one rank's steps.
uint64_t plan_hash(const Algorithm&, const plan::Shape&, const plan::Chunking&, const plan::LevelTree&);

}  // namespace moeccl::algo
