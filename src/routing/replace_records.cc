// SPDX-License-Identifier: Apache-2.0
// The records and the cut of a routing whose tokens begin at other homes.
#include <algorithm>
#include <bit>

#include "src/routing/replace.h"

namespace moeccl::algo {

namespace {

// Counts the rows of the fullest block of any edge when tokens are cut into n_chunks, and the rows that a slot needs
// for it.
class BlockCounter {
 public:
  BlockCounter(const Paths& paths, const Placement& placement, const AllChoices& choices, const Homes& homes,
               uint64_t slot_rows)
      : paths_(paths),
        placement_(placement),
        choices_(choices),
        homes_(homes),
        slot_rows_(slot_rows),
        rows_(size_t{n()} * n()) {
    for (uint32_t r = 0; r < n(); ++r) ways_.emplace_back(paths, placement, r);
  }

  struct Fullest {
    uint64_t block = 0, slot = 0;
  };
  Fullest fullest(uint64_t n_chunks) {
    std::vector<uint64_t> at(homes_.first.begin(), homes_.first.end() - 1);
    Fullest most;
    for (uint64_t chunk = 0; chunk < n_chunks; ++chunk) {
      std::fill(rows_.begin(), rows_.end(), 0);
      for (uint32_t origin = 0; origin < n(); ++origin) {
        const uint64_t tokens = homes_.first[origin + 1] - homes_.first[origin];
        // As in RoutingTables, chunk c ends before the least t with t * C / T >= c + 1.
        const uint64_t end = homes_.first[origin] + ((chunk + 1) * tokens + n_chunks - 1) / n_chunks;
        for (; at[origin] < end; ++at[origin]) count(origin, choices_.of(homes_.token[at[origin]]));
      }
      for (uint32_t from = 0; from < n(); ++from) {
        for (uint32_t to = 0; to < n(); ++to) {
          const uint64_t rows = rows_[size_t{from} * n() + to];
          if (rows == 0) continue;
          most.block = std::max(most.block, rows);
          most.slot = std::max(most.slot, paths_.widths().in_slot(paths_.hop(from, to), rows, slot_rows_));
        }
      }
    }
    return most;
  }

