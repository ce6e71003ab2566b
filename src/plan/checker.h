// SPDX-License-Identifier: Apache-2.0
// Proves a plan by running the programs of all ranks over symbols instead of numbers. An accepted plan leaves the right
// value in every Output element, on any machine speed: each pair of accesses of which one writes is ordered by signals.
// It also wastes nothing: no element is moved or reduced without being used.
//
// One run suffices. A wait takes one fixed signal (ordinal and chunk), steps do not branch on data, so which step
// happens before which is the same in every interleaving; vector clocks find every unordered pair in whichever one we
// run.
//
// Buffers are modelled in elements, all distinct. element_bytes of 64 makes parts as fine as one element: tests should
// use it, with a count that no part divides. in_place lays Input and Output over each other as collectives.h says.
#pragma once

#include <span>
#include <vector>

#include "src/base/status.h"
#include "src/plan/binding.h"
#include "src/plan/plan.h"

namespace moeccl::plan {

// `weight` times element (row) `unit` of rank `rank`'s Input.
struct Term {
  uint32_t rank = 0;
  uint32_t unit = 0;
  float weight = 1;

  friend bool operator==(const Term&, const Term&) = default;
};

// What one row of Output must hold: the sum of the terms, zeros when there are none.
struct ExpectedRow {
  std::vector<Term> terms;  // in any order
  bool any = false;         // padding: may hold anything, also be left unwritten
};

// Rows of a dispatch or a combine; its unit is the row.
struct RowExpectation {
  std::vector<uint64_t> input_rows;              // [n_ranks]
  std::vector<std::vector<ExpectedRow>> output;  // [n_ranks][rows of Output]
};

// What each block of Output must hold, for operations of a placement; units are blocks: element i of the block is the
// sum of element i of the terms' blocks.
struct BlockExpectation {
  std::vector<uint32_t> input_blocks;            // [n_ranks]
  std::vector<std::vector<ExpectedRow>> output;  // [n_ranks][blocks of Output]
};

struct CheckInput {
  const Plan& plan;                      // with the programs of all ranks
  std::span<const Binding> bindings;     // [n_ranks]
  const RowExpectation* rows = nullptr;  // instead of the operation's own meaning; required where rows move
  // [n_ranks] which ranks work in place; null: all or none, as the shape says.
  const std::vector<bool>* in_place = nullptr;
  // Elements that are moved and then used by nobody are no fault. Everything else is proved as ever.
  bool allow_waste = false;
  const BlockExpectation* blocks = nullptr;  // required for operations of a placement that move blocks
};

// Success, or moecclInternalError with a sentence that names rank, lane, step and chunk and what is wrong there.
Status check(const CheckInput& input);

// The same for a standard operation of equal blocks.
Status check(const Plan& plan);

// [n_ranks] bindings of a standard operation of equal blocks: shape.count elements each, slots of one chunk (rounded up
// to 64 bytes).
std::vector<Binding> uniform_bindings(const Plan& plan);

}  // namespace moeccl::plan
