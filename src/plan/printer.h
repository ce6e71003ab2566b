// SPDX-License-Identifier: Apache-2.0
// Explains a plan to a person: which one, why, what it costs, and the steps of one rank.
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
  std::string refusal;  // why it does not apply; "": it does
};

struct Explanation {
  const Plan& plan;  // its programs: all ranks', or only that of `rank`
  const LevelTree& tree;
  const Cost& cost;
  uint32_t rank = 0;
  std::string why = {};  // "cheapest of 4", "forced by MOECCL_PLAN"
  std::span<const PlanCandidate> candidates = {};
  double measured_ns = 0;  // 0: not run yet
  bool emulated = false;   // links are paced
};

// A page, lines end with \n.
std::string explain(const Explanation& e);

// "12.3 us", "1.50 MiB".
std::string time_text(double ns);
std::string bytes_text(uint64_t bytes);
// Numbers in order, runs as a range: "3..7, 0..2".
std::string list_text(std::span<const uint32_t> numbers);
// The steps of a program, one line each; steps that repeat for several peers stand once. Each line starts with
// `indent`.
std::string steps_text(const Program& program, const std::string& indent);

}  // namespace moeccl::plan
