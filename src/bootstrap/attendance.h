// SPDX-License-Identifier: Apache-2.0
// Which ranks a meeting of survivors still awaits. A rank that has not come is given up while every rank that has
// joined reports it as gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/bootstrap/bootstrap.h"

namespace moeccl::bootstrap {

class Attendance {
 public:
  explicit Attendance(size_t n_ranks) : came_(n_ranks), reported_(n_ranks), expected_by_(n_ranks) {}

  void comes(size_t rank) { came_[rank] = true; }
  // The rank has come. It joins by its first report; a later one takes the place of the one before.
  void reports(size_t rank, RankSet gone) {
    const RankSet before = std::exchange(reported_[rank], std::move(gone));
    for (size_t r = 0; r < expected_by_.size(); ++r) {
      if (!before.empty() && !before[r]) --expected_by_[r];
      if (!reported_[rank][r]) ++expected_by_[r];
    }
  }
  bool awaits(size_t rank) const { return reported_[rank].empty() && (came_[rank] || expected_by_[rank] > 0); }
  // Called when a rank has come.
  bool complete() const {
    for (size_t rank = 0; rank < expected_by_.size(); ++rank)
      if (awaits(rank)) return false;
    return true;
  }

 private:
  RankSet came_;
  std::vector<RankSet> reported_;      // as gone; empty: the rank has not joined
  std::vector<uint32_t> expected_by_;  // how many ranks have joined that do not report the rank as gone
};

}  // namespace moeccl::bootstrap
