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

// The layout is [most_tokens] u8 experts of each token, padded to two bytes, then the experts, u16.
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
  const auto resident = static_cast<uint16_t>(n_experts + rank);
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
    bool waits = packed.residents == Residents::kOfAll || (packed.residents == Residents::kOfLone && count == 0);
    for (uint32_t k = 0; k < count; ++k, experts += sizeof(uint16_t)) {
      uint16_t e = 0;
      std::memcpy(&e, experts, sizeof(e));
      if (e >= n_experts || canonical[e] <= last) return bad("experts out of order");
      last = canonical[e];
      if (waits && last > canonical[resident]) all.expert.push_back(resident), waits = false;
      all.expert.push_back(e);
    }
    if (waits) all.expert.push_back(resident);
    all.first_choice.push_back(all.expert.size());
  }
  return {};
}

}  // namespace

Result<AllChoices> unpack_choices(const PackedChoices& packed, const Placement& placement,
                                  std::span<const uint32_t> canonical) {
  const uint32_t n_experts = placement.n_experts() - (packed.residents != Residents::kNone ? placement.n_ranks : 0);
  AllChoices all;
  all.first_token.assign(1, 0);
  for (const uint64_t n : packed.tokens) all.first_token.push_back(all.first_token.back() + n);
  all.first_choice.reserve(all.n_tokens() + 1);
  all.first_choice.assign(1, 0);
  all.expert.reserve(all.n_tokens() * (packed.top_k + (packed.residents == Residents::kOfAll ? 1 : 0)));
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

ResidualRows ResidualRows::make(const AllChoices& choices, const Placement& placement, uint32_t rank,
                                Residents residents, const RoutingTables& before) {
  const bool expert_major = before.expert_major();
  const bool inlined = residents == Residents::kOfLone;
  const uint32_t n_real = placement.n_experts() - (residents != Residents::kNone ? placement.n_ranks : 0);
  ResidualRows r;
  r.n_rows = before.n_rows();
  r.first_of_token.reserve(choices.n_tokens() + 1);
  r.first_of_token.assign(1, 0);
  size_t real = 0;  // local choices of the plain routing so far
  for (uint64_t t = 0; t < choices.n_tokens(); ++t) {
    const size_t first = r.row.size();
    bool leads = inlined && !choices.of(t).empty() && placement.owner[choices.of(t)[0]] == rank;
    for (const uint16_t e : choices.of(t)) {
      if (placement.owner[e] != rank) continue;
      uint32_t row = 0, residual = kNone;
      float weight = 1.0f;
      if (e >= n_real) {
        row = static_cast<uint32_t>(r.n_rows++);
        r.of_tokens.push_back({static_cast<uint32_t>(t - choices.first_token[rank]), row});
        // In the Rows layout, a rank has one row of a token, and the residual is added to that sum.
        if (!expert_major && r.row.size() > first) r.residual[first] = row;
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

ResidualRows ResidualRows::at_home(const RoutingTables& before, uint64_t n_tokens) {
  ResidualRows r;
  r.n_rows = before.n_rows() + n_tokens;
  for (uint64_t t = 0; t < n_tokens; ++t)
    r.of_tokens.push_back({static_cast<uint32_t>(t), static_cast<uint32_t>(before.n_rows() + t)});
  return r;
}

}  // namespace moeccl::algo
