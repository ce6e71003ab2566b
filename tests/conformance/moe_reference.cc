// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/moe_reference.h"

#include <algorithm>
#include <map>
#include <set>

namespace moeccl::testing {
namespace {

size_t sz(int v) { return static_cast<size_t>(v); }

}  // namespace

std::vector<int32_t> owners_of(const MoeShape& shape) {
  if (shape.owners == Owners::kDefault) return {};
  std::vector<int32_t> owner;
  const int owning = shape.owners == Owners::kFewRanks ? (shape.n + 1) / 2 : shape.n;
  for (int e = 0; e < shape.n_experts; ++e) owner.push_back(shape.n - 1 - e % owning);
  return owner;
}

MoeReference::MoeReference(const MoeShape& shape, moecclMoeLayout_t layout, std::vector<int> owner, uint64_t seed)
    : shape_(shape),
      layout_(layout),
      owner_(std::move(owner)),
      seed_(seed),
      ranks_(sz(shape.n)),
      rows_(sz(shape.n)),
      row_of_choice_(sz(shape.n)) {
  for (int r = 0; r < shape.n; ++r) {
    draw_tokens(r);
    row_of_choice_[sz(r)].assign(ranks_[sz(r)].index.size(), -1);
  }
  for (int r = 0; r < shape.n; ++r) lay_out(r);
}

void MoeReference::draw_tokens(int rank) {
  PerRank& r = ranks_[sz(rank)];
  const uint64_t h = mix(seed_, sz(rank));
  switch (shape_.spread) {
    case Tokens::kEven:
      r.n_tokens = shape_.tokens;
      break;
    case Tokens::kRagged:
      r.n_tokens = h % (shape_.tokens + 1);
      break;
    case Tokens::kSomeZero:
      r.n_tokens = (sz(rank) + seed_) % 2 == 0 ? 0 : shape_.tokens;
      break;
    case Tokens::kAllZero:
      r.n_tokens = 0;
      break;
  }
  r.index.resize(r.n_tokens * sz(shape_.top_k));
  r.weight.resize(r.index.size());
  for (size_t t = 0; t < r.n_tokens; ++t) draw_choices(r, t, mix(h, t + 1));
  drop_beyond_capacity(r);
}

void MoeReference::draw_choices(PerRank& r, size_t token, uint64_t seed) const {
  std::set<int> taken;
  for (int k = 0; k < shape_.top_k; ++k) {
    const size_t at = token * sz(shape_.top_k) + sz(k);
    r.weight[at] = static_cast<float>(1 + (mix(seed, 1000 + sz(k)) & 1));  // 1 or 2: exact in every type
    int expert = -1;
    for (uint64_t tries = 0; expert < 0; ++tries) {
      uint64_t h = mix(seed, sz(k) * 100003 + tries);
      if (shape_.choices == Choices::kHoles && tries == 0 && h % 3 == 0) break;
      auto e = static_cast<int>(h % sz(shape_.n_experts));
      if (shape_.choices == Choices::kSkewed) e = static_cast<int>(sz(e) * (h >> 32 & 0xffff) >> 16);
      if (shape_.choices == Choices::kOneExpert) e = (k + shape_.n_experts / 2) % shape_.n_experts;
      if (taken.insert(e).second) expert = e;
    }
    r.index[at] = expert;
  }
}

void MoeReference::drop_beyond_capacity(PerRank& r) const {
  std::vector<int> sent(sz(shape_.n_experts));
  r.drops.assign(sz(shape_.n_experts), 0);
  r.kept.assign(r.index.size(), 0);
  for (size_t i = 0; i < r.index.size(); ++i) {
    if (r.index[i] < 0) continue;
    const size_t e = sz(r.index[i]);
    const bool fits = shape_.capacity == 0 || sent[e] < shape_.capacity;
    r.kept[i] = fits;
    if (fits)
      ++sent[e];
    else
      ++r.drops[e];
  }
}

void MoeReference::lay_out(int rank) {
  const std::vector<int> local = local_experts(rank);
  std::vector<ExpectedRow>& rows = rows_[sz(rank)];
  const auto each_choice = [&](auto&& visit) {
    for (int src = 0; src < shape_.n; ++src) {
      const PerRank& from = ranks_[sz(src)];
      for (size_t i = 0; i < from.index.size(); ++i) {
        if (from.kept[i] && owner_[sz(from.index[i])] == rank) visit(src, i, from);
      }
    }
  };
  if (layout_ == moecclLayoutRows) {
    each_choice([&](int src, size_t i, const PerRank& from) {
      const int token = static_cast<int>(i / sz(shape_.top_k));
      if (rows.empty() || rows.back().src != src || rows.back().token != token)
        rows.push_back({.src = src, .token = token, .local = {}});
      const auto at = std::lower_bound(local.begin(), local.end(), from.index[i]) - local.begin();
      rows.back().local.emplace_back(static_cast<int>(at), from.weight[i]);
      row_of_choice_[sz(src)][i] = static_cast<int64_t>(rows.size() - 1);
    });
    for (ExpectedRow& row : rows) std::sort(row.local.begin(), row.local.end());
    return;
  }
  for (int expert : local) {
    each_choice([&](int src, size_t i, const PerRank& from) {
      if (from.index[i] != expert) return;
      row_of_choice_[sz(src)][i] = static_cast<int64_t>(rows.size());
      rows.push_back({src, static_cast<int>(i / sz(shape_.top_k)), expert, from.weight[i], {}});
    });
    while (shape_.align > 1 && rows.size() % sz(shape_.align) != 0) rows.push_back({});
  }
}

bool MoeReference::kept(int rank, size_t token, int choice) const {
  return ranks_[sz(rank)].kept[token * sz(shape_.top_k) + sz(choice)] != 0;
}

std::vector<int> MoeReference::local_experts(int rank) const {
  std::vector<int> local;
  for (int e = 0; e < shape_.n_experts; ++e) {
    if (owner_[sz(e)] == rank) local.push_back(e);
  }
  return local;
}

size_t MoeReference::n_unique(int rank) const {
  std::set<std::pair<int, int>> unique;
  for (const ExpectedRow& row : rows(rank)) {
    if (row.src >= 0) unique.emplace(row.src, row.token);
  }
  return unique.size();
}

std::vector<MoeReference::Where> MoeReference::rows_of(int src, size_t token) const {
  std::vector<Where> found;
  const PerRank& from = ranks_[sz(src)];
  for (int k = 0; k < shape_.top_k; ++k) {
    const size_t i = token * sz(shape_.top_k) + sz(k);
    if (!from.kept[i]) continue;
    const int rank = owner_[sz(from.index[i])];
    const auto row = static_cast<size_t>(row_of_choice_[sz(src)][i]);
    const bool seen =
        std::any_of(found.begin(), found.end(), [&](const Where& w) { return w.rank == rank && w.row == row; });
    if (!seen) found.push_back({rank, row, k});
  }
  return found;
}

Number MoeReference::token_value(int rank, size_t token, size_t element) const {
  const auto v = static_cast<int>(mix(seed_ ^ 0x70c3, mix((sz(rank) << 32) + token, element)) % 3);
  const int value = is_signed(shape_.type) ? v - 1 : v % 2;
  return is_float(shape_.type) ? Number{static_cast<double>(value), 0}
                               : Number{0, static_cast<uint64_t>(static_cast<int64_t>(value))};
}

Number MoeReference::row_value(int rank, size_t row, size_t element) const {
  const ExpectedRow& r = rows(rank)[row];
  // Depends on source, token and expert, so that any mix-up of rows is noticed.
  const uint64_t who =
      (sz(r.src) << 40) + (sz(r.token) << 16) + sz(r.expert + 1) + (layout_ == moecclLayoutRows ? sz(rank) << 56 : 0);
  const auto v = static_cast<int>(mix(seed_ ^ 0x40b1, mix(who, element)) % 3);
  const int value = is_signed(shape_.type) ? v - 1 : v % 2;
  return is_float(shape_.type) ? Number{static_cast<double>(value), 0}
                               : Number{0, static_cast<uint64_t>(static_cast<int64_t>(value))};
}

uint64_t MoeReference::crossings(int rank, const std::vector<int>& group_of_rank) const {
  uint64_t crossed = 0;
  for (size_t t = 0; t < n_tokens(rank); ++t) {
    std::set<int> groups;
    for (const Where& w : rows_of(rank, t)) groups.insert(group_of_rank[sz(w.rank)]);
    groups.erase(group_of_rank[sz(rank)]);
    crossed += groups.size();
  }
  return crossed;
}

}  // namespace moeccl::testing
