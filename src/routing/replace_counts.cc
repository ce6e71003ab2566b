// SPDX-License-Identifier: Apache-2.0
// Counts the rows that samples bring to experts (NetMoE, Eq. 2), in the unit in which a plan moves them.
#include <algorithm>
#include <numeric>

#include "src/routing/replace.h"

namespace moeccl::algo {

namespace {

enum class Unit { kChoice, kRank, kNode };
Unit unit_of(const CountRequest& r) {
  if (r.algorithm.dedup()) return r.algorithm.dims > 1 ? Unit::kNode : Unit::kRank;
  return r.expert_major ? Unit::kChoice : Unit::kRank;
}
size_t columns_of(const CountRequest& r) {
  return unit_of(r) == Unit::kChoice ? r.placement->owner.size() : r.placement->n_ranks;
}

// Shares `total` of each node out over its ranks in proportion to weight[rank]: whole tokens, largest remainders first.
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

// What a sample's tokens ask of each rank and each node: the choices, and the rows where choices of a token share one.
struct Tally {
  std::vector<int32_t> rank_rows, node_rows, rank_choices, node_choices;

  explicit Tally(const CountRequest& r)
      : rank_rows(r.placement->n_ranks), node_rows(r.n_nodes), rank_choices(rank_rows), node_choices(node_rows) {}
  void clear() {
    for (auto* v : {&rank_rows, &node_rows, &rank_choices, &node_choices}) std::fill(v->begin(), v->end(), 0);
  }
  // Choices are in canonical order, so those of a rank, and those of a node, are adjacent.
  void add(const CountRequest& r, std::span<const uint16_t> experts) {
    int64_t last_rank = -1, last_node = -1;
    for (const uint16_t e : experts) {
      const uint32_t owner = r.placement->owner[e];
      const auto node = static_cast<size_t>(r.node[owner]);
      ++rank_choices[owner], ++node_choices[node];
      rank_rows[owner] += owner != last_rank;
      node_rows[node] += r.node[owner] != last_node;
      last_rank = owner, last_node = r.node[owner];
    }
  }
};

// Fills one sample's entries of num.
class Columns {
 public:
  explicit Columns(const CountRequest& r) : request_(r), shares_(r) {}
  void put(const Tally& t, int32_t* num) {
    if (unit_of(request_) == Unit::kRank) std::copy(t.rank_rows.begin(), t.rank_rows.end(), num);
    if (unit_of(request_) == Unit::kNode) shares_.share(t.node_rows, t.rank_rows, num);
  }

