// SPDX-License-Identifier: Apache-2.0
#include "src/solve/replica_place.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "src/base/random.h"
#include "src/solve/checks.h"
#include "src/solve/replica_split.h"
#include "src/solve/replicate.h"
#include "src/solve/sample.h"

namespace moeccl::solve {
namespace {

constexpr double kBetaInter = 0.04096;  // rows of 4 KiB at 100 GB/s, as in sample.cc
constexpr double kCompute = 0.1;        // us of one token in one expert
constexpr int kSwapTries = 4000;

struct Machine {
  explicit Machine(const moecclReplicaProblem_t& p)
      : ranks(static_cast<size_t>(p.n_ranks)),
        experts(static_cast<size_t>(p.n_experts)),
        per_rank(static_cast<size_t>(p.slots_per_rank)),
        nodes(static_cast<size_t>(p.n_nodes)),
        where(nodes_of(p)),
        total(experts),
        p(p) {
    for (size_t r = 0; r < ranks; ++r)
      for (size_t e = 0; e < experts; ++e) total[e] += p.demand[r * experts + e];
  }
  int32_t demand(size_t rank, size_t expert) const { return p.demand[rank * experts + expert]; }
  size_t node_of(size_t rank) const { return static_cast<size_t>(where.node[rank]); }

  size_t ranks, experts, per_rank, nodes;
  NodeRanks where;
  std::vector<int64_t> total;  // tokens of each expert
  const moecclReplicaProblem_t& p;

 private:
  static std::vector<int32_t> nodes_of(const moecclReplicaProblem_t& p) {
    std::vector<int32_t> node(static_cast<size_t>(p.n_ranks));
    for (size_t r = 0; r < node.size(); ++r)
      node[r] = p.rank_node ? p.rank_node[r] : even_group(static_cast<int64_t>(r), p.n_ranks, p.n_nodes);
    return node;
  }
};

// Calls give(slot, rank, tokens).
template <class Give>
void share(const Machine& m, size_t expert, const std::vector<int32_t>& slots, Give&& give) {
  std::vector<int64_t> left(m.ranks);
  for (size_t r = 0; r < m.ranks; ++r) left[r] = m.demand(r, expert);
  std::vector<size_t> slot_rank(slots.size());
  for (size_t k = 0; k < slots.size(); ++k) slot_rank[k] = static_cast<size_t>(slots[k]) / m.per_rank;
  share_tokens(m.where, left, slot_rank,
               [&](size_t k, size_t rank, int64_t tokens) { give(static_cast<size_t>(slots[k]), rank, tokens); });
}

// A placement and its cost. Exchanging two slots costs a recount of two experts.
class Placed {
 public:
  explicit Placed(const Machine& m) : m_(m), out_(m.nodes), in_(m.nodes), load_(m.ranks) {}

  void set(const std::vector<int32_t>& slot_expert) {
    slots_ = slot_expert;
    of_.assign(m_.experts, {});
    for (size_t s = 0; s < slots_.size(); ++s) of_[static_cast<size_t>(slots_[s])].push_back(static_cast<int32_t>(s));
    std::fill(out_.begin(), out_.end(), 0);
    std::fill(in_.begin(), in_.end(), 0);
    std::fill(load_.begin(), load_.end(), 0);
    for (size_t e = 0; e < m_.experts; ++e) count(e, 1);
  }
  void exchange(size_t s, size_t t) {
    const auto a = static_cast<size_t>(slots_[s]), b = static_cast<size_t>(slots_[t]);
    count(a, -1);
    count(b, -1);
    std::swap(slots_[s], slots_[t]);
    *std::find(of_[a].begin(), of_[a].end(), static_cast<int32_t>(s)) = static_cast<int32_t>(t);
    *std::find(of_[b].begin(), of_[b].end(), static_cast<int32_t>(t)) = static_cast<int32_t>(s);
    std::sort(of_[a].begin(), of_[a].end());  // the order decides which slot gets a share's odd token
    std::sort(of_[b].begin(), of_[b].end());
    count(a, 1);
    count(b, 1);
  }
  double us() const {
    const int64_t busiest =
        std::max(*std::max_element(out_.begin(), out_.end()), *std::max_element(in_.begin(), in_.end()));
    return m_.p.beta_inter_us * static_cast<double>(busiest) + m_.p.compute_us * static_cast<double>(max_load());
  }
  int64_t inter() const { return std::accumulate(out_.begin(), out_.end(), int64_t{0}); }
  int64_t max_load() const { return *std::max_element(load_.begin(), load_.end()); }
  size_t fullest() const { return static_cast<size_t>(std::max_element(load_.begin(), load_.end()) - load_.begin()); }
  const std::vector<int32_t>& slots() const { return slots_; }

