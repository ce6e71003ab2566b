#include "src/algo/expert_return.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/algo/whole_plan.h"
#include "src/base/hash.h"

namespace moeccl::algo {

namespace {

// Ranks that gather from each other give back to each other: by ordered pair data goes one way, credits the other.
enum Sig : uint32_t { kData, kCredit };

}  // namespace

ExpertReturn::ExpertReturn(const Domains& domains, const Placement& homes, const ExpertExchange& s)
    : domains_(domains), homes_(homes), direct_(s.reach.views && !s.deterministic) {
  const uint32_t n = domains.n_ranks(), depth = domains.tree().depth();
  held_.resize(n);
  holders_.resize(n);
  givings_.resize(n);
  takings_.resize(n);
  uint32_t most_in = 1, most_own = 1, most_slots = 0;
  for (uint32_t r = 0; r < n; ++r) {
    held_[r] = experts_of(r, depth);
    std::sort(held_[r].begin(), held_[r].end());
    most_in = std::max(most_in, static_cast<uint32_t>(held_[r].size()));
    most_own = std::max(most_own, homes.n_local(r));
    for (const uint32_t home : domains.held(r, depth)) holders_[home].push_back(r);
  }
  if (s.most_sources > 0 && direct_) {
    for (const auto& h : holders_) direct_ = direct_ && h.size() <= s.most_sources;
  }
  std::vector<uint32_t> used(n, 0);
  // Links of the gather come by level, then rank.
  for (const Domains::Send& send : domains.sends()) {
    std::vector<uint32_t> experts = experts_of(send.from, send.level);
    if (experts.empty()) continue;
    const auto size = static_cast<uint32_t>(experts.size());
    givings_[send.to].push_back({send.from, send.level, used[send.from], 0, false, experts});
    takings_[send.from].push_back({send.to, send.level, used[send.from], std::move(experts)});
    used[send.from] += size;
  }
  for (uint32_t r = 0; r < n; ++r) {
    for (Giving& g : givings_[r]) {
      // Whatever came before a level was passed on over all of this rank's links of that level.
      g.sums = std::any_of(takings_[r].begin(), takings_[r].end(), [&](const Taking& t) { return t.level > g.level; });
      if (!g.sums) continue;
      g.sum_slot = used[r];
      used[r] += static_cast<uint32_t>(g.experts.size());
    }
    most_slots = std::max(most_slots, used[r]);
  }
  shape_.op = moecclOpExpertReduce;
  shape_.n_ranks = n;
  shape_.count = s.count;
  shape_.element_bytes = s.element_bytes;
  shape_.deterministic = s.deterministic;
  shape_.reach = s.reach;
  shape_.staging_bytes = s.staging_bytes;
  shape_.most_in_blocks = most_in;
  shape_.most_out_blocks = most_own;
  layout_ = direct_ ? Layout{0, 1} : Layout{most_slots, tuning::kOverlap};
}

Result<ExpertReturn> ExpertReturn::make(const Domains& domains, const Placement& homes,
                                        const ExpertExchange& settings) {
  ExpertReturn r(domains, homes, settings);
  constexpr uint32_t kMostBlocks = 1 << 15;  // slots and blocks are 16-bit numbers in plans
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
  for (uint32_t r = 0; r < shape_.n_ranks; ++r) most = std::max(most, 1 + takings_[r].size());
  if (direct_) {
    for (const auto& h : holders_) most = std::max(most, h.size());
  }
  return static_cast<uint32_t>(most);
}

Chunking ExpertReturn::chunking() const {
  return cut(shape_, layout_, direct_ ? tuning::kExpertDirect : tuning::kExpertMove);
}

std::vector<uint32_t> ExpertReturn::experts_of(uint32_t rank, uint32_t level) const {
  std::vector<uint32_t> experts;
  for (const uint32_t home : domains_.held(rank, level)) {
    const std::span<const uint32_t> own = homes_.experts_of(home);
    experts.insert(experts.end(), own.begin(), own.end());
  }
  return experts;
}

uint32_t ExpertReturn::in_block(uint32_t rank, uint32_t expert) const {
  const std::vector<uint32_t>& all = held_[rank];
  return static_cast<uint32_t>(std::lower_bound(all.begin(), all.end(), expert) - all.begin());
}

Program ExpertReturn::build(uint32_t rank) const { return direct_ ? build_direct(rank) : build_staged(rank); }

// One lane: what a rank gives at a level waits for what it takes at deeper levels alone, so it gives first and then
// takes, level after level from the innermost; two ranks that give to each other do not wait for each other.
Program ExpertReturn::build_staged(uint32_t rank) const {
  ProgramBuilder b(shape_, rank, layout_);
  const std::vector<Taking>& takings = takings_[rank];
  // This rank's own part of an expert and what came back over links below `level`; level -1: over all links.
  const auto sources = [&](uint32_t expert, int64_t level) {
    std::vector<Ref> all{in(rank, in_block(rank, expert))};
    for (const Taking& t : takings) {
      if (static_cast<int64_t>(t.level) <= level) continue;
      const auto at = std::find(t.experts.begin(), t.experts.end(), expert);
      if (at != t.experts.end())
        all.push_back(slot(rank, t.first_slot + static_cast<uint32_t>(at - t.experts.begin())));
    }
    return all;
  };
  for (uint32_t level = domains_.tree().depth(); level-- > 0;) {
    for (const Giving& g : givings_[rank]) {
      if (g.level != level) continue;
      for (uint32_t i = 0; g.sums && i < g.experts.size(); ++i)
        b.reduce(slot(rank, g.sum_slot + i), sources(g.experts[i], level), false, true);
      b.wait(g.to, kCredit, layout_.depth);
      for (uint32_t i = 0; i < g.experts.size(); ++i)
        b.put(slot(g.to, g.slot_there + i),
              g.sums ? slot(rank, g.sum_slot + i) : in(rank, in_block(rank, g.experts[i])));
      b.signal(g.to, kData);
    }
    for (const Taking& t : takings)
      if (t.level == level) b.wait(t.from, kData);
  }
  const std::span<const uint32_t> own = homes_.experts_of(rank);
  for (uint32_t i = 0; i < own.size(); ++i) {
    const std::vector<Ref> all = sources(own[i], -1);
    if (all.size() == 1) {
      b.copy(out(rank, i), all[0]);
    } else {
      b.reduce(out(rank, i), all, true);
    }
  }
  for (const Taking& t : takings) b.signal(t.from, kCredit);
  return std::move(b).finish();
}

Program ExpertReturn::build_direct(uint32_t rank) const {
  ProgramBuilder b(shape_, rank, layout_);
  const auto holds = [&](uint32_t holder, uint32_t home) {
    return homes_.n_local(home) > 0 && std::binary_search(holders_[home].begin(), holders_[home].end(), holder);
  };
  std::vector<uint32_t> readers, sources;
  for (uint32_t i = 1; i < shape_.n_ranks; ++i) {
    if (holds(rank, b.after(i))) readers.push_back(b.after(i));
    if (holds(b.before(i), rank)) sources.push_back(b.before(i));
  }
  b.when(When::kFirst);
  for (const uint32_t r : readers) b.signal(r, kData);
  for (const uint32_t s : sources) b.wait(s, kData);
  b.when(When::kEvery);
  const std::span<const uint32_t> own = homes_.experts_of(rank);
  for (uint32_t i = 0; i < own.size(); ++i) {
    std::vector<Ref> all;
    for (const uint32_t holder : holders_[rank]) all.push_back(in(holder, in_block(holder, own[i])));
    if (all.size() == 1) {
      b.copy(out(rank, i), all[0]);
    } else {
      b.reduce(out(rank, i), all, true);
    }
  }
  b.when(When::kLast);
  for (const uint32_t s : sources) b.signal(s, kCredit);
  for (const uint32_t r : readers) b.wait(r, kCredit);
  return std::move(b).finish();
}

uint64_t ExpertReturn::hash() const {
  const Chunking k = chunking();
  uint64_t h = hash_combine(domains_.hash(), direct_ ? 3 : 2);
  for (const uint32_t home : homes_.owner) h = hash_combine(h, home);
  h = hash_combine(hash_combine(h, shape_.count), shape_.element_bytes);
  return hash_combine(hash_combine(h, k.chunk), layout_.n_slots * uint64_t{16} + layout_.depth);
}

plan::Plan ExpertReturn::build_all() const { return whole_plan(*this, shape_); }

plan::BlockExpectation ExpertReturn::expectation() const {
  plan::BlockExpectation expected;
  for (uint32_t r = 0; r < shape_.n_ranks; ++r) {
    expected.input_blocks.push_back(static_cast<uint32_t>(held_[r].size()));
    std::vector<plan::ExpectedRow>& rows = expected.output.emplace_back();
    for (const uint32_t e : homes_.experts_of(r)) {
      plan::ExpectedRow& row = rows.emplace_back();
      for (const uint32_t holder : holders_[r]) row.terms.push_back({holder, in_block(holder, e), 1});
    }
  }
  return expected;
}

}  // namespace moeccl::algo
