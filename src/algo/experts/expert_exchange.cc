// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/expert_exchange.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/base/hash.h"

namespace moeccl::algo {

std::vector<double> round_trip_bytes(const plan::LevelTree& tree, const plan::Profile& profile) {
  std::vector<double> bytes;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    std::vector<uint32_t> members(tree.levels[l].n_groups, 0);
    for (const uint32_t group : tree.levels[l].group_of_rank) ++members[group];
    const plan::LinkCost& link = plan::link_of(tree, profile, l);
    bytes.push_back(2 * link.alpha_ns * link.bytes_per_ns / *std::max_element(members.begin(), members.end()));
  }
  return bytes;
}

Status ExpertExchangePlan::applies(moecclOp_t op, ExpertExchange::Way way, const plan::Reach& reach,
                                   bool deterministic) {
  if (way != ExpertExchange::Way::kDirect) return {};
  if (op == moecclOpExpertReduce && deterministic)
    return error(moecclUnsupported, "a deterministic communicator adds in the order of staged, whatever can be read");
  Shape shape;
  shape.reach = reach;
  return needs_views(shape);
}

ExpertExchangePlan::ExpertExchangePlan(moecclOp_t op, const Domains& domains, const Placement& homes,
                                       const ExpertExchange& call)
    : domains_(domains),
      homes_(homes),
      direct_(call.way == ExpertExchange::Way::kDirect),
      used_slots_(domains.n_ranks(), 0),
      sent_(domains.n_ranks()),
      received_(domains.n_ranks()),
      round_trip_bytes_(call.round_trip_bytes) {
  uint32_t most_own = 1, most_held = 1;
  for (uint32_t r = 0; r < domains.n_ranks(); ++r) {
    std::vector<uint32_t>& held = held_.emplace_back(experts_of(r, domains.tree().depth()));
    std::sort(held.begin(), held.end());
    most_own = std::max(most_own, homes.n_local(r));
    most_held = std::max(most_held, static_cast<uint32_t>(held.size()));
  }
  const bool gathers = op == moecclOpExpertGather;
  shape_ = {.op = op,
            .n_ranks = domains.n_ranks(),
            .count = call.count,
            .element_bytes = call.element_bytes,
            .deterministic = call.deterministic && !gathers,
            .reach = call.reach,
            .staging_bytes = call.staging_bytes,
            .long_line = call.long_line,
            .most_in_blocks = gathers ? most_own : most_held,
            .most_out_blocks = gathers ? most_held : most_own};
  for (const Domains::Send& send : domains.sends()) {
    std::vector<uint32_t> experts = experts_of(send.from, send.level);
    if (experts.empty()) continue;
    const uint32_t from = gathers ? send.from : send.to, to = gathers ? send.to : send.from;
    const uint32_t first_slot = used_slots_[to];
    used_slots_[to] += static_cast<uint32_t>(experts.size());
    sent_[from].push_back({to, send.level, first_slot, experts});
    received_[to].push_back({from, send.level, first_slot, std::move(experts)});
  }
}

void ExpertExchangePlan::set_layout(uint64_t direct_bytes) {
  if (direct_) {
    layout_ = {0, 1};
    chunk_bytes_ = direct_bytes;
    return;
  }
  layout_ = {*std::max_element(used_slots_.begin(), used_slots_.end()), tuning::kOverlap};
  chunk_bytes_ = tuning::kExpertMove;
  // Slots of a rank that fill at once from one level, the most of any rank.
  std::vector<uint64_t> level_slots(domains_.tree().depth(), 0);
  for (const std::vector<Message>& messages : received_) {
    std::vector<uint64_t> here(level_slots.size(), 0);
    for (const Message& m : messages) here[m.level] += m.experts.size();
    for (size_t l = 0; l < here.size(); ++l) level_slots[l] = std::max(level_slots[l], here[l]);
  }
  // The credit of a chunk is back a round trip after the chunk was sent, and then one more chunk may go.
  double most = 0;  // of one slot
  for (size_t l = 0; l < round_trip_bytes_.size(); ++l)
    if (level_slots[l] > 0) most = std::max(most, round_trip_bytes_[l] / static_cast<double>(level_slots[l]));
  if (most <= static_cast<double>((tuning::kOverlap - 1) * tuning::kExpertMove)) return;
  layout_.depth = tuning::kOneWay;
  const double chunk = std::min(tuning::kFarLoop * most / (tuning::kOneWay - 1), 1e12);
  chunk_bytes_ = std::max(tuning::kExpertMove, static_cast<uint64_t>(chunk));
}

std::vector<uint32_t> ExpertExchangePlan::experts_of(uint32_t rank, uint32_t level) const {
  std::vector<uint32_t> experts;
  for (const uint32_t home : domains_.held(rank, level)) {
    const std::span<const uint32_t> own = homes_.experts_of(home);
    experts.insert(experts.end(), own.begin(), own.end());
  }
  return experts;
}

uint32_t ExpertExchangePlan::held_block(uint32_t rank, uint32_t expert) const {
  const std::vector<uint32_t>& all = held_[rank];
  return static_cast<uint32_t>(std::lower_bound(all.begin(), all.end(), expert) - all.begin());
}

bool ExpertExchangePlan::holds(uint32_t holder, uint32_t home) const {
  const std::vector<uint32_t>& homes = domains_.held(holder, domains_.tree().depth());
  return homes_.n_local(home) > 0 && std::find(homes.begin(), homes.end(), home) != homes.end();
}

uint64_t ExpertExchangePlan::hash() const {
  const uint64_t kind = (shape_.op == moecclOpExpertReduce ? 2 : 0) + (direct_ ? 1 : 0);
  uint64_t h = hash_combine(domains_.hash(), kind);
  for (const uint32_t home : homes_.owner) h = hash_combine(h, home);
  h = hash_combine(hash_combine(h, shape_.count), shape_.element_bytes);
  return hash_combine(hash_combine(h, chunking().chunk), layout_.n_slots * uint64_t{16} + layout_.depth);
}

}  // namespace moeccl::algo