 private:
  void count(size_t expert, int sign) {
    share(m_, expert, of_[expert], [&](size_t slot, size_t rank, int64_t tokens) {
      const size_t at = slot / m_.per_rank;
      load_[at] += sign * tokens;
      if (m_.node_of(at) == m_.node_of(rank)) return;
      out_[m_.node_of(rank)] += sign * tokens;
      in_[m_.node_of(at)] += sign * tokens;
    });
  }
  const Machine& m_;
  std::vector<int32_t> slots_;
  std::vector<std::vector<int32_t>> of_;  // the slots of each expert
  std::vector<int64_t> out_, in_, load_;
};

std::vector<int32_t> contiguous(const std::vector<int32_t>& counts) {
  std::vector<int32_t> slots;
  for (size_t e = 0; e < counts.size(); ++e)
    slots.insert(slots.end(), static_cast<size_t>(counts[e]), static_cast<int32_t>(e));
  return slots;
}

// Chooses the node of each replica. The k-th replica of an expert on a node serves min(its share, what the node still
// wants). The most useful replicas are placed first, as long as the node has slots.
std::vector<std::vector<int32_t>> choose_nodes(const Machine& m, const std::vector<int32_t>& counts) {
  struct Offer {
    double served;
    int32_t expert, node;
  };
  std::vector<Offer> offers;
  for (size_t e = 0; e < m.experts; ++e) {
    const double share = std::max(static_cast<double>(m.total[e]) / counts[e], 1e-9);
    std::vector<double> wanted(m.nodes);
    for (size_t r = 0; r < m.ranks; ++r) wanted[m.node_of(r)] += m.demand(r, e);
    for (size_t n = 0; n < m.nodes; ++n)
      for (int32_t k = 0; k < counts[e] && wanted[n] > 0; ++k, wanted[n] -= share)
        offers.push_back({std::min(share, wanted[n]), static_cast<int32_t>(e), static_cast<int32_t>(n)});
  }
  std::stable_sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) { return a.served > b.served; });
  std::vector<int32_t> left = counts, room(m.nodes);
  for (size_t r = 0; r < m.ranks; ++r) room[m.node_of(r)] += m.p.slots_per_rank;
  std::vector<std::vector<int32_t>> in_node(m.nodes);
  const auto place = [&](int32_t e, size_t n) {
    --left[static_cast<size_t>(e)];
    --room[n];
    in_node[n].push_back(e);
  };
  for (const Offer& o : offers)
    if (left[static_cast<size_t>(o.expert)] > 0 && room[static_cast<size_t>(o.node)] > 0)
      place(o.expert, static_cast<size_t>(o.node));
  // The rest goes to the node with the most room; among equals, to the first.
  std::priority_queue<std::pair<int32_t, int64_t>> most;  // (room, -node)
  for (size_t n = 0; n < m.nodes; ++n) most.emplace(room[n], -static_cast<int64_t>(n));
  for (size_t e = 0; e < m.experts; ++e)
    while (left[e] > 0) {
      const int64_t minus_node = most.top().second;
      const auto n = static_cast<size_t>(-minus_node);
      most.pop();
      place(static_cast<int32_t>(e), n);
      most.emplace(room[n], minus_node);
    }
  return in_node;
}

