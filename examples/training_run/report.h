// SPDX-License-Identifier: Apache-2.0
// What a run of one feature was like, and how it is shown.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "transformer.h"

namespace training {

// A step as all ranks saw it.
struct StepReport {
  StepFacts facts;
  double kind_ms[Times::kKinds] = {};  // of operations, from the last rank's beginning to the last rank's end
  double node_mb = 0, inner_mb = 0;    // stored by tokens' communicator between nodes, and inside them
  double busiest_mb = 0;               // into or out of one node
  double communication_ms() const;
};
// The bytes that each rank has stored into others since it joined: [n] of this rank.
std::vector<uint64_t> traffic(const Ranks& ranks);
// Joins what the ranks know of a step. `before`: traffic() at its beginning. Collective.
StepReport join(const Ranks& ranks, const StepFacts& facts, const std::vector<uint64_t>& before, int ranks_per_node);

struct Run {
  std::string name;
  std::vector<double> loss;                     // of each step
  std::vector<std::vector<StepReport>> rounds;  // of the steps that were timed
  int swaps = 0;
  double slot_choices = 0;  // of a step, in layers whose slots have a capacity

  // Median over the rounds of each round's least value: what else runs on the machine only adds.
  template <class Value>
  double typical(Value&& value) const {
    std::vector<double> least;
    for (const auto& round : rounds) {
      double low = value(round.front());
      for (const StepReport& s : round) low = std::min(low, static_cast<double>(value(s)));
      least.push_back(low);
    }
    return median(least);
  }
  // The largest difference of a step's loss from another run's, relatively.
  double apart(const Run& other) const;
  static double median(std::vector<double> v);
};

double step_ms(const StepReport& s);
double combine_ms(const StepReport& s);

// runs[0] is what the others are compared with.
void print_table(const std::vector<Run>& runs);
// A line of JSON for perf/papers of each result that the runs allow: see perf/paper_rows.
void print_rows(const std::vector<Run>& runs, const std::string& data, const std::string& options);
bool write_svg(const std::string& path, const std::vector<Run>& runs, const std::string& note);

}  // namespace training
