// SPDX-License-Identifier: Apache-2.0
// One rank's own choices and the records that it sends to the others. The origin of a token knows the whole way of its
// rows (routing_paths.h), so it writes one record for each rank that handles the token, owner or forwarder, and one
// all-to-all carries all records.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

// What all ranks know alike about a layer.
struct MoeShape {
  uint32_t top_k = 1;
  uint64_t row_bytes = 1;
  uint64_t max_tokens = 0;
  uint32_t capacity = 0;  // 0: no capacity
  bool expert_major = false;
  uint32_t align_rows = 1;    // only with expert_major
  bool grouped = false;       // deterministic: SumBlock terms carry the groups of the full tree
  uint64_t scaled_bytes = 0;  // a row with its scales, if rows may have scales
  bool by_choice = false;     // flat alone: sums are in the order of a token's choices
  uint64_t widest_row() const { return scaled_bytes > row_bytes ? scaled_bytes : row_bytes; }
};

// Checks the levels of `tree` that sums need as nested groups; the kernels have kernels::kMaxGroups accumulators.
Status check_groups(const plan::LevelTree& tree);

struct TopK {
  const int32_t* index = nullptr;  // [n_tokens][top_k], -1: none
  const float* weight = nullptr;   // same shape, or null: all ones
  uint64_t n_tokens = 0;
};

// This rank's choices that remain after the capacity was applied; each token's are in canonical order.
struct OwnChoices {
  uint64_t n_tokens = 0;
  bool weighted = false;
  std::vector<uint32_t> token;       // [n_tokens] 0, 1, ...: the same form as a received record's
  std::vector<uint8_t> n_experts;    // [n_tokens]
  std::vector<uint16_t> expert;      // choices, token by token
  std::vector<float> weight;         // same index; empty unless weighted
  std::vector<uint32_t> choice;      // same index: token * top_k + k
  std::vector<int32_t> drop_counts;  // [n_experts]
  uint64_t n_dropped = 0;

  // Takes O(T K) for tokens whose choices are nearly sorted. Memory is reused.
  Status assign(const MoeShape& shape, const Placement& placement, const CanonicalOrder& order, const TopK& topk);

 private:
  std::vector<uint32_t> kept_;  // [n_experts] tokens so far, for capacity
};

// Returns the status of OwnChoices::assign for one token's choices.
Status check_choices(const CanonicalOrder& order, std::span<const int32_t> choices, uint64_t token);

// Counts the rows that this rank's own tokens put on the links, at all hops of their way: the counts of Eq. 7 and
// Algorithm 1. Levels are those of the full tree.
struct LevelCount {
  uint64_t rows = 0;   // across this level, all groups together
  uint64_t peak = 0;   // to the group that gets the most: max(p) of Eq. 2, 4 and 5
  uint64_t reach = 0;  // groups that get any rows
};
// The ways of `rank`'s rows with the groups that their hops enter. Groups are numbered through all levels.
struct RowWays : Ways {
  RowWays(const Paths& paths, const plan::LevelTree& tree, const Placement& placement, uint32_t rank);
  // Returns the ways on which the choices of one rank share a row, and choices of several ranks share none: what flat
  // and 2dh return in layout Rows.
  RowWays shared_by_rank() const;
  // Returns ways of one hop, into one group: these count the rows that experts get. A rank's choices share a row unless
  // each expert has rows of its own.
  static RowWays into_experts(const Placement& placement, bool expert_major);
  bool dedup = false;
  uint32_t n_groups = 0;
  std::vector<uint32_t> group;  // of each hop: the rank's group on the level that the hop crosses

 private:
  RowWays() = default;
};
// Returns true if combine returns fewer rows than dispatch sends.
inline bool returns_fewer(const MoeAlgorithm& algorithm, const MoeShape& shape) {
  return !algorithm.dedup() && !shape.expert_major;
}
// Returns the rows that go to each group. `ways` are those of the rank whose choices these are.
std::vector<uint32_t> rows_to_groups(const RowWays& ways, const Placement& placement, const OwnChoices& own);
void count_rows(const RowWays& ways, const plan::LevelTree& tree, const Placement& placement, const OwnChoices& own,
                std::vector<LevelCount>& levels);
// Makes the counts of count_rows() from the rows that go to each group. to_group: level by level.
void sum_levels(const plan::LevelTree& tree, std::span<const uint32_t> to_group, std::vector<LevelCount>& levels);

// Returns the words of a message, see RecordView; 0 without records.
size_t message_words(size_t records, size_t choices, size_t weights);

// The records of one origin for one rank, in token order. A message is a header of four words {records, experts,
// weights, 0}, then token [records] u32, n_experts [records] u8, expert [experts] u16, weight [weights] float, each
// padded to words. There are weights only when the step is weighted, and only for experts that the receiver owns.
struct RecordView {
  uint32_t n_records = 0, n_choices = 0, n_weights = 0;
  const uint32_t* token = nullptr;
  const uint8_t* n_experts = nullptr;
  const uint16_t* expert = nullptr;
  const float* weight = nullptr;
  const uint32_t* choice = nullptr;  // as OwnChoices; null for received records
};

class RecordWriter {
 public:
  // Fills words() and bytes(); reuses memory. `ways` are those of the rank whose choices these are.
  void write(const Ways& ways, const Placement& placement, const OwnChoices& own);
  // Does the same with messages written elsewhere. `words` holds them in rank order, with bytes[n_ranks] each.
  void adopt(const Placement& placement, const OwnChoices& own, std::span<const uint32_t> words,
             std::span<const size_t> bytes);

  std::span<const uint32_t> words() const { return words_; }  // messages in rank order
  std::span<const size_t> bytes() const { return bytes_; }    // [n_ranks]; 0: no records
  // Returns this rank's choices that reach an owner, in the order of its records, as positions in OwnChoices.
  std::span<const uint32_t> choices_of(uint32_t owner) const {
    return {by_owner_.data() + owner_first_[owner], owner_first_[owner + 1] - owner_first_[owner]};
  }

 private:
  struct Cursor {
    uint32_t records = 0, choices = 0, weights = 0;  // counts, then write positions
    uint32_t last_token = ~0u;
    uint32_t* token = nullptr;
    uint8_t* n_experts = nullptr;
    uint16_t* expert = nullptr;
    float* weight = nullptr;
  };
  void lay_out();
  void group_by_owner(const Placement& placement, const OwnChoices& own);

  std::vector<Cursor> cursors_;
  std::vector<uint32_t> words_;
  std::vector<size_t> bytes_;
  std::vector<uint32_t> owner_first_, owner_filled_, by_owner_;
};

// Checks the form of a message of `bytes` bytes before anything in it is used.
Result<RecordView> read_records(const uint32_t* words, size_t bytes, bool weighted);
// Returns the same view of a rank's own choices; it has a weight for every choice.
RecordView view_of(const OwnChoices& own);

}  // namespace moeccl::algo
