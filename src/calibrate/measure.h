// SPDX-License-Identifier: Apache-2.0
// The measuring part of calibration: times plans and links through the communicator's own calls, so that all ranks see
// the same numbers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/calibrate/calibrate.h"

namespace moeccl::comm {

// Times several things in rounds. Every thing runs in every round, so that a disturbance meets all of them, and the
// result is the median over rounds of the slowest rank's time. Collective.
class Stopwatch {
 public:
  Stopwatch(Communicator& comm, const CalibrateOptions& options);

  // Runs a thing once. The number of the round lets it use other memory each time. Null on ranks that have no part in
  // it: they sleep meanwhile, for the sake of ranks that share their core.
  using Once = std::function<Status(uint32_t round)>;
  struct Times {
    std::vector<double> ns;                   // [things] of one run; things given up early have their first batch's
    std::vector<std::vector<double>> rounds;  // [round][things] as measured; 0: given up, or out of time
    bool out_of_time = false;
  };
  // Every thing is timed once as long as the whole budget lasts, and in rounds as long as its share does. A thing whose
  // first batch took `give_up` times the fastest one's is not run again; 0: none is given up. `pass`, of several,
  // decides which memory the rounds use.
  Result<Times> time(const std::vector<Once>& things, double give_up, uint32_t pass);
  // The same for physical rather than typical times: the lower quartile over seven times as many, shorter rounds.
  Result<Times> time_links(const std::vector<Once>& things);
  bool out_of_time() const { return out_of_time_; }
  // Returns an error that says how much time is needed, if not every thing was timed at least once.
  Status enough(const Times& times, const char* what) const;
  // The following measurements end at this share of the budget.
  void limit(double share) {
    share_ = share;
    out_of_time_ = false;
  }

 private:
  // One batch. Its result is the slowest rank's time; rank 0's clock decides for all whether time is over.
  struct Batch {
    uint32_t round = 0, repeat = 1;
    double expected_ns = 0;  // of one run
  };
  Result<double> batch(const Once& once, const Batch& b);
  struct Rounds {
    int n = 5;
    uint32_t first = 0;
    double batch_ms = 2, quantile = 0.5, give_up = 0;
  };
  Result<Times> rounds(const std::vector<Once>& things, const Rounds& how);

  Communicator& comm_;
  CalibrateOptions options_;
  int64_t start_ns_;
  double share_ = 1, took_ms_ = 0;
  bool out_of_time_ = false;
};

// Measures levels' ping-pongs, and HierMoE's AlltoAlls of ranks that meet at each level (Fig. 9).
Status measure_links(Communicator& comm, Stopwatch& watch, plan::Profile& profile);
// Measures the rates of copies and sums: one core's, in the caches and beyond, and a host's.
Status measure_memory(Communicator& comm, Stopwatch& watch, plan::Profile& profile);
// Measures every algorithm of the standard collectives over sizes.
Status measure_plans(Communicator& comm, Stopwatch& watch, const CalibrateOptions& options, plan::Profile& profile);

}  // namespace moeccl::comm
