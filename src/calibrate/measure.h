// SPDX-License-Identifier: Apache-2.0
// The measuring part of calibration: times plans and links through the communicator's own calls, with all ranks seeing
// the same numbers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/calibrate/calibrate.h"

namespace moeccl::comm {

// Rounds over several things to time. Every thing runs in every round, so that a disturbance meets all of them, and
// what counts is the median over rounds of the slowest rank's time. Collective.
class Stopwatch {
 public:
  Stopwatch(Communicator& comm, const CalibrateOptions& options);

  // Runs once. Rounds differ in their number, so that it can use other memory each time. Null on ranks that have no
  // part in it: they sleep meanwhile, for the sake of those that share their core.
  using Once = std::function<Status(uint32_t round)>;
  struct Times {
    std::vector<double> ns;                   // [things] one run's; things given up early have their first batch's
    std::vector<std::vector<double>> rounds;  // [round][things] as they were; 0: given up, or out of time
    bool out_of_time = false;
  };
  // Every thing is timed once as long as the whole budget lasts, and in rounds as long as its share does.
  // A thing whose first batch took `give_up` times the fastest one's is not run again. 0: none is given up. The pass
  // of several decides which memory the rounds use.
  Result<Times> time(const std::vector<Once>& things, double give_up, uint32_t pass);
  // The same for what is physical rather than typical: the lower quartile over three times as many, shorter rounds.
  Result<Times> time_links(const std::vector<Once>& things);
  bool out_of_time() const { return out_of_time_; }
  // Says how much time is needed when not every thing was timed at least once.
  Status enough(const Times& times, const char* what) const;
  // What comes now ends at this share of the budget.
  void limit(double share) {
    share_ = share;
    out_of_time_ = false;
  }

 private:
  // The slowest rank's time of one batch; rank 0's clock decides for all whether time is over.
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

// Levels' ping-pongs, and HierMoE's AlltoAlls of ranks that meet at each level (Fig. 9).
Status measure_links(Communicator& comm, Stopwatch& watch, plan::Profile& profile);
// The rates of copies and sums: one core's, in the caches and beyond, and a host's.
Status measure_memory(Communicator& comm, Stopwatch& watch, plan::Profile& profile);
// Every algorithm of the standard collectives over sizes.
Status measure_plans(Communicator& comm, Stopwatch& watch, const CalibrateOptions& options, plan::Profile& profile);

}  // namespace moeccl::comm
