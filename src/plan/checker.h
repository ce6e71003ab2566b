// SPDX-License-Identifier: Apache-2.0
// Proves a plan by running the programs of all ranks over symbols instead of numbers. An accepted plan leaves the right
// value in every Output element at any machine speed: signals order each pair of accesses of which one writes. It also
// wastes nothing: no element is moved or reduced without being used.
//
// One run suffices. A wait takes one fixed signal (ordinal and chunk) and steps do not branch on data, so the
// happens-before order is the same in every interleaving. Vector clocks find every unordered pair in whichever
// interleaving runs.
//
// Buffers are modelled in elements, all distinct. With an element_bytes of 64, parts are as fine as one element: tests
// should use it, with a count that no part divides. in_place overlays Input and Output as collectives.h describes.
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

// The value that one row of Output must hold: the sum of the terms, or zeros if there are none.
struct ExpectedRow {
  std::vector<Term> terms;  // in any order
  bool any = false;         // padding: may hold anything or stay unwritten
};

// The rows of a dispatch or a combine; the unit is the row.
struct RowExpectation {
  std::vector<uint64_t> input_rows;              // [n_ranks]
  std::vector<std::vector<ExpectedRow>> output;  // [n_ranks][rows of Output]
};

// The values that each block of Output must hold, for operations of a placement. Units are blocks: element i of the
// block is the sum of element i of the terms' blocks.
struct BlockExpectation {
  std::vector<uint32_t> input_blocks;            // [n_ranks]
  std::vector<std::vector<ExpectedRow>> output;  // [n_ranks][blocks of Output]
};

struct CheckInput {
  const Plan& plan;                      // with the programs of all ranks
  std::span<const Binding> bindings;     // [n_ranks]
  const RowExpectation* rows = nullptr;  // instead of the operation's own meaning; required where rows move
  // [n_ranks] whether each rank works in place; null: all or none, as the shape says.
  const std::vector<bool>* in_place = nullptr;
  // Elements that are moved and then never used are not a fault. Everything else is proved as usual.
  bool allow_waste = false;
  const BlockExpectation* blocks = nullptr;  // required for operations of a placement that move blocks
};

// Returns success, or moecclInternalError with a message that names rank, lane, step and chunk and the fault there.
Status check(const CheckInput& input);

// Does the same for a standard operation of equal blocks.
Status check(const Plan& plan);

// Returns [n_ranks] bindings of a standard operation of equal blocks: shape.count elements each, with slots of one
// chunk (rounded up to 64 bytes).
std::vector<Binding> uniform_bindings(const Plan& plan);

}  // namespace moeccl::plan
