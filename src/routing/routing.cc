// SPDX-License-Identifier: Apache-2.0
#include "src/routing/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/table.h"

namespace moeccl::algo {

using plan::LevelTree;

Status check_groups(const LevelTree& tree) {
  // There is one accumulator for each level, and one for the total.
  if (tree.depth() + 1 <= static_cast<uint32_t>(kernels::kMaxGroups)) return {};
  return error(moecclUnsupported,
               "deterministic combine over {} topology levels: at most {} are possible; merge levels of the topology",
               tree.depth(), kernels::kMaxGroups - 1);
}

namespace {

constexpr uint32_t kMaxTopK = 64;

// The token's kept choices as keys (canonical position, k), ascending.
struct TokenKeys {
  uint32_t key[kMaxTopK];
  uint32_t n = 0;

  void insert(uint32_t position, uint32_t k) {
    const uint32_t fresh = position * kMaxTopK + k;
    uint32_t i = n++;
    for (; i > 0 && key[i - 1] > fresh; --i) key[i] = key[i - 1];
    key[i] = fresh;
  }
};

Status check_choice(int32_t expert, uint32_t n_experts, uint64_t token, uint32_t k) {
  if (expert >= -1 && expert < static_cast<int32_t>(n_experts)) return {};
  return error(moecclInvalidArgument, "topk_index[{}][{}] is {}: experts are 0..{}, and -1 means none", token, k,
               expert, n_experts - 1);
}

Status sort_choices(const CanonicalOrder& order, std::span<const int32_t> choices, uint64_t token, TokenKeys& keys) {
  const auto n = static_cast<uint32_t>(order.position.size());
  for (uint32_t k = 0; k < choices.size(); ++k) {
    MOECCL_TRY(check_choice(choices[k], n, token, k));
    if (choices[k] >= 0) keys.insert(order.position[static_cast<uint32_t>(choices[k])], k);
  }
  for (uint32_t i = 1; i < keys.n; ++i)
    if (keys.key[i] / kMaxTopK == keys.key[i - 1] / kMaxTopK)
      return error(moecclInvalidArgument, "topk_index[{}] names expert {} twice: a token's experts are distinct", token,
                   order.expert[keys.key[i] / kMaxTopK]);
  return {};
}

}  // namespace

Status check_choices(const CanonicalOrder& order, std::span<const int32_t> choices, uint64_t token) {
  TokenKeys keys;
  return sort_choices(order, choices, token, keys);
}

Status OwnChoices::assign(const MoeShape& shape, const Placement& placement, const CanonicalOrder& order,
                          const TopK& topk) {
  const uint32_t n = placement.n_experts(), top_k = shape.top_k;
  n_tokens = topk.n_tokens;
  weighted = topk.weight != nullptr;
  n_experts.resize(n_tokens);
  token.resize(n_tokens);
  std::iota(token.begin(), token.end(), 0);
  expert.clear();
  choice.clear();
  weight.clear();
  drop_counts.assign(n, 0);
  kept_.assign(n, 0);
  n_dropped = 0;
  for (uint64_t t = 0; t < n_tokens; ++t) {
    TokenKeys keys;
    MOECCL_TRY(sort_choices(order, {topk.index + t * top_k, top_k}, t, keys));
    uint32_t kept = 0;
    for (uint32_t i = 0; i < keys.n; ++i) {
      const uint32_t k = keys.key[i] % kMaxTopK, e = order.expert[keys.key[i] / kMaxTopK];
      if (shape.capacity > 0 && kept_[e]++ >= shape.capacity) {
        ++drop_counts[e];
        ++n_dropped;
        continue;
      }
      expert.push_back(static_cast<uint16_t>(e));
      choice.push_back(static_cast<uint32_t>(t * top_k + k));
      if (weighted) weight.push_back(topk.weight[t * top_k + k]);
      ++kept;
    }
    n_experts[t] = static_cast<uint8_t>(kept);
  }
  return {};
}

RowWays::RowWays(const Paths& paths, const LevelTree& tree, const Placement& placement, uint32_t rank)
    : Ways(paths, placement, rank), dedup(paths.algorithm().dedup()) {
  std::vector<uint32_t> first_group;  // of each level
  for (const plan::Level& level : tree.levels) {
    first_group.push_back(n_groups);
    n_groups += level.n_groups;
  }
  for (uint32_t x = 0; x < paths.n_ranks(); ++x) {
    uint32_t at = rank;
    for (const uint32_t next : to(x)) {
      const uint32_t level = tree.level_between(at, next);
      group.push_back(first_group[level] + tree.levels[level].group_of_rank[next]);
      at = next;
    }
  }
}

RowWays RowWays::shared_by_rank() const {
  RowWays ways = *this;
  ways.dedup = true;
  for (uint32_t x = 0; x < n_ranks(); ++x) std::fill(ways.hop.begin() + first[x], ways.hop.begin() + first[x + 1], x);
  return ways;
}

RowWays RowWays::into_experts(const Placement& placement, bool expert_major) {
  RowWays ways;
  ways.dedup = !expert_major;
  ways.n_groups = 1;
  for (uint32_t x = 0; x < placement.n_ranks; ++x) {
    if (placement.n_local(x) > 0) ways.hop.push_back(x);
    ways.first.push_back(static_cast<uint32_t>(ways.hop.size()));
  }
  ways.group.assign(ways.hop.size(), 0);
  return ways;
}

void sum_levels(const LevelTree& tree, std::span<const uint32_t> to_group, std::vector<LevelCount>& levels) {
  levels.assign(tree.depth(), {});
  size_t i = 0;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    for (uint32_t g = 0; g < tree.levels[l].n_groups; ++g, ++i) {
      levels[l].rows += to_group[i];
      levels[l].peak = std::max<uint64_t>(levels[l].peak, to_group[i]);
      levels[l].reach += to_group[i] > 0;
    }
  }
}

