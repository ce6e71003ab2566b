// SPDX-License-Identifier: Apache-2.0
// The pure part of a combine that delivers samples to other homes (NetMoE, Section 3). A sample is a run of consecutive
// tokens of a rank; its home is the rank that it goes to.
//
// A re-placing combine is the plain combine of another routing: the one in which every token began at its new home.
// Plans depend on the paths alone, so every algorithm's combine (and dispatch, its mirror) can be used unchanged; only
// the row lists differ. All ranks know all choices, so each rank makes the lists of any placement by itself.
//
// Residual (Appendix A): a token's input is added where its row of the first expert (in canonical order) is summed,
// with weight 1, so it costs no extra row on any link. A token without experts has no such row. A resident, an extra
// expert that every rank has and that only such tokens of this rank choose, carries its input. A residual that no
// expert received (the stream around a normed MoE layer, shared experts' outputs) has no such row for any token; then
// every token of a rank chooses the rank's resident.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/routing/routing_tables.h"

namespace moeccl::algo {

// The tokens that choose their old home's resident.
enum class Residents : uint8_t { kNone, kOfLone, kOfAll };  // kOfLone: tokens without experts

// Returns the placement with one more expert on every rank: number n_experts + rank.
Placement with_residents(const Placement& placement);

// The kept choices of every rank's tokens. Tokens are numbered over all ranks in order.
struct AllChoices {
  std::vector<uint64_t> first_token;   // [n_ranks + 1]
  std::vector<uint64_t> first_choice;  // [tokens + 1]
  std::vector<uint16_t> expert;        // token by token, in canonical order
  uint64_t n_tokens() const { return first_token.empty() ? 0 : first_token.back(); }
  std::span<const uint16_t> of(uint64_t token) const {
    return {expert.data() + first_choice[token], first_choice[token + 1] - first_choice[token]};
  }
};
// Packs one rank's choices into bytes, whose number all ranks know.
size_t packed_choices_bytes(uint64_t most_tokens, uint32_t top_k);
void pack_choices(const OwnChoices& own, std::byte* out);
// The packed choices of each rank, which has tokens[rank] tokens. Nothing in the bytes is trusted.
struct PackedChoices {
  const std::byte* first = nullptr;
  size_t stride = 0;  // bytes from one rank's choices to the next rank's
  std::span<const uint64_t> tokens;
  uint32_t top_k = 1;
  Residents residents = Residents::kNone;
};
Result<AllChoices> unpack_choices(const PackedChoices& packed, const Placement& placement,
                                  std::span<const uint32_t> canonical);

// Checks that the choices are those that the rank's tables were made from: both come from peers, which may contradict
// themselves. Residents do not count.
Status check_against(const RoutingTables& tables, const AllChoices& choices, const Placement& placement, uint32_t rank);

// Samples of `tokens` tokens each, numbered over all ranks in order.
struct Samples {
  uint64_t tokens = 1;
  std::vector<uint32_t> first;  // [n_ranks + 1]
  uint32_t n() const { return first.back(); }
  uint32_t home(uint32_t sample) const;
  // Fails when a rank's tokens are not a whole number of samples.
  static Result<Samples> make(uint64_t tokens, std::span<const uint64_t> tokens_of);
};

// The num of Eq. 2 for the placement solver, in the rows that the algorithm's combine returns, so that Eq. 3 gives
// exactly the rows between nodes. Without deduplication, columns are experts. With it, a token counts once for a rank
// (hier:1, and always in the Rows layout) or once for a node (hier:2 and more). Columns are then ranks, and a node's
// tokens are shared out over its ranks in proportion to the tokens that choose each.
struct SampleCounts {
  int32_t n_columns = 0;
  std::vector<int32_t> device;  // [n_columns]
  std::vector<int32_t> num;     // [samples][n_columns]
  std::vector<int32_t> next;    // the same for the next layer, or empty
};
struct CountRequest {
  MoeAlgorithm algorithm;
  bool expert_major = true;
  const Placement* placement = nullptr;  // the placement that choices refer to, with residents
  std::span<const int32_t> node;         // [n_ranks]
  uint32_t n_nodes = 1;
};
SampleCounts count_samples(const CountRequest& request, const AllChoices& choices, const Samples& samples);

// The next layer's rows in the same columns, for one rank's own samples: the second term of Eq. 5, in the unit of the
// first.
//
// Uses choices that are known token by token, next[tokens][top_k], -1: none. Fails if no routing could have them.
Result<std::vector<int32_t>> next_of_choices(const CountRequest& request, const CanonicalOrder& order, const TopK& next,
                                             uint32_t top_k, uint64_t sample_tokens);
// Uses counts, next[samples][n_experts]. Counts do not say how many choices of a token share a row, so the share is
// assumed to be the same as in this layer: that of the same sample on the same rank or node, or that of all the rank's
// samples if this one has nothing there. Equal counts give equal rows.
std::vector<int32_t> next_of_counts(const CountRequest& request, const OwnChoices& own, uint32_t n_experts,
                                    std::span<const int32_t> next, uint64_t sample_tokens);

// The tokens of each home: those of the samples that it gets, ascending.
struct Homes {
  std::vector<uint64_t> first;  // [n_ranks + 1]
  std::vector<uint64_t> token;  // by (home, index there): the token's number
  Homes(const Samples& samples, std::span<const int32_t> placement, uint32_t n_ranks);
};

// The layout of combine's input on one rank: the rows of dispatch, then the residual's. Independent of homes.
struct ResidualRows {
  uint64_t n_rows = 0;  // of combine's input
  // By local choice, token by token: the row, its weight, and the row of the token's residual that is summed after it.
  std::vector<uint32_t> row, residual;
  std::vector<float> weight;             // empty without weights
  std::vector<uint64_t> first_of_token;  // [tokens + 1]
  // Where the caller's residual goes: row `from` of dispatch's output (or of the rank's tokens) goes to row `to` of
  // combine's input. In ExpertMajor it is stored there; in Rows it is added to what is there.
  struct Move {
    uint32_t from, to;
  };
  std::vector<Move> of_rows, of_tokens;
  static constexpr uint32_t kNone = ~0u;

