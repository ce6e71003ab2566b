// SPDX-License-Identifier: Apache-2.0
#include "src/routing/replace.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace moeccl::algo {

Placement with_residents(const Placement& placement) {
  std::vector<int32_t> owner(placement.owner.begin(), placement.owner.end());
  for (uint32_t r = 0; r < placement.n_ranks; ++r) owner.push_back(static_cast<int32_t>(r));
  return std::move(Placement::make(static_cast<int64_t>(owner.size()), placement.n_ranks, owner.data()).value());
}

// [most_tokens] u8 experts of each token, padded to two bytes, then the experts, u16.
size_t packed_choices_bytes(uint64_t most_tokens, uint32_t top_k) {
  return (most_tokens + 1) / 2 * 2 + most_tokens * top_k * sizeof(uint16_t);
}

void pack_choices(const OwnChoices& own, std::byte* out) {
  if (own.n_tokens == 0) return;
  std::memcpy(out, own.n_experts.data(), own.n_tokens);
  if (!own.expert.empty())
    std::memcpy(out + (own.n_tokens + 1) / 2 * 2, own.expert.data(), own.expert.size() * sizeof(uint16_t));
}

namespace {

Status unpack_rank(const PackedChoices& packed, uint32_t rank, uint32_t n_experts, std::span<const uint32_t> canonical,
                   AllChoices& all) {
  const auto bad = [&](const char* what) {
    return error(moecclInternalError, "choices of rank {} are wrong: {}", rank, what);
  };
  const uint64_t n = packed.tokens[rank];
  const std::byte* at = packed.first + rank * packed.stride;
  const std::byte* experts = at + (n + 1) / 2 * 2;
  for (uint64_t t = 0; t < n; ++t) {
    const auto count = static_cast<uint32_t>(at[t]);
    if (count > packed.top_k) return bad("too many experts of a token");
    int64_t last = -1;
    for (uint32_t k = 0; k < count; ++k, experts += sizeof(uint16_t)) {
      uint16_t e = 0;
      std::memcpy(&e, experts, sizeof(e));
      if (e >= n_experts || canonical[e] <= last) return bad("experts out of order");
      last = canonical[e];
      all.expert.push_back(e);
    }
    if (count == 0 && packed.residents) all.expert.push_back(static_cast<uint16_t>(n_experts + rank));
    all.first_choice.push_back(all.expert.size());
  }
  return {};
}

}  // namespace

Result<AllChoices> unpack_choices(const PackedChoices& packed, const Placement& placement,
                                  std::span<const uint32_t> canonical) {
  const uint32_t n_experts = placement.n_experts() - (packed.residents ? placement.n_ranks : 0);
  AllChoices all;
  all.first_token.assign(1, 0);
  for (const uint64_t n : packed.tokens) all.first_token.push_back(all.first_token.back() + n);
  all.first_choice.reserve(all.n_tokens() + 1);
  all.first_choice.assign(1, 0);
  all.expert.reserve(all.n_tokens() * packed.top_k);
  for (uint32_t r = 0; r < placement.n_ranks; ++r) MOECCL_TRY(unpack_rank(packed, r, n_experts, canonical, all));
  return all;
}

Status check_against(const RoutingTables& tables, const AllChoices& choices, const Placement& placement,
                     uint32_t rank) {
  for (uint32_t origin = 0; origin < placement.n_ranks; ++origin) {
    uint64_t local = 0;
    for (uint64_t c = choices.first_choice[choices.first_token[origin]];
         c < choices.first_choice[choices.first_token[origin + 1]]; ++c)
      local += choices.expert[c] < placement.n_experts() && placement.owner[choices.expert[c]] == rank;
    const uint64_t known = tables.choice_first[origin + 1] - tables.choice_first[origin];
    if (local != known)
      return error(moecclRemoteError, "rank {} names {} choices of rank {}'s experts, its routing had {}", origin,
                   local, rank, known);
  }
  return {};
}

uint32_t Samples::home(uint32_t sample) const {
  return static_cast<uint32_t>(std::upper_bound(first.begin(), first.end(), sample) - first.begin() - 1);
}

Result<Samples> Samples::make(uint64_t tokens, std::span<const uint64_t> tokens_of) {
  Samples s{tokens, {0}};
  for (uint32_t r = 0; r < tokens_of.size(); ++r) {
    if (tokens_of[r] % tokens != 0)
      return error(moecclInvalidArgument,
                   "rank {} has {} tokens, which are no whole samples of {}: pad its last sample", r, tokens_of[r],
                   tokens);
    s.first.push_back(s.first.back() + static_cast<uint32_t>(tokens_of[r] / tokens));
  }
  return s;
}

// ---- Eq. 2 ----

namespace {

enum class Unit { kChoice, kRank, kNode };
Unit unit_of(const CountRequest& r) {
  if (r.algorithm.dedup()) return r.algorithm.dims > 1 ? Unit::kNode : Unit::kRank;
  return r.expert_major ? Unit::kChoice : Unit::kRank;
}

// Shares `total` of each node out over its ranks in proportion to weight[rank], whole tokens, largest remainders first.
class NodeShares {
 public:
  explicit NodeShares(const CountRequest& r) : members_(r.n_nodes) {
    for (uint32_t rank = 0; rank < r.node.size(); ++rank) members_[static_cast<size_t>(r.node[rank])].push_back(rank);
  }
  void share(std::span<const int32_t> total, std::span<const int32_t> weight, int32_t* out) {
    for (size_t n = 0; n < members_.size(); ++n) share_node(members_[n], total[n], weight, out);
  }

