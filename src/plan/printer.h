// SPDX-License-Identifier: Apache-2.0
// Explains a plan to a human reader: which plan, why, what it costs, and the steps of one rank.
#pragma once

#include <span>
#include <string>

#include "src/plan/cost.h"
#include "src/plan/plan.h"

namespace moeccl::plan {

// A plan that was considered.
struct PlanCandidate {
  std::string name;
  double predicted_ns = 0;
  std::string refusal;  // why it does not apply; "" if it does
};

struct Explanation {
  const Plan& plan;  // has the programs of all ranks, or only that of `rank`
  const LevelTree& tree;
  const Cost& cost;
  uint32_t rank = 0;
  std::string why = {};  // "cheapest of 4", "forced by MOECCL_PLAN"
  std::span<const PlanCandidate> candidates = {};
  double measured_ns = 0;  // 0: not run yet
  bool emulated = false;   // links are paced
  // The candidates' prices are for blocks of this size if each rank knows only its own sizes.
  uint64_t priced_block_bytes = 0;
};

// Returns a page whose lines end with \n.
std::string explain(const Explanation& e);

// Return texts such as "12.3 us" and "1.50 MiB".
std::string time_text(double ns);
std::string bytes_text(uint64_t bytes);
// Lists numbers in order, with runs as ranges: "3..7, 0..2".
std::string list_text(std::span<const uint32_t> numbers);
// Lists the steps of a program, one per line, indented; steps that repeat for several peers appear once.
std::string steps_text(const Program& program);

}  // namespace moeccl::plan
