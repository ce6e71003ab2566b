// SPDX-License-Identifier: Apache-2.0
// The figures of a run of one feature, and their output.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "transformer.h"

namespace training {

// One step as seen by all ranks.
struct StepReport {
  StepFacts facts;
  double kind_ms[Times::kKinds] = {};  // by kind of operation, from the last rank's begin to the last rank's end
  double node_mb = 0, inner_mb = 0;    // stored by the tokens' communicator between nodes, and inside them
  double busiest_mb = 0;               // most into or out of one node
  double communication_ms() const;
};
// Returns the bytes [n] that this rank has stored into each rank since it joined.
std::vector<uint64_t> traffic(const Ranks& ranks);
// Combines the ranks' figures of a step. `before` is traffic() at its beginning. Collective.
StepReport join(const Ranks& ranks, const StepFacts& facts, const std::vector<uint64_t>& before, int ranks_per_node);

struct Run {
  std::string name;
  std::vector<double> loss;                     // of each step
  std::vector<std::vector<StepReport>> rounds;  // of the timed steps
  int swaps = 0;
  double slot_choices = 0;  // choices of a step, in layers whose slots have a capacity

  // Returns the median over the rounds of each round's smallest value: other load on the machine only adds to it.
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
  // Returns the largest relative difference of a step's loss from another run's.
  double apart(const Run& other) const;
  static double median(std::vector<double> v);
};

double step_ms(const StepReport& s);
double combine_ms(const StepReport& s);
double communication_ms(const StepReport& s);

// Prints all runs, compared with runs[0].
void print_table(const std::vector<Run>& runs);
// Prints a line of JSON for perf/papers per result that the runs allow: see perf/paper_rows.
void print_rows(const std::vector<Run>& runs, const std::string& data, const std::string& options);
bool write_svg(const std::string& path, const std::vector<Run>& runs, const std::string& note);

}  // namespace training
