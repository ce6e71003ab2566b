// SPDX-License-Identifier: Apache-2.0
// The ranges of a rank's staging that its peers have put to, until what must be done with them is done. The ranges of a
// put that arrives in pieces, over several connections too, are merged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace moeccl::transport {

class ArrivedRanges {
 public:
  struct Range {
    uint64_t offset = 0, bytes = 0;
  };
  // most_bytes: the size up to which ranges are merged.
  explicit ArrivedRanges(uint32_t n_ranks, uint64_t most_bytes = UINT64_MAX)
      : most_bytes_(most_bytes), of_rank_(n_ranks) {}

  // See Arrivals::arrived(). Any thread.
  bool add(uint32_t src_rank, uint64_t offset, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<Range>& ranges = of_rank_[src_rank];
    for (size_t i = ranges.size(), left = kOpen; i > 0 && left > 0; --i, --left) {
      Range& r = ranges[i - 1];
      if (r.offset + r.bytes != offset || bytes > most_bytes_ || r.bytes > most_bytes_ - bytes) continue;
      r.bytes += bytes;
      return true;
    }
    if (ranges.size() == kMost) return false;
    ranges.push_back({offset, bytes});
    return true;
  }
  // Returns what has come from a rank since the last call. The result is good until the next one. One thread at a time.
  std::span<const Range> take(uint32_t src_rank) {
    taken_.clear();
    const std::lock_guard lock(mutex_);
    taken_.swap(of_rank_[src_rank]);
    return taken_;
  }

 private:
  // The most ranges that one peer puts between two calls of take(): a plan has at most kMostSlots slots, each put in a
  // few pieces.
  static constexpr size_t kMost = 1 << 16;
  static constexpr size_t kOpen = 16;  // so many ranges are compared with a new one

  const uint64_t most_bytes_;
  std::mutex mutex_;
  std::vector<std::vector<Range>> of_rank_;  // under the lock
  std::vector<Range> taken_;
};

}  // namespace moeccl::transport
