// SPDX-License-Identifier: Apache-2.0
// Corrects a profile from the times that operations took. The correction is pure and bounded: the same observations in
// the same order give the same profile on every rank.
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
  // Number of observations of one plan and size class that are evaluated together. Their median decides.
  static constexpr size_t kWindow = 9;
  // A median within this factor of the prediction is not a finding.
  static constexpr double kTolerance = 1.5;
  // The most that one finding changes, and the most that all findings change together. Predictions are only raised, and
  // lowered again no further than they were raised: the rank that came last sees the least time that a plan takes, so a
  // short time proves nothing.
  static constexpr double kMostAtOnce = 2, kMostInAll = 8;

  // Returns true if it changed `profile`: the curve's points around the observed size. Plans that the profile does not
  // know are left alone.
  bool observe(Profile& profile, const Observation& o);

 private:
  using Key = std::tuple<int, std::string, uint8_t, int>;  // operation, algorithm, reach, size class or point
  std::map<Key, std::vector<double>> windows_;             // took / predicted
  std::map<Key, double> factors_;                          // of each point, so far
};

}  // namespace moeccl::plan
