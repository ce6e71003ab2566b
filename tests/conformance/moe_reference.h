// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine by definition: every rank computes all ranks' routing from the seed and looks up its expected
// rows.
#pragma once

#include <string>
#include <vector>

#include "tests/conformance/element.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

enum class Tokens { kEven, kRagged, kSomeZero, kAllZero };
enum class Choices { kUniform, kSkewed, kOneExpert, kHoles };
enum class Owners { kDefault, kRoundRobin, kFewRanks };  // kFewRanks: half of the ranks own no experts

struct MoeShape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  size_t hidden_bytes;
  moecclDataType_t type;
  int top_k, n_experts;
  size_t tokens;  // the most on a rank
  Tokens spread = Tokens::kEven;
  Choices choices = Choices::kUniform;
  Owners owners = Owners::kDefault;
  int align = 0, capacity = 0;
  size_t staging_bytes = 0;  // of the communicator; 0: the default

  size_t elements() const { return hidden_bytes / moecclTypeSize(type); }
};
inline std::ostream& operator<<(std::ostream& out, const MoeShape& shape) {
  return out << shape.n << " ranks as " << shape.mode;
}

// One row that a rank receives. Rows are in the order of the layout.
struct ExpectedRow {
  int src = -1, token = -1;                  // -1: padding
  int expert = -1;                           // ExpertMajor: global number
  float weight = 0;                          // ExpertMajor
  std::vector<std::pair<int, float>> local;  // Rows: local expert and weight, ascending
};

class MoeReference {
 public:
  // owner[n_experts]
  MoeReference(const MoeShape& shape, moecclMoeLayout_t layout, std::vector<int> owner, uint64_t seed);

  size_t n_tokens(int rank) const { return ranks_[static_cast<size_t>(rank)].n_tokens; }
  const int32_t* index(int rank) const { return ranks_[static_cast<size_t>(rank)].index.data(); }
  const float* weight(int rank) const { return ranks_[static_cast<size_t>(rank)].weight.data(); }
  bool kept(int rank, size_t token, int choice) const;  // neither empty nor dropped
  const std::vector<int32_t>& drops(int rank) const { return ranks_[static_cast<size_t>(rank)].drops; }
  std::vector<int> local_experts(int rank) const;
  const std::vector<ExpectedRow>& rows(int rank) const { return rows_[static_cast<size_t>(rank)]; }
  size_t n_unique(int rank) const;
  // Returns the rows on all ranks that a token produced: (rank, row).
  struct Where {
    int rank;
    size_t row;
    int choice;  // ExpertMajor: the token's choice
  };
  std::vector<Where> rows_of(int src, size_t token) const;

  // Contents are small integers, so that every order and grouping of the sums is exact.
  Number token_value(int rank, size_t token, size_t element) const;
  Number row_value(int rank, size_t row, size_t element) const;  // combine's input, by the row's identity
  // Returns how many distinct groups other than its own this rank's tokens must reach. group_of_rank[n].
  uint64_t crossings(int rank, const std::vector<int>& group_of_rank) const;

 private:
  struct PerRank {
    size_t n_tokens = 0;
    std::vector<int32_t> index;
    std::vector<float> weight;
    std::vector<char> kept;
    std::vector<int32_t> drops;
  };
  void draw_tokens(int rank);
  void draw_choices(PerRank& r, size_t token, uint64_t seed) const;
  void drop_beyond_capacity(PerRank& r) const;
  void lay_out(int rank);

  const MoeShape& shape_;
  moecclMoeLayout_t layout_;
  std::vector<int> owner_;
  uint64_t seed_;
  std::vector<PerRank> ranks_;
  std::vector<std::vector<ExpectedRow>> rows_;
  // [rank][token * top_k + choice]: the row on the owner
  std::vector<std::vector<int64_t>> row_of_choice_;
};

std::vector<int32_t> owners_of(const MoeShape& shape);  // empty for kDefault

}  // namespace moeccl::testing