 private:
  uint32_t n() const { return paths_.n_ranks(); }
  void count(uint32_t origin, std::span<const uint16_t> experts) {
    std::span<const uint32_t> before;
    for (const uint16_t e : experts) {
      const std::span<const uint32_t> way = ways_[origin].to(placement_.owner[e]);
      // A row that already travels is on the way of the previous choice (HierMoE Eq. 7).
      size_t shared = 0;
      if (paths_.algorithm().dedup())
        while (shared < way.size() && shared < before.size() && way[shared] == before[shared]) ++shared;
      for (size_t h = shared; h < way.size(); ++h) ++rows_[size_t{h == 0 ? origin : way[h - 1]} * n() + way[h]];
      before = way;
    }
  }
  const Paths& paths_;
  const Placement& placement_;
  const AllChoices& choices_;
  const Homes& homes_;
  const uint64_t slot_rows_;
  std::vector<Ways> ways_;
  std::vector<uint32_t> rows_;  // [from][to]
};

}  // namespace

Cut find_cut(const Paths& paths, const Placement& placement, const AllChoices& choices, const Homes& homes,
             uint64_t slot_rows) {
  BlockCounter counter(paths, placement, choices, homes, slot_rows);
  uint64_t most_tokens = 1;
  for (uint32_t r = 0; r < paths.n_ranks(); ++r)
    most_tokens = std::max(most_tokens, homes.first[r + 1] - homes.first[r]);
  const uint64_t limit = std::bit_ceil(most_tokens);
  Cut cut;
  const BlockCounter::Fullest whole = counter.fullest(1);
  cut.largest_edge_rows = whole.block;
  if (whole.slot <= slot_rows) {
    cut.n_chunks = 1;
    return cut;
  }
  uint64_t n = std::min(limit, std::bit_ceil((whole.slot + slot_rows - 1) / slot_rows));
  for (;; n *= 2) {
    if (counter.fullest(n).slot <= slot_rows) {
      cut.n_chunks = static_cast<uint32_t>(n);
      return cut;
    }
    if (n >= limit) return cut;
  }
}

HomeRecords::HomeRecords(const RankPaths& rank, const Paths& paths, const AllChoices& choices, const Homes& homes,
                         const ResidualRows& rows)
    : rank_(rank), rows_(rows), origins_(paths.n_ranks()) {
  const Placement& placement = rank.placement;
  std::vector<bool> through(paths.n_ranks());
  for (uint32_t o = 0; o < paths.n_ranks(); ++o) {
    Origin& origin = origins_[o];
    const bool own = o == rank.rank;
    const Ways ways(paths, placement, o);
    for (uint32_t x = 0; x < paths.n_ranks(); ++x) {
      const std::span<const uint32_t> way = ways.to(x);
      through[x] = own || std::find(way.begin(), way.end(), rank.rank) != way.end();
    }
    tokens_of_.push_back(homes.first[o + 1] - homes.first[o]);
    for (uint64_t i = homes.first[o]; i < homes.first[o + 1]; ++i) {
      const uint64_t token = homes.token[i];
      uint64_t local = rows.first_of_token[token];
      uint32_t n_here = 0;
      for (const uint16_t e : choices.of(token)) {
        const bool here = placement.owner[e] == rank.rank;
        const uint64_t at = here ? local++ : 0;
        if (!through[placement.owner[e]]) continue;
        origin.expert.push_back(e);
        ++n_here;
        if (here) row_.push_back(rows.row[at]), residual_.push_back(rows.residual[at]);
        // Weights are applied where the experts' rows are, so those of other ranks are never read.
        if (!rows.weight.empty() && here)
          origin.weight.push_back(rows.weight[at]);
        else if (own)
          origin.weight.push_back(1.0f);
      }
      if (n_here == 0 && !own) continue;
      origin.token.push_back(static_cast<uint32_t>(i - homes.first[o]));
      origin.n_experts.push_back(static_cast<uint8_t>(n_here));
    }
  }
}

HomeRecords::HomeRecords(const RankPaths& rank, std::span<const RecordView> views, std::span<const uint64_t> tokens_of,
                         const RoutingTables& before, const ResidualRows& rows)
    : rank_(rank), rows_(rows), origins_(views.size()), tokens_of_(tokens_of.begin(), tokens_of.end()) {
  const Placement& placement = rank.placement;
  const auto resident = static_cast<uint16_t>(placement.n_experts() - placement.n_ranks + rank.rank);
  size_t local = 0;  // choices so far
  const bool weighted = before.weighted() && before.expert_major();
  for (uint32_t o = 0; o < views.size(); ++o) {
    Origin& origin = origins_[o];
    const bool own = o == rank.rank;
    size_t first_row = 0;  // of the token
    const auto add = [&](uint16_t e) {
      const bool here = placement.owner[e] == rank.rank;
      float weight = 1.0f;
      origin.expert.push_back(e);
      if (e == resident) {
        const uint32_t row = rows.of_tokens[origin.token.size()].to;
        // The same as in ResidualRows::make.
        if (!before.expert_major() && row_.size() > first_row) residual_[first_row] = row;
        row_.push_back(row), residual_.push_back(RoutingTables::kNoRow);
      } else if (here) {
        const uint32_t row = before.choice_row[local++];
        if (weighted) weight = before.choice_weight[row];
        row_.push_back(row), residual_.push_back(RoutingTables::kNoRow);
      }
      if (own || here) origin.weight.push_back(weight);
    };
    size_t choice = 0;
    for (uint32_t i = 0; i < views[o].n_records; ++i) {
      bool waits = own;
      const size_t first = origin.expert.size();
      first_row = row_.size();
      for (uint32_t k = 0; k < views[o].n_experts[i]; ++k, ++choice) {
        const uint16_t e = views[o].expert[choice];
        if (waits && rank.canonical[e] > rank.canonical[resident]) add(resident), waits = false;
        add(e);
      }
      if (waits) add(resident);
      origin.token.push_back(views[o].token[i]);
      origin.n_experts.push_back(static_cast<uint8_t>(origin.expert.size() - first));
    }
  }
}

Status HomeRecords::fill(RoutingTables& tables, const MoeShape& shape, bool weighted,
                         const RoutingTables& before) const {
  std::vector<RecordView> views;
  for (const Origin& o : origins_) {
    views.push_back({static_cast<uint32_t>(o.token.size()), static_cast<uint32_t>(o.expert.size()),
                     static_cast<uint32_t>(weighted ? o.weight.size() : 0), o.token.data(), o.n_experts.data(),
                     o.expert.data(), weighted ? o.weight.data() : nullptr});
  }
  MOECCL_TRY(tables.receive(rank_, shape, views, tokens_of_, weighted));
  tables.take_rows(row_, residual_, rows_.n_rows, before);
  return {};
}

}  // namespace moeccl::algo