// Within a node, the heaviest replica goes first, to the least loaded rank that has a slot; among equals, to the first.
void choose_ranks(const Machine& m, const std::vector<int32_t>& counts, size_t node, std::vector<int32_t> experts,
                  std::vector<int32_t>& slots) {
  const auto share = [&](int32_t e) {
    return static_cast<double>(m.total[static_cast<size_t>(e)]) / counts[static_cast<size_t>(e)];
  };
  std::stable_sort(experts.begin(), experts.end(), [&](int32_t a, int32_t b) { return share(a) > share(b); });
  using Rank = std::tuple<double, size_t, size_t>;  // load, rank, used slots
  std::priority_queue<Rank, std::vector<Rank>, std::greater<>> with_room;
  const std::vector<size_t>& ranks = m.where.by_node;
  const auto first = std::partition_point(ranks.begin(), ranks.end(), [&](size_t r) { return m.node_of(r) < node; });
  for (auto r = first; r != ranks.end() && m.node_of(*r) == node; ++r) with_room.emplace(0, *r, 0);
  for (const int32_t e : experts) {
    const auto [load, rank, used] = with_room.top();
    with_room.pop();
    slots[rank * m.per_rank + used] = e;
    if (used + 1 < m.per_rank) with_room.emplace(load + share(e), rank, used + 1);
  }
}

// Exchanges slots of the fullest rank, and random ones, while the time falls.
void improve(Placed& placed, const Machine& m) {
  SplitMix64 random(1);
  double time = placed.us();
  const size_t n = placed.slots().size();
  // Recounting an expert visits all ranks, so fewer tries on large machines keep the time of a solve nearly constant.
  const size_t tries = std::clamp<size_t>(kSwapTries * 64 / m.ranks, 50, kSwapTries);
  for (size_t k = 0; k < tries; ++k) {
    const size_t s = k % 2 == 0 ? placed.fullest() * m.per_rank + random.below(m.per_rank) : random.below(n);
    const size_t t = random.below(n);
    if (placed.slots()[s] == placed.slots()[t] || s / m.per_rank == t / m.per_rank) continue;
    placed.exchange(s, t);
    const double after = placed.us();
    if (after < time) {
      time = after;
    } else {
      placed.exchange(s, t);
    }
  }
}

std::vector<int32_t> counts_of(const Machine& m) {
  std::vector<int32_t> counts(m.experts);
  if (m.p.counts != nullptr) {
    std::copy_n(m.p.counts, m.experts, counts.begin());
  } else {
    std::vector<double> popularity(m.total.begin(), m.total.end());
    replica_counts(popularity.data(), m.p.n_experts, m.p.n_ranks * m.p.slots_per_rank, counts.data());
  }
  return counts;
}

Status check_shape(const moecclReplicaProblem_t& p) {
  MOECCL_TRY(between("problem.n_experts", p.n_experts, 1, 65535));
  MOECCL_TRY(between("problem.n_ranks", p.n_ranks, 1, 1 << 16));
  MOECCL_TRY(between("problem.slots_per_rank", p.slots_per_rank, 1, 1024));
  if (p.n_experts > int64_t{p.n_ranks} * p.slots_per_rank)
    return error(moecclInvalidArgument, "problem.slots_per_rank is {}: {} experts do not fit into {} slots",
                 p.slots_per_rank, p.n_experts, int64_t{p.n_ranks} * p.slots_per_rank);
  if (p.n_nodes < 1 || p.n_nodes > p.n_ranks)
    return error(moecclInvalidArgument, "problem.n_nodes is {}: between 1 and n_ranks ({}) are possible", p.n_nodes,
                 p.n_ranks);
  MOECCL_TRY(indices("problem.rank_node", p.rank_node, p.n_ranks, p.n_nodes));
  MOECCL_TRY(times({{"problem.beta_inter_us", p.beta_inter_us}, {"problem.compute_us", p.compute_us}}));
  return gain_share(p.min_gain);
}

