// SPDX-License-Identifier: Apache-2.0
// Corrects a profile from what operations took. Pure and bounded: the same observations in the same order give the same
// profile on every rank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "src/plan/profile.h"

namespace moeccl::plan {

struct Observation {
  moecclOp_t op = moecclOpAllReduce;
  std::string algorithm;  // as in PlanFit
  uint8_t reach = 0;
  double bytes = 0;    // of the block
  double took_ns = 0;  // on the rank that came last; the same number on all ranks
};

class Corrector {
 public:
  // Observations of one plan and size class that are looked at together; their median decides.
  static constexpr size_t kWindow = 9;
  // A median within this factor of the prediction is no finding.
  static constexpr double kTolerance = 1.5;
  // What one finding changes at most, and all of them together. Predictions are only raised, and lowered again no
  // further than they were raised: the rank that came last sees the least that a plan takes, so that a short time
  // proves nothing.
  static constexpr double kMostAtOnce = 2, kMostInAll = 8;

  // True when it changed `profile`: the curve's points around the observed size. Plans that it does not know are left
  // alone.
  bool observe(Profile& profile, const Observation& o);

 private:
  using Key = std::tuple<int, std::string, uint8_t, int>;  // operation, algorithm, reach, size class or point
  std::map<Key, std::vector<double>> windows_;             // took / predicted
  std::map<Key, double> factors_;                          // of each point so far
};

}  // namespace moeccl::plan