std::vector<uint32_t> rows_to_groups(const RowWays& ways, const Placement& placement, const OwnChoices& own) {
  std::vector<uint32_t> to_group(ways.n_groups, 0);
  size_t i = 0;
  for (uint64_t t = 0; t < own.n_tokens; ++t) {
    uint32_t before = 0, before_end = 0;  // the way of the token's previous choice
    for (uint32_t k = 0; k < own.n_experts[t]; ++k, ++i) {
      const uint32_t owner = placement.owner[own.expert[i]];
      uint32_t at = ways.first[owner];
      const uint32_t end = ways.first[owner + 1];
      // Choices are in canonical order, so a row that already travels is on the way of the previous choice (Eq. 7).
      const uint32_t begin = at;
      for (; at < end && before < before_end && ways.hop[at] == ways.hop[before]; ++at) ++before;
      for (; at < end; ++at) ++to_group[ways.group[at]];
      if (ways.dedup) before = begin, before_end = end;
    }
  }
  return to_group;
}

void count_rows(const RowWays& ways, const LevelTree& tree, const Placement& placement, const OwnChoices& own,
                std::vector<LevelCount>& levels) {
  sum_levels(tree, rows_to_groups(ways, placement, own), levels);
}

namespace {

constexpr uint32_t kHeaderWords = 4;

struct MessageLayout {
  size_t token, n_experts, expert, weight, end;  // words
};
MessageLayout layout_of(size_t records, size_t choices, size_t weights) {
  MessageLayout at{};
  at.token = kHeaderWords;
  at.n_experts = at.token + records;
  at.expert = at.n_experts + (records + 3) / 4;
  at.weight = at.expert + (choices + 1) / 2;
  at.end = at.weight + weights;
  return at;
}

}  // namespace

size_t message_words(size_t records, size_t choices, size_t weights) {
  return records == 0 ? 0 : layout_of(records, choices, weights).end;
}

void RecordWriter::group_by_owner(const Placement& placement, const OwnChoices& own) {
  owner_first_.assign(size_t{placement.n_ranks} + 1, 0);
  for (const uint16_t e : own.expert) ++owner_first_[placement.owner[e] + 1];
  std::partial_sum(owner_first_.begin(), owner_first_.end(), owner_first_.begin());
  owner_filled_.assign(owner_first_.begin(), owner_first_.end() - 1);
  by_owner_.resize(own.expert.size());
  for (size_t i = 0; i < own.expert.size(); ++i)
    by_owner_[owner_filled_[placement.owner[own.expert[i]]]++] = static_cast<uint32_t>(i);
}

