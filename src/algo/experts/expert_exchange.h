// SPDX-License-Identifier: Apache-2.0
// Shared by bringing experts into their domains (ExpertGather) and summing their gradients on the way back
// (ExpertReturn): which rank holds which experts, the call's shape, and the reading of peers' buffers.
#pragma once

#include <string_view>

#include "src/algo/builder.h"
#include "src/plan/profile.h"
#include "src/routing/domains.h"

namespace moeccl::algo {

struct ExpertExchange {
  // kDirect: peers' buffers are read, each expert at once from where it is.
  enum class Way : uint8_t { kStaged, kDirect };
  uint64_t count = 0;  // elements of an expert
  uint32_t element_bytes = 1;
  plan::Reach reach;
  uint64_t staging_bytes = 0;
  // [levels] bytes that a rank's share of a level's uplink carries in a round trip: this much must be under way at once
  // to keep the line busy. Empty: little.
  std::vector<double> round_trip_bytes = {};
  plan::LongLine long_line = {};  // for explain
  // For data that is summed.
  bool deterministic = false;  // the same bits whatever can be reached
  uint32_t most_sources = 0;   // the most of one reduction; 0: any number
  Way way = Way::kStaged;
};

// Returns ExpertExchange::round_trip_bytes for the tree's or the profile's links.
std::vector<double> round_trip_bytes(const plan::LevelTree& tree, const plan::Profile& profile);

class ExpertExchangePlan {
 public:
  static const char* name_of(ExpertExchange::Way way) {
    return way == ExpertExchange::Way::kDirect ? "direct" : "staged";
  }
  static ExpertExchange::Way way_of(std::string_view name) {
    return name == name_of(ExpertExchange::Way::kDirect) ? ExpertExchange::Way::kDirect : ExpertExchange::Way::kStaged;
  }
  // Returns success, or why this way cannot run, whatever the domains.
  static Status applies(moecclOp_t op, ExpertExchange::Way way, const plan::Reach& reach, bool deterministic);
  const char* name() const { return name_of(direct_ ? ExpertExchange::Way::kDirect : ExpertExchange::Way::kStaged); }
  const Shape& shape() const { return shape_; }
  const Placement& homes() const { return homes_; }
  Chunking chunking() const { return cut(shape_, layout_, chunk_bytes_); }
  uint64_t hash() const;
  // Returns the experts that a rank holds once they are gathered, ascending.
  const std::vector<uint32_t>& held(uint32_t rank) const { return held_[rank]; }

 protected:
  // Signals. A pair of ranks meets at one level only, so one signal for data and one for freed slots serve all levels.
  // The others order a rank's own lanes.
  enum Sig : uint32_t { kData, kCredit, kForwarded, kSummed };
  static constexpr uint32_t kMostBlocks = 1 << 15;  // slots and blocks are 16-bit numbers in plans

  // What a rank sends or gets over one link of the domains.
  struct Message {
    uint32_t peer = 0, level = 0, first_slot = 0;  // of the staging in which it arrives
    std::vector<uint32_t> experts;
  };
  ExpertExchangePlan(moecclOp_t op, const Domains& domains, const Placement& homes, const ExpertExchange& call);
  // Returns the position of an expert among those that the rank holds.
  uint32_t held_block(uint32_t rank, uint32_t expert) const;
  bool holds(uint32_t holder, uint32_t home) const;
  // Sets chunks of direct_bytes, or otherwise of tuning::kExpertMove through the slots that are used.
  void set_layout(uint64_t direct_bytes);
  // Builds one rank's program. `reads(reader, source)` says whether one rank reads another's Input; `move(builder,
  // sources)` adds the steps of a chunk. No rank reads before the source has entered, and no source leaves before its
  // readers are done.
  template <class Reads, class Move>
  Program build_direct(uint32_t rank, Reads&& reads, Move&& move) const {
    ProgramBuilder b(shape_, rank, layout_);
    std::vector<uint32_t> readers, sources;
    for (uint32_t i = 1; i < shape_.n_ranks; ++i) {
      if (reads(b.after(i), rank)) readers.push_back(b.after(i));
      if (reads(rank, b.before(i))) sources.push_back(b.before(i));
    }
    b.when(When::kFirst);
    for (const uint32_t r : readers) b.signal(r, kData);
    for (const uint32_t s : sources) b.wait(s, kData);
    b.when(When::kEvery);
    move(b, sources);
    b.when(When::kLast);
    for (const uint32_t s : sources) b.signal(s, kCredit);
    for (const uint32_t r : readers) b.wait(r, kCredit);
    return std::move(b).finish();
  }

  const Domains& domains_;
  const Placement& homes_;
  Shape shape_;
  Layout layout_;
  bool direct_ = false;
  std::vector<uint32_t> used_slots_;            // [n_ranks]
  std::vector<std::vector<Message>> sent_;      // [n_ranks] by level, then rank
  std::vector<std::vector<Message>> received_;  // the same

 private:
  // Returns the experts that a rank holds before the AllGather of `level`, in the order in which they came.
  std::vector<uint32_t> experts_of(uint32_t rank, uint32_t level) const;

  uint64_t chunk_bytes_ = 0;
  std::vector<double> round_trip_bytes_;
  std::vector<std::vector<uint32_t>> held_;  // [n_ranks]
};

}  // namespace moeccl::algo
