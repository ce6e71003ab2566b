// SPDX-License-Identifier: Apache-2.0
// Judges how well `auto` followed in a layer whose best plan changes while it runs. Pure: measures nothing itself.
#ifndef PERF_MOE_DRIFT_H_
#define PERF_MOE_DRIFT_H_

#include <string>
#include <vector>

namespace perf {

// One step, which all plans ran in turn: the slowest rank's time of dispatch and combine after an update.
struct DriftStep {
  size_t phase = 0;
  std::string plan;  // that auto ran
  double auto_us = 0;
  std::vector<double> forced_us;  // [plans]
};

struct DriftTrace {
  std::vector<std::string> phases, plans;
  std::vector<DriftStep> steps;
};

inline constexpr double kGood = 1.10;    // a plan within this factor of the phase's best is as right as the best
inline constexpr double kStays = 0.9;    // share of the steps after auto has followed
inline constexpr double kDiffers = 1.3;  // what keeping the old plan must cost, or the trace shows nothing
inline constexpr int kFollowWithin = 20;
inline constexpr double kOverOracle = 1.10;

struct DriftPhase {
  std::string name, best;
  size_t first = 0, n_steps = 0;
  double best_us = 0;             // median
  std::vector<double> forced_us;  // [plans] medians
  double keeping = 0;    // the preceding phase's best plan relative to this phase's, by medians; 0 in the first phase
  int followed_in = -1;  // steps until auto runs a good plan and keeps to it; -1: never
  double auto_us = 0, oracle_us = 0;  // sums over the phase
};

struct DriftSummary {
  std::vector<DriftPhase> phases;
  double over_oracle = 0;           // total time of auto relative to the oracle that switches at once
  bool shows = true;                // the best plan changes with each phase, by kDiffers
  std::vector<std::string> broken;  // the limits that do not hold, one sentence each
};
DriftSummary summarize(const DriftTrace& trace);

std::string drift_json(const std::string& command, const DriftTrace& trace, const DriftSummary& summary);
std::string drift_plot(const std::string& heading, const DriftTrace& trace, const DriftSummary& summary);

}  // namespace perf

#endif  // PERF_MOE_DRIFT_H_