void RecordWriter::adopt(const Placement& placement, const OwnChoices& own, std::span<const uint32_t> words,
                         std::span<const size_t> bytes) {
  words_.assign(words.begin(), words.end());
  bytes_.assign(bytes.begin(), bytes.end());
  group_by_owner(placement, own);
}

void RecordWriter::lay_out() {
  size_t total = 0;
  bytes_.assign(cursors_.size(), 0);
  for (size_t p = 0; p < cursors_.size(); ++p) {
    const size_t words = message_words(cursors_[p].records, cursors_[p].choices, cursors_[p].weights);
    bytes_[p] = words * sizeof(uint32_t);
    total += words;
  }
  words_.assign(total, 0);
  uint32_t* at = words_.data();
  for (size_t p = 0; p < cursors_.size(); ++p) {
    Cursor& c = cursors_[p];
    if (c.records == 0) continue;
    const MessageLayout l = layout_of(c.records, c.choices, c.weights);
    at[0] = c.records, at[1] = c.choices, at[2] = c.weights;
    c.token = at + l.token;
    c.n_experts = reinterpret_cast<uint8_t*>(at + l.n_experts);
    c.expert = reinterpret_cast<uint16_t*>(at + l.expert);
    c.weight = reinterpret_cast<float*>(at + l.weight);
    c.last_token = ~0u;
    at += l.end;
  }
}

void RecordWriter::write(const Ways& ways, const Placement& placement, const OwnChoices& own) {
  // Calls pass(cursor, token, choice, weighed) for each rank on the way of each choice, in the order of the records.
  const auto for_each_pass = [&](auto&& pass) {
    size_t i = 0;
    for (uint32_t t = 0; t < own.n_tokens; ++t) {
      for (uint32_t k = 0; k < own.n_experts[t]; ++k, ++i) {
        const uint32_t owner = placement.owner[own.expert[i]];
        for (const uint32_t to : ways.to(owner)) pass(cursors_[to], t, i, own.weighted && to == owner);
      }
    }
  };
  cursors_.assign(ways.n_ranks(), {});
  for_each_pass([](Cursor& c, uint32_t t, size_t, bool weighed) {
    ++c.choices;
    c.weights += weighed;
    c.records += c.last_token != t;
    c.last_token = t;
  });
  lay_out();
  group_by_owner(placement, own);
  // Without branches, because neighbouring choices go anywhere.
  for_each_pass([&](Cursor& c, uint32_t t, size_t i, bool weighed) {
    const bool fresh = c.last_token != t;
    c.last_token = t;
    c.token += fresh;
    c.token[-1] = t;
    c.n_experts += fresh;
    ++c.n_experts[-1];
    *c.expert++ = own.expert[i];
    if (weighed) *c.weight++ = own.weight[i];
  });
}

Result<RecordView> read_records(const uint32_t* words, size_t bytes, bool weighted) {
  RecordView v;
  if (bytes == 0) return v;
  const size_t n = bytes / sizeof(uint32_t);
  if (bytes % sizeof(uint32_t) != 0 || n < kHeaderWords)
    return error(moecclInternalError, "routing records of {} bytes are cut short", bytes);
  v.n_records = words[0], v.n_choices = words[1], v.n_weights = words[2];
  const MessageLayout l = layout_of(v.n_records, v.n_choices, v.n_weights);
  if (l.end != n || (v.n_weights > 0 && !weighted))
    return error(moecclInternalError, "routing records say {} records, {} choices, {} weights in {} bytes", v.n_records,
                 v.n_choices, v.n_weights, bytes);
  v.token = words + l.token;
  v.n_experts = reinterpret_cast<const uint8_t*>(words + l.n_experts);
  v.expert = reinterpret_cast<const uint16_t*>(words + l.expert);
  v.weight = weighted ? reinterpret_cast<const float*>(words + l.weight) : nullptr;
  return v;
}

RecordView view_of(const OwnChoices& own) {
  return {static_cast<uint32_t>(own.n_tokens),
          static_cast<uint32_t>(own.expert.size()),
          static_cast<uint32_t>(own.weight.size()),
          own.token.data(),
          own.n_experts.data(),
          own.expert.data(),
          own.weighted ? own.weight.data() : nullptr,
          own.choice.data()};
}

}  // namespace moeccl::algo
