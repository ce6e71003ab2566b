#include "src/algo/expert_gather.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/algo/whole_plan.h"
#include "src/base/hash.h"

namespace moeccl::algo {

namespace {

// A pair of ranks meets at one level only, so one sig for data and one for freed slots serve all levels; the third is
// order between a rank's own lanes.
enum Sig : uint32_t { kData, kCredit, kForwarded };

}  // namespace

ExpertGather::ExpertGather(const Domains& domains, const Placement& homes, const ExpertExchange& s)
    : domains_(domains), homes_(homes), direct_(s.reach.views) {
  const uint32_t n = domains.n_ranks();
  held_.resize(n);
  arrivals_.resize(n);
  departures_.resize(n);
  uint32_t most_in = 1, most_held = 1, most_slots = 0;
  std::vector<uint32_t> used(n, 0);
  for (const Domains::Send& send : domains.sends()) {
    std::vector<uint32_t> experts = experts_of(send.from, send.level);
    if (experts.empty()) continue;
    departures_[send.from].push_back({send.to, send.level, used[send.to]});
    const uint32_t first = used[send.to];
    used[send.to] += static_cast<uint32_t>(experts.size());
    arrivals_[send.to].push_back({send.from, send.level, first, std::move(experts)});
  }
  for (uint32_t r = 0; r < n; ++r) {
    held_[r] = experts_of(r, domains.tree().depth());
    std::sort(held_[r].begin(), held_[r].end());
    most_in = std::max(most_in, homes.n_local(r));
    most_held = std::max(most_held, static_cast<uint32_t>(held_[r].size()));
    most_slots = std::max(most_slots, used[r]);
  }
  shape_.op = moecclOpExpertGather;
  shape_.n_ranks = n;
  shape_.count = s.count;
  shape_.element_bytes = s.element_bytes;
  shape_.reach = s.reach;
  shape_.staging_bytes = s.staging_bytes;
  shape_.most_in_blocks = most_in;
  shape_.most_out_blocks = most_held;
  layout_ = direct_ ? Layout{0, 1} : Layout{most_slots, tuning::kOverlap};
}

Result<ExpertGather> ExpertGather::make(const Domains& domains, const Placement& homes,
                                        const ExpertExchange& settings) {
  ExpertGather gather(domains, homes, settings);
  constexpr uint32_t kMostBlocks = 1 << 15;  // slots and blocks are 16-bit numbers in plans
  if (gather.shape_.most_out_blocks > kMostBlocks)
    return error(moecclUnsupported, "a rank would hold {} experts, at most {} are possible: use smaller domains",
                 gather.shape_.most_out_blocks, kMostBlocks);
  MOECCL_TRY(chunks_fit(gather.shape_, gather.layout_));
  return gather;
}

Chunking ExpertGather::chunking() const {
  return cut(shape_, layout_, direct_ ? tuning::kDirectAllGather : tuning::kExpertMove);
}

std::vector<uint32_t> ExpertGather::experts_of(uint32_t from, uint32_t level) const {
  std::vector<uint32_t> experts;
  for (const uint32_t home : domains_.held(from, level)) {
    const std::span<const uint32_t> own = homes_.experts_of(home);
    experts.insert(experts.end(), own.begin(), own.end());
  }
  return experts;
}

uint32_t ExpertGather::out_block(uint32_t rank, uint32_t expert) const {
  const std::vector<uint32_t>& all = held_[rank];
  return static_cast<uint32_t>(std::lower_bound(all.begin(), all.end(), expert) - all.begin());
}

Program ExpertGather::build(uint32_t rank) const { return direct_ ? build_direct(rank) : build_staged(rank); }

Program ExpertGather::build_staged(uint32_t rank) const {
  ProgramBuilder b(shape_, rank, layout_);
  const std::vector<Arrival>& arrivals = arrivals_[rank];
  const std::vector<Departure>& departures = departures_[rank];
  const std::span<const uint32_t> own = homes_.experts_of(rank);
  const auto send_own = [&](const Departure& d) {
    b.wait(d.to, kCredit, layout_.depth);
    for (uint32_t i = 0; i < own.size(); ++i) b.put(slot(d.to, d.first_slot + i), in(rank, i));
  };
  b.lane(LaneKind::kInter);
  for (const Departure& d : departures) {
    if (d.level > 0) continue;
    send_own(d);
    b.signal(d.to, kData);
  }
  // Inner levels: own experts at once, then those that outer levels brought, as they come.
  std::vector<bool> awaited(arrivals.size(), false);
  bool forwards = false;
  b.lane(LaneKind::kIntra);
  for (uint32_t level = 1; level < domains_.tree().depth(); ++level) {
    std::vector<const Departure*> now;
    for (const Departure& d : departures)
      if (d.level == level) now.push_back(&d);
    if (now.empty()) continue;
    for (const Departure* d : now) send_own(*d);
    uint32_t sent = static_cast<uint32_t>(own.size());
    for (size_t a = 0; a < arrivals.size(); ++a) {
      if (arrivals[a].level >= level) continue;
      if (!awaited[a]) b.wait(arrivals[a].from, kData);
      awaited[a] = forwards = true;
      for (uint32_t i = 0; i < arrivals[a].experts.size(); ++i, ++sent)
        for (const Departure* d : now) b.put(slot(d->to, d->first_slot + sent), slot(rank, arrivals[a].first_slot + i));
    }
    for (const Departure* d : now) b.signal(d->to, kData);
  }
  if (forwards) b.signal(rank, kForwarded);
  b.lane(LaneKind::kCopy);
  for (uint32_t i = 0; i < own.size(); ++i) b.copy(out(rank, out_block(rank, own[i])), in(rank, i));
  if (forwards) b.wait(rank, kForwarded);
  for (size_t a = 0; a < arrivals.size(); ++a) {
    const Arrival& arrival = arrivals[a];
    if (!awaited[a]) b.wait(arrival.from, kData);
    for (uint32_t i = 0; i < arrival.experts.size(); ++i)
      b.copy(out(rank, out_block(rank, arrival.experts[i])), slot(rank, arrival.first_slot + i));
    b.signal(arrival.from, kCredit);
  }
  return std::move(b).finish();
}

// Whoever holds an expert at the end reads it at its owner.
Program ExpertGather::build_direct(uint32_t rank) const {
  ProgramBuilder b(shape_, rank, layout_);
  std::vector<uint32_t> readers, sources;
  for (uint32_t i = 1; i < shape_.n_ranks; ++i) {
    const uint32_t to = b.after(i), from = b.before(i);
    const auto& theirs = domains_.held(to, domains_.tree().depth());
    const auto& mine = domains_.held(rank, domains_.tree().depth());
    if (homes_.n_local(rank) > 0 && std::find(theirs.begin(), theirs.end(), rank) != theirs.end())
      readers.push_back(to);
    if (homes_.n_local(from) > 0 && std::find(mine.begin(), mine.end(), from) != mine.end()) sources.push_back(from);
  }
  b.when(When::kFirst);
  for (const uint32_t r : readers) b.signal(r, kData);
  for (const uint32_t s : sources) b.wait(s, kData);
  b.when(When::kEvery);
  const auto copy_from = [&](uint32_t home) {
    const std::span<const uint32_t> experts = homes_.experts_of(home);
    for (uint32_t i = 0; i < experts.size(); ++i) b.copy(out(rank, out_block(rank, experts[i])), in(home, i));
  };
  copy_from(rank);
  for (const uint32_t s : sources) copy_from(s);
  b.when(When::kLast);
  for (const uint32_t s : sources) b.signal(s, kCredit);
  for (const uint32_t r : readers) b.wait(r, kCredit);
  return std::move(b).finish();
}

uint64_t ExpertGather::hash() const {
  const Chunking k = chunking();
  uint64_t h = hash_combine(domains_.hash(), direct_ ? 1 : 0);
  for (const uint32_t home : homes_.owner) h = hash_combine(h, home);
  h = hash_combine(hash_combine(h, shape_.count), shape_.element_bytes);
  return hash_combine(hash_combine(h, k.chunk), layout_.n_slots * uint64_t{16} + layout_.depth);
}

plan::Plan ExpertGather::build_all() const { return whole_plan(*this, shape_); }

plan::BlockExpectation ExpertGather::expectation() const {
  plan::BlockExpectation expected;
  for (uint32_t r = 0; r < shape_.n_ranks; ++r) {
    expected.input_blocks.push_back(homes_.n_local(r));
    std::vector<plan::ExpectedRow>& rows = expected.output.emplace_back();
    for (const uint32_t e : held_[r]) rows.push_back({{{homes_.owner[e], homes_.local_index[e], 1}}, false});
  }
  return expected;
}

}  // namespace moeccl::algo
