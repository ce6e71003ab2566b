// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/expert_return.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/algo/whole_plan.h"

namespace moeccl::algo {

namespace {

// Sums in the order given; a single source is copied.
void add_up(ProgramBuilder& b, Ref to, const std::vector<Ref>& sources) {
  if (sources.size() == 1) return b.copy(to, sources[0]);
  b.reduce(to, sources, true);
}

}  // namespace

ExpertReturn::ExpertReturn(const Domains& domains, const Placement& homes, const ExpertExchange& s)
    : ExpertExchangePlan(moecclOpExpertReduce, domains, homes, s),
      holders_(domains.n_ranks()),
      sums_(domains.n_ranks()) {
  for (uint32_t r = 0; r < domains.n_ranks(); ++r) {
    for (const uint32_t home : domains.held(r, domains.tree().depth())) holders_[home].push_back(r);
    for (const Message& giving : sent_[r]) {
      // Everything that came before a level was passed on over all of this rank's links of that level.
      Sum& sum = sums_[r].emplace_back();
      sum.needed = std::any_of(received_[r].begin(), received_[r].end(),
                               [&](const Message& taking) { return taking.level > giving.level; });
      if (!sum.needed) continue;
      sum.first_slot = used_slots_[r];
      used_slots_[r] += static_cast<uint32_t>(giving.experts.size());
    }
  }
  set_layout(tuning::kExpertDirect);
}

Result<ExpertReturn> ExpertReturn::make(const Domains& domains, const Placement& homes,
                                        const ExpertExchange& settings) {
  MOECCL_TRY(applies(moecclOpExpertReduce, settings.way, settings.reach, settings.deterministic));
  ExpertReturn r(domains, homes, settings);
  if (std::max(r.shape_.most_in_blocks, r.layout_.n_slots) > kMostBlocks)
    return error(moecclUnsupported,
                 "a rank would hold {} experts in {} slots, at most {} are possible: use smaller domains",
                 r.shape_.most_in_blocks, r.layout_.n_slots, kMostBlocks);
  if (settings.most_sources > 0 && r.most_sources() > settings.most_sources)
    return error(moecclUnsupported,
                 "an expert's gradients come back from {} ranks at once, at most {} are possible on CUDA memory: use "
                 "smaller domains",
                 r.most_sources() - 1, settings.most_sources - 1);
  MOECCL_TRY(chunks_fit(r.shape_, r.layout_));
  return r;
}

uint32_t ExpertReturn::most_sources() const {
  size_t most = 1;
  for (uint32_t r = 0; r < shape_.n_ranks; ++r) most = std::max(most, 1 + received_[r].size());
  if (direct_) {
    for (const auto& h : holders_) most = std::max(most, h.size());
  }
  return static_cast<uint32_t>(most);
}

plan::Plan ExpertReturn::build_all() const { return whole_plan(*this, shape_); }

Program ExpertReturn::build(uint32_t rank) const {
  if (!direct_) return build_staged(rank);
  const auto reads = [&](uint32_t owner, uint32_t holder) { return holds(holder, owner); };
  return build_direct(rank, reads, [&](ProgramBuilder& b, const std::vector<uint32_t>&) {
    const std::span<const uint32_t> own = homes_.experts_of(rank);
    for (uint32_t i = 0; i < own.size(); ++i) {
      std::vector<Ref> all;
      for (const uint32_t holder : holders_[rank]) all.push_back(in(holder, held_block(holder, own[i])));
      add_up(b, out(rank, i), all);
    }
  });
}

// The lanes mirror the gather's: inner levels, innermost first; what goes out over the outermost level; sums for the
// owner. A lane runs ahead of the next as far as the slots allow, so chunks are under way at all levels at once. What a
// rank gives at a level waits only for what it takes at deeper levels, so two ranks that give to each other do not
// wait.
Program ExpertReturn::build_staged(uint32_t rank) const {
  ProgramBuilder b(shape_, rank, layout_);
  const std::vector<Message>& takings = received_[rank];
  // Returns this rank's own part of an expert and what came back over links below `level`; level -1: over all links.
  const auto sources = [&](uint32_t expert, int64_t level) {
    std::vector<Ref> all{in(rank, held_block(rank, expert))};
    for (const Message& t : takings) {
      if (static_cast<int64_t>(t.level) <= level) continue;
      const auto at = std::find(t.experts.begin(), t.experts.end(), expert);
      if (at != t.experts.end())
        all.push_back(slot(rank, t.first_slot + static_cast<uint32_t>(at - t.experts.begin())));
    }
    return all;
  };
  const auto give = [&](uint32_t level) {
    for (size_t m = 0; m < sent_[rank].size(); ++m) {
      const Message& giving = sent_[rank][m];
      const Sum& sum = sums_[rank][m];
      if (giving.level != level) continue;
      b.wait(giving.peer, kCredit, layout_.depth);
      for (uint32_t i = 0; sum.needed && i < giving.experts.size(); ++i)
        b.reduce(slot(rank, sum.first_slot + i), sources(giving.experts[i], level), false, true);
      for (uint32_t i = 0; i < giving.experts.size(); ++i)
        b.put(slot(giving.peer, giving.first_slot + i),
              sum.needed ? slot(rank, sum.first_slot + i) : in(rank, held_block(rank, giving.experts[i])));
      b.signal(giving.peer, kData);
    }
  };
  const auto take = [&](uint32_t level) {
    bool any = false;
    for (const Message& t : takings) {
      if (t.level != level) continue;
      any = true;
      b.wait(t.peer, kData);
    }
    return any;
  };
  b.lane(LaneKind::kIntra);
  bool inner = false;
  for (uint32_t level = domains_.tree().depth(); level-- > 1;) {
    give(level);
    inner |= take(level);
  }
  if (inner) b.signal(rank, kForwarded);
  b.lane(LaneKind::kInter);
  if (inner) b.wait(rank, kForwarded);
  give(0);
  if (inner) b.signal(rank, kSummed);
  // Slots are given back once both lanes have read them.
  b.lane(LaneKind::kCopy);
  if (inner) b.wait(rank, kSummed);
  take(0);
  const std::span<const uint32_t> own = homes_.experts_of(rank);
  for (uint32_t i = 0; i < own.size(); ++i) add_up(b, out(rank, i), sources(own[i], -1));
  for (const Message& t : takings) b.signal(t.peer, kCredit);
  return std::move(b).finish();
}

}  // namespace moeccl::algo
