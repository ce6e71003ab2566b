// SPDX-License-Identifier: Apache-2.0
// Judges how well `auto` chooses among the plans of a MoE layer, from what was measured at each point. Pure: measures
// nothing itself.
#ifndef PERF_MOE_ACCURACY_H_
#define PERF_MOE_ACCURACY_H_

#include <cstdint>
#include <string>
#include <vector>

namespace perf {

inline constexpr const char* kFlatAgain = "flat again";  // flat's second run in each round: the noise

// A layer on a paced tree.
struct AccuracyCell {
  std::string topology, latency;  // latency is empty where levels differ
  int ranks = 8, levels = 0;
  size_t tokens = 0, hidden = 2048;
  int top_k = 6, n_experts = 64;
  std::string routing = "uniform";
  bool of_m1 = false;  // only flat and hier:1 are right

  // Returns "3 levels, lat 2ms, 4 tokens, uniform, top-6 of 64".
  std::string name() const;
  // Returns a command that measures and explains only this point, with the plans of the list.
  std::string command(const std::string& plans) const;
};

struct PlanTimes {
  std::string asked;        // flat, kFlatAgain, 2dh, hier:1, ..., auto
  std::string ran;          // in most rounds
  double predicted_us = 0;  // 0: unknown
  std::vector<double> us;   // dispatch + combine of the slowest rank in each round
  size_t n_ran = 0;         // rounds that ran it
};

struct AccuracyPoint {
  AccuracyCell cell;
  std::vector<PlanTimes> plans;
  int steps_to_settle = 0;  // of auto, before its rounds
  int times_again = 0;      // rounds that were added because auto lost
  uint64_t n_wrong = 0;

  const PlanTimes& plan(const std::string& asked) const;
  double median_us(const std::string& asked) const;
  // Returns the fastest forced plan.
  const PlanTimes& best() const;
  // Return ratios of medians: auto to the best forced plan, auto to flat, and flat to itself.
  double regret() const;
  double over_flat() const;
  double flat_over_flat() const;
  // Returns the ratio of the forced plan that auto ran last to the best forced plan: 1 when they are the same one.
  double choice_regret() const;
  // Returns how much flat itself varies, at least 1.
  double noise() const;
  // Returns whether auto takes more than kOverFlat times flat's time, times the noise.
  bool loses_to_flat() const;
  bool wrong_choice() const;
  // Returns |predicted / measured - 1| of each forced plan with a prediction.
  std::vector<double> errors() const;
};

inline constexpr double kOverFlat = 1.05;

// 0: no limit.
struct AccuracyLimits {
  double regret_mean = 0, regret_worst = 0, error_median = 0;
  double choice = 0;       // of choice_regret, at each point, times the point's noise
  bool over_flat = false;  // no point where auto loses to flat
};
inline constexpr AccuracyLimits kGridLimits = {1.10, 1.30, 0.15, 0, true};
inline constexpr AccuracyLimits kLinksLimits = {0, 0, 0, 1.05, false};

struct AccuracySummary {
  size_t n = 0;
  double regret_mean = 1, regret_worst = 1;  // mean: geometric
  std::string regret_worst_at;
  double over_flat_mean = 1, over_flat_worst = 1;
  std::string over_flat_worst_at;
  double flat_over_flat_mean = 1, flat_over_flat_worst = 1;
  int n_over_flat = 0;       // points where auto takes more than kOverFlat times flat's time
  int n_flat_over_flat = 0;  // points where flat takes that much more than itself
  int n_loses = 0;           // points of n_over_flat that exceed the point's own noise
  int n_wrong_choice = 0;    // points of M1's command with a plan other than flat and hier:1
  double error_median = 0;
  size_t n_errors = 0;
  uint64_t n_wrong = 0;
  double choice_mean = 1, choice_worst = 1;  // of choice_regret
  std::string choice_worst_at;

  std::vector<std::string> broken;  // the limits that do not hold, one sentence each
};
AccuracySummary summarize(const std::vector<AccuracyPoint>& points, const AccuracyLimits& limits);

std::string accuracy_json(const std::string& command, const std::vector<AccuracyPoint>& points,
                          const AccuracySummary& summary, const AccuracyLimits& limits);
std::string accuracy_plot(const std::string& heading, const std::vector<AccuracyPoint>& points,
                          const AccuracySummary& summary);

}  // namespace perf

#endif  // PERF_MOE_ACCURACY_H_
