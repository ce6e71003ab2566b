// SPDX-License-Identifier: Apache-2.0
// Records when each lane of a plan was busy with each chunk. Timelines are drawn from these records.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "src/plan/plan.h"

namespace moeccl::exec {

struct LaneSpan {
  plan::LaneKind lane = plan::LaneKind::kMain;
  uint32_t chunk = 0;
  int64_t start_ns = 0, end_ns = 0;  // from the operation's start
};

// Holds the spans of a finished operation. May be used from any thread.
class LaneRecord {
 public:
  void set(std::vector<LaneSpan> spans) {
    const std::lock_guard lock(mutex_);
    spans_ = std::move(spans);
  }
  std::vector<LaneSpan> get() const {
    const std::lock_guard lock(mutex_);
    return spans_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<LaneSpan> spans_;
};

// Collects the spans of one running operation. Used by one thread.
class LaneTrace {
 public:
  static constexpr uint32_t kMostChunks = 1024;

  void begin(uint32_t n_chunks, int64_t start_ns) {
    start_ns_ = start_ns;
    n_chunks_ = std::min(n_chunks, kMostChunks);
    spans_.clear();
    for (int kind = 0; kind < 4; ++kind)
      for (uint32_t c = 0; c < n_chunks_; ++c) spans_.push_back({static_cast<plan::LaneKind>(kind), c, 0, -1});
  }
  bool on() const { return !spans_.empty(); }
  // Records that work on `chunk` took [from, to), on the clock of `start_ns`. Copies inside a rank count as the copy
  // lane's, whatever lane they are in, because they use the same resource.
  void note(plan::LaneKind lane, uint32_t chunk, int64_t from, int64_t to) {
    if (chunk >= n_chunks_) return;
    LaneSpan& s = spans_[static_cast<size_t>(lane) * n_chunks_ + chunk];
    const bool first = s.end_ns < 0;
    s.start_ns = first ? from - start_ns_ : std::min(s.start_ns, from - start_ns_);
    s.end_ns = std::max(s.end_ns, to - start_ns_);
  }
  // Returns the spans of lanes that did something, by lane and chunk.
  std::vector<LaneSpan> take() {
    std::erase_if(spans_, [](const LaneSpan& s) { return s.end_ns < 0; });
    return std::move(spans_);
  }

 private:
  int64_t start_ns_ = 0;
  uint32_t n_chunks_ = 0;
  std::vector<LaneSpan> spans_;
};

// Returns text for a human reader: when each lane was busy, and how much of that time the lanes before it were busy
// too. `spans` is what take() returns.
std::string lanes_text(const std::vector<LaneSpan>& spans);

}  // namespace moeccl::exec