Status check_counts(const moecclReplicaProblem_t& p) {
  if (p.demand == nullptr)
    return error(moecclInvalidArgument, "problem.demand is NULL: give tokens[n_ranks][n_experts]");
  const size_t n = static_cast<size_t>(p.n_ranks) * static_cast<size_t>(p.n_experts);
  for (size_t i = 0; i < n; ++i)
    if (p.demand[i] < 0)
      return error(moecclInvalidArgument, "problem.demand[{}][{}] is {}: counts are 0 or more",
                   i / static_cast<size_t>(p.n_experts), i % static_cast<size_t>(p.n_experts), p.demand[i]);
  if (p.counts == nullptr) return {};
  int64_t sum = 0;
  for (int32_t e = 0; e < p.n_experts; ++e) {
    if (p.counts[e] < 1)
      return error(moecclInvalidArgument, "problem.counts[{}] is {}: each expert needs a replica", e, p.counts[e]);
    sum += p.counts[e];
  }
  if (sum != int64_t{p.n_ranks} * p.slots_per_rank)
    return error(moecclInvalidArgument, "problem.counts sums to {}: there are {} slots", sum,
                 int64_t{p.n_ranks} * p.slots_per_rank);
  return {};
}

}  // namespace

Result<moecclReplicaProblem_t> checked(const moecclReplicaProblem_t& given) {
  moecclReplicaProblem_t p = given;
  MOECCL_TRY(check_shape(p));
  MOECCL_TRY(check_counts(p));
  if (p.beta_inter_us == 0) p.beta_inter_us = kBetaInter;
  if (p.compute_us == 0) p.compute_us = kCompute;
  return p;
}

void solve_replicas(const moecclReplicaProblem_t& p, int32_t* slot_expert, moecclReplicaAnswer_t* answer) {
  const Machine m(p);
  const std::vector<int32_t> counts = counts_of(m);
  Placed simple(m), better(m);
  simple.set(contiguous(counts));
  std::vector<int32_t> slots(simple.slots().size());
  const auto in_node = choose_nodes(m, counts);
  for (size_t n = 0; n < m.nodes; ++n) choose_ranks(m, counts, n, in_node[n], slots);
  better.set(slots);
  if (simple.us() < better.us()) better.set(simple.slots());
  improve(better, m);
  *answer = {};
  answer->before_us = simple.us();
  answer->gain = simple.us() > 0 ? 1 - better.us() / simple.us() : 0;
  answer->keep = !(answer->gain > 0) || answer->gain < p.min_gain;
  const Placed& taken = answer->keep ? simple : better;
  answer->after_us = taken.us();
  answer->inter_before = simple.inter();
  answer->inter_after = taken.inter();
  answer->max_load_before = simple.max_load();
  answer->max_load_after = taken.max_load();
  std::copy(taken.slots().begin(), taken.slots().end(), slot_expert);
}

void split_tokens(const moecclReplicaProblem_t& p, const int32_t* slot_expert, int32_t* split) {
  const Machine m(p);
  std::vector<std::vector<int32_t>> of(m.experts);
  const size_t n_slots = m.ranks * m.per_rank;
  for (size_t s = 0; s < n_slots; ++s) of[static_cast<size_t>(slot_expert[s])].push_back(static_cast<int32_t>(s));
  std::fill_n(split, n_slots * m.ranks, 0);
  for (size_t e = 0; e < m.experts; ++e)
    share(m, e, of[e], [&](size_t slot, size_t rank, int64_t tokens) {
      split[slot * m.ranks + rank] += static_cast<int32_t>(tokens);
    });
}

}  // namespace moeccl::solve