  // `before` holds the tables of the plain routing, whose rows keep their places.
  static ResidualRows make(const AllChoices& choices, const Placement& placement, uint32_t rank, Residents residents,
                           const RoutingTables& before);
  // For a step in which every token stays and its input goes into its rank's resident. row, residual, weight and
  // first_of_token stay empty, because HomeRecords needs none of them for the routing's own records.
  static ResidualRows at_home(const RoutingTables& before, uint64_t n_tokens);
};

// How many chunks are needed, over all edges and ranks, and the rows of the fullest edge.
struct Cut {
  uint32_t n_chunks = 0;  // 0: no cut fits
  uint64_t largest_edge_rows = 0;
};
Cut find_cut(const Paths& paths, const Placement& placement, const AllChoices& choices, const Homes& homes,
             uint64_t slot_rows);

// Makes every origin's records for this rank as if tokens had begun at their homes, and builds the tables from them.
class HomeRecords {
 public:
  HomeRecords(const RankPaths& rank, const Paths& paths, const AllChoices& choices, const Homes& homes,
              const ResidualRows& rows);
  // For tokens that all stay. Uses what the plain routing received (views[n_ranks]; this rank's own as view_of()
  // returns it) and adds each token's rank's resident after its choices. rows: at_home().
  HomeRecords(const RankPaths& rank, std::span<const RecordView> views, std::span<const uint64_t> tokens_of,
              const RoutingTables& before, const ResidualRows& rows);
  // The caller still has to call build() of the tables.
  Status fill(RoutingTables& tables, const MoeShape& shape, bool weighted, const RoutingTables& before) const;

 private:
  struct Origin {
    std::vector<uint32_t> token;
    std::vector<uint8_t> n_experts;
    std::vector<uint16_t> expert;
    std::vector<float> weight;
  };
  const RankPaths& rank_;
  const ResidualRows& rows_;
  std::vector<Origin> origins_;
  std::vector<uint64_t> tokens_of_;
  std::vector<uint32_t> row_, residual_;  // by new local choice
};

}  // namespace moeccl::algo