 private:
  void share_node(const std::vector<uint32_t>& ranks, int64_t total, std::span<const int32_t> weight, int32_t* out) {
    int64_t sum = 0, given = 0;
    for (const uint32_t r : ranks) sum += weight[r];
    if (sum == 0) return;
    order_ = ranks;
    for (const uint32_t r : ranks) given += out[r] = static_cast<int32_t>(total * weight[r] / sum);
    std::stable_sort(order_.begin(), order_.end(),
                     [&](uint32_t a, uint32_t b) { return total * weight[a] % sum > total * weight[b] % sum; });
    for (size_t i = 0; given < total; ++i, ++given) ++out[order_[i % order_.size()]];
  }
  std::vector<std::vector<uint32_t>> members_;
  std::vector<uint32_t> order_;
};

}  // namespace

SampleCounts count_samples(const CountRequest& r, const AllChoices& choices, const Samples& samples) {
  const Unit unit = unit_of(r);
  const uint32_t n_ranks = r.placement->n_ranks;
  SampleCounts counts;
  if (unit == Unit::kChoice) {
    counts.device.assign(r.placement->owner.begin(), r.placement->owner.end());
  } else {
    counts.device.resize(n_ranks);
    std::iota(counts.device.begin(), counts.device.end(), 0);
  }
  const size_t columns = counts.device.size();
  counts.n_columns = static_cast<int32_t>(columns);
  counts.num.assign(samples.n() * columns, 0);
  NodeShares shares(r);
  std::vector<int32_t> by_rank(n_ranks), by_node(r.n_nodes);
  for (uint32_t i = 0; i < samples.n(); ++i) {
    int32_t* num = counts.num.data() + i * columns;
    std::fill(by_rank.begin(), by_rank.end(), 0);
    std::fill(by_node.begin(), by_node.end(), 0);
    for (uint64_t t = i * samples.tokens; t < (i + 1) * samples.tokens; ++t) {
      // Choices stand in canonical order: those of a rank, and of a node, are neighbours.
      int64_t last_rank = -1, last_node = -1;
      for (const uint16_t e : choices.of(t)) {
        const uint32_t owner = r.placement->owner[e];
        if (unit == Unit::kChoice) ++num[e];
        by_rank[owner] += owner != last_rank;
        by_node[static_cast<size_t>(r.node[owner])] += r.node[owner] != last_node;
        last_rank = owner, last_node = r.node[owner];
      }
    }
    if (unit == Unit::kRank) std::copy(by_rank.begin(), by_rank.end(), num);
    if (unit == Unit::kNode) shares.share(by_node, by_rank, num);
  }
  return counts;
}

void count_next(const CountRequest& r, std::span<const int32_t> next, uint32_t n_experts, SampleCounts& counts) {
  const size_t columns = counts.device.size(), n_samples = n_experts == 0 ? 0 : next.size() / n_experts;
  counts.next.assign(n_samples * columns, 0);
  for (size_t i = 0; i < n_samples; ++i)
    for (uint32_t e = 0; e < n_experts; ++e)
      counts.next[i * columns + (unit_of(r) == Unit::kChoice ? e : r.placement->owner[e])] += next[i * n_experts + e];
}

// ---- Homes ----

Homes::Homes(const Samples& samples, std::span<const int32_t> placement, uint32_t n_ranks) : first(n_ranks + 1, 0) {
  for (const int32_t home : placement) first[static_cast<size_t>(home) + 1] += samples.tokens;
  std::partial_sum(first.begin(), first.end(), first.begin());
  token.resize(first.back());
  std::vector<uint64_t> filled(first.begin(), first.end() - 1);
  for (uint32_t i = 0; i < placement.size(); ++i)
    for (uint64_t t = 0; t < samples.tokens; ++t)
      token[filled[static_cast<size_t>(placement[i])]++] = i * samples.tokens + t;
}

ResidualRows ResidualRows::make(const AllChoices& choices, const Placement& placement, uint32_t rank, bool inlined,
                                const RoutingTables& before) {
  const bool expert_major = before.expert_major();
  const uint32_t n_real = placement.n_experts() - (inlined ? placement.n_ranks : 0);
  ResidualRows r;
  r.n_rows = before.n_rows();
  r.first_of_token.reserve(choices.n_tokens() + 1);
  r.first_of_token.assign(1, 0);
  size_t real = 0;  // local choices of the plain routing so far
  for (uint64_t t = 0; t < choices.n_tokens(); ++t) {
    bool leads = inlined && !choices.of(t).empty() && placement.owner[choices.of(t)[0]] == rank;
    for (const uint16_t e : choices.of(t)) {
      if (placement.owner[e] != rank) continue;
      uint32_t row = 0, residual = kNone;
      float weight = 1.0f;
      if (e >= n_real) {
        row = static_cast<uint32_t>(r.n_rows++);
        r.of_tokens.push_back({static_cast<uint32_t>(t - choices.first_token[rank]), row});
      } else {
        row = before.choice_row[real++];
        if (expert_major) weight = before.choice_weight[row];
        if (leads && expert_major) residual = static_cast<uint32_t>(r.n_rows++);
        if (leads) r.of_rows.push_back({row, expert_major ? residual : row});
      }
      leads = false;
      r.row.push_back(row);
      r.residual.push_back(residual);
      if (before.weighted()) r.weight.push_back(weight);
    }
    r.first_of_token.push_back(r.row.size());
  }
  return r;
}

}  // namespace moeccl::algo