 private:
  const CountRequest& request_;
  NodeShares shares_;
};

// Estimates out[i], the rows of choices[i], from `known` choices that made `rows` rows; `other` is the overall share.
void rows_of(std::span<const int32_t> choices, std::span<const int32_t> known, std::span<const int32_t> rows,
             const double other, uint64_t sample_tokens, std::vector<int32_t>& out) {
  for (size_t i = 0; i < choices.size(); ++i) {
    const double share = known[i] > 0 ? static_cast<double>(rows[i]) / known[i] : other;
    const auto most = static_cast<double>(std::min<uint64_t>(sample_tokens, static_cast<uint64_t>(choices[i])));
    out[i] = static_cast<int32_t>(std::min(most, std::max(1.0, choices[i] * share + 0.5)));
  }
}

}  // namespace

SampleCounts count_samples(const CountRequest& r, const AllChoices& choices, const Samples& samples) {
  SampleCounts counts;
  const size_t columns = columns_of(r);
  if (unit_of(r) == Unit::kChoice) {
    counts.device.assign(r.placement->owner.begin(), r.placement->owner.end());
  } else {
    counts.device.resize(columns);
    std::iota(counts.device.begin(), counts.device.end(), 0);
  }
  counts.n_columns = static_cast<int32_t>(columns);
  counts.num.assign(samples.n() * columns, 0);
  Columns entries(r);
  Tally tally(r);
  for (uint32_t i = 0; i < samples.n(); ++i) {
    int32_t* num = counts.num.data() + i * columns;
    tally.clear();
    for (uint64_t t = i * samples.tokens; t < (i + 1) * samples.tokens; ++t) {
      if (unit_of(r) == Unit::kChoice) {
        for (const uint16_t e : choices.of(t)) ++num[e];
      } else {
        tally.add(r, choices.of(t));
      }
    }
    entries.put(tally, num);
  }
  return counts;
}

Result<std::vector<int32_t>> next_of_choices(const CountRequest& r, const CanonicalOrder& order, const TopK& next,
                                             uint32_t top_k, uint64_t sample_tokens) {
  const size_t columns = columns_of(r);
  std::vector<int32_t> all(next.n_tokens / sample_tokens * columns, 0);
  Columns entries(r);
  Tally tally(r);
  std::vector<uint16_t> experts;
  for (uint64_t t = 0; t < next.n_tokens; ++t) {
    const std::span<const int32_t> given{next.index + t * top_k, top_k};
    MOECCL_TRY(check_choices(order, given, t));
    experts.clear();
    for (const int32_t e : given)
      if (e >= 0) experts.push_back(static_cast<uint16_t>(e));
    std::sort(experts.begin(), experts.end(),
              [&](uint16_t a, uint16_t b) { return order.position[a] < order.position[b]; });
    int32_t* num = all.data() + t / sample_tokens * columns;
    if (t % sample_tokens == 0) tally.clear();
    if (unit_of(r) == Unit::kChoice) {
      for (const uint16_t e : experts) ++num[e];
    } else {
      tally.add(r, experts);
      if ((t + 1) % sample_tokens == 0) entries.put(tally, num);
    }
  }
  return all;
}

std::vector<int32_t> next_of_counts(const CountRequest& r, const OwnChoices& own, uint32_t n_experts,
                                    std::span<const int32_t> next, uint64_t sample_tokens) {
  const size_t columns = columns_of(r), n_samples = own.n_tokens / sample_tokens;
  std::vector<int32_t> all(n_samples * columns, 0);
  if (unit_of(r) == Unit::kChoice) {
    for (size_t i = 0; i < n_samples; ++i) std::copy_n(&next[i * n_experts], n_experts, &all[i * columns]);
    return all;
  }
  std::vector<Tally> here(n_samples, Tally(r));
  Tally sums(r), predicted(r);
  size_t at = 0;
  for (uint64_t t = 0; t < own.n_tokens; at += own.n_experts[t], ++t) {
    const std::span<const uint16_t> experts{own.expert.data() + at, own.n_experts[t]};
    here[t / sample_tokens].add(r, experts), sums.add(r, experts);
  }
  const auto share = [](std::span<const int32_t> rows, std::span<const int32_t> choices) {
    const auto made = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const auto of = std::accumulate(choices.begin(), choices.end(), int64_t{0});
    return of > 0 ? static_cast<double>(made) / static_cast<double>(of) : 1.0;
  };
  const double rank_share = share(sums.rank_rows, sums.rank_choices);
  const double node_share = share(sums.node_rows, sums.node_choices);
  Columns entries(r);
  for (size_t i = 0; i < n_samples; ++i) {
    predicted.clear();
    for (uint32_t e = 0; e < n_experts; ++e) {
      const uint32_t owner = r.placement->owner[e];
      predicted.rank_choices[owner] += next[i * n_experts + e];
      predicted.node_choices[static_cast<size_t>(r.node[owner])] += next[i * n_experts + e];
    }
    rows_of(predicted.rank_choices, here[i].rank_choices, here[i].rank_rows, rank_share, sample_tokens,
            predicted.rank_rows);
    rows_of(predicted.node_choices, here[i].node_choices, here[i].node_rows, node_share, sample_tokens,
            predicted.node_rows);
    entries.put(predicted, all.data() + i * columns);
  }
  return all;
}

}  // namespace moeccl::algo
