// SPDX-License-Identifier: Apache-2.0
// The ranks that one thread drives, and their collective calls apart from the measured operation: barriers and sums.
#ifndef PERF_COMMON_TEAM_H_
#define PERF_COMMON_TEAM_H_

#include <moeccl/collectives.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace perf {

class Team {
 public:
  // apart: use separate communicators for these calls, so that a forced plan or a paced link does not affect them.
  Team(std::vector<moecclComm_t> comms, int first_rank, bool apart);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team();

  size_t size() const { return comms_.size(); }
  int rank(size_t i) const { return first_rank_ + static_cast<int>(i); }
  int n_ranks() const { return n_ranks_; }
  moecclComm_t comm(size_t i) const { return comms_[i]; }

  // Calls one operation for each rank, as a group when there are several.
  void each(const char* call, const std::function<moecclResult_t(size_t i)>& operation) const;

  void barrier() const;
  // Combines each value over all ranks. Every rank of this team contributes the same values.
  std::vector<double> combine(const std::vector<double>& values, moecclBuiltinRedOp_t op) const;
  // Sums over ranks. values[i] is the value of rank(i).
  uint64_t sum(const std::vector<uint64_t>& values) const;
  // Returns every rank's record of `bytes` bytes, in rank order. `records` holds those of this team.
  std::vector<char> gather(const std::vector<char>& records, size_t bytes) const;

 private:
  void each_control(const char* call, const std::function<moecclResult_t(size_t i)>& operation) const;

  std::vector<moecclComm_t> comms_;
  std::vector<moecclComm_t> control_;
  bool apart_;
  int first_rank_;
  int n_ranks_ = 0;
};

}  // namespace perf

#endif  // PERF_COMMON_TEAM_H_
