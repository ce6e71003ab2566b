// SPDX-License-Identifier: Apache-2.0
// The ranks that one thread drives, and their collective calls apart from the measured operation: barriers and sums.
#ifndef PERF_COMMON_TEAM_H_
#define PERF_COMMON_TEAM_H_

#include <moeccl/collectives.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "perf/common/job.h"
#include "perf/common/stats.h"
#include "perf/common/timer.h"

namespace perf {

class Team {
 public:
  // apart: use separate communicators for these calls, so that a forced plan or a paced link does not affect them.
  // With options.grouping, comm(i), rank(i) and n_ranks() are those of a group, and these calls combine all groups.
  Team(std::vector<moecclComm_t> comms, int first_rank, bool apart, const JobOptions& options);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team();

  size_t size() const { return comms_.size(); }
  int rank(size_t i) const { return ranks_[i]; }
  int n_ranks() const { return n_ranks_; }
  // Among the ranks of all groups.
  int job_rank(size_t i) const { return first_rank_ + static_cast<int>(i); }
  int n_job_ranks() const { return n_job_ranks_; }
  moecclComm_t comm(size_t i) const { return comms_[i]; }

  // Calls one operation for each rank, as a group when there are several.
  void each(const char* call, const std::function<moecclResult_t(size_t i)>& operation) const;

  void barrier() const;
  // Combines each value over all ranks. Every rank of this team contributes the same values.
  std::vector<double> combine(const std::vector<double>& values, moecclBuiltinRedOp_t op) const;
  // Sums over ranks. values[i] is the value of rank(i).
  uint64_t sum(const std::vector<uint64_t>& values) const;
  // Runs body after a barrier and returns its time.
  template <class Body>
  double timed_us(Body&& body) const {
    barrier();
    const auto start = Clock::now();
    body();
    return since_us(start);
  }
  // Returns the median over iterations of the slowest rank's times.
  double slowest(const std::vector<double>& us) const { return median(combine(us, moecclMax)); }
  // Returns every rank's record of `bytes` bytes, in rank order. `records` holds those of this team.
  std::vector<char> gather(const std::vector<char>& records, size_t bytes) const;

 private:
  void each_control(const char* call, const std::function<moecclResult_t(size_t i)>& operation) const;

  void split(const JobOptions& options);

  std::vector<moecclComm_t> all_;      // of all ranks
  std::vector<moecclComm_t> comms_;    // of this rank's group, or those of all ranks
  std::vector<moecclComm_t> control_;  // of all ranks
  std::vector<int> ranks_;             // in the group
  int first_rank_;
  int n_ranks_ = 0, n_job_ranks_ = 0;
};

}  // namespace perf

#endif  // PERF_COMMON_TEAM_H_
