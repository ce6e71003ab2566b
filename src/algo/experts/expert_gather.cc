// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/expert_gather.h"

#include "src/algo/tuning.h"
#include "src/algo/whole_plan.h"

namespace moeccl::algo {

ExpertGather::ExpertGather(const Domains& domains, const Placement& homes, const ExpertExchange& s)
    : ExpertExchangePlan(moecclOpExpertGather, domains, homes, s) {
  set_layout(tuning::kDirectAllGather);
}

Result<ExpertGather> ExpertGather::make(const Domains& domains, const Placement& homes,
                                        const ExpertExchange& settings) {
  MOECCL_TRY(applies(moecclOpExpertGather, settings.way, settings.reach, settings.deterministic));
  ExpertGather gather(domains, homes, settings);
  if (gather.shape_.most_out_blocks > kMostBlocks)
    return error(moecclUnsupported, "a rank would hold {} experts, at most {} are possible: use smaller domains",
                 gather.shape_.most_out_blocks, kMostBlocks);
  MOECCL_TRY(chunks_fit(gather.shape_, gather.layout_));
  return gather;
}

plan::Plan ExpertGather::build_all() const { return whole_plan(*this, shape_); }

Program ExpertGather::build(uint32_t rank) const {
  if (!direct_) return build_staged(rank);
  // A rank that holds an expert at the end reads it from its owner.
  const auto reads = [&](uint32_t reader, uint32_t home) { return holds(reader, home); };
  return build_direct(rank, reads, [&](ProgramBuilder& b, const std::vector<uint32_t>& sources) {
    const auto copy_from = [&](uint32_t home) {
      const std::span<const uint32_t> experts = homes_.experts_of(home);
      for (uint32_t i = 0; i < experts.size(); ++i) b.copy(out(rank, held_block(rank, experts[i])), in(home, i));
    };
    copy_from(rank);
    for (const uint32_t s : sources) copy_from(s);
  });
}

Program ExpertGather::build_staged(uint32_t rank) const {
  ProgramBuilder b(shape_, rank, layout_);
  const std::vector<Message>& arrivals = received_[rank];
  const std::vector<Message>& departures = sent_[rank];
  const std::span<const uint32_t> own = homes_.experts_of(rank);
  const auto send_own = [&](const Message& d) {
    b.wait(d.peer, kCredit, layout_.depth);
    for (uint32_t i = 0; i < own.size(); ++i) b.put(slot(d.peer, d.first_slot + i), in(rank, i));
  };
  b.lane(LaneKind::kInter);
  for (const Message& d : departures) {
    if (d.level > 0) continue;
    send_own(d);
    b.signal(d.peer, kData);
  }
  // Inner levels send own experts at once, then those that outer levels bring, as they come.
  std::vector<bool> awaited(arrivals.size(), false);
  bool forwards = false;
  b.lane(LaneKind::kIntra);
  for (uint32_t level = 1; level < domains_.tree().depth(); ++level) {
    std::vector<const Message*> now;
    for (const Message& d : departures)
      if (d.level == level) now.push_back(&d);
    if (now.empty()) continue;
    for (const Message* d : now) send_own(*d);
    uint32_t sent = static_cast<uint32_t>(own.size());
    for (size_t a = 0; a < arrivals.size(); ++a) {
      if (arrivals[a].level >= level) continue;
      if (!awaited[a]) b.wait(arrivals[a].peer, kData);
      awaited[a] = forwards = true;
      for (uint32_t i = 0; i < arrivals[a].experts.size(); ++i, ++sent)
        for (const Message* d : now) b.put(slot(d->peer, d->first_slot + sent), slot(rank, arrivals[a].first_slot + i));
    }
    for (const Message* d : now) b.signal(d->peer, kData);
  }
  if (forwards) b.signal(rank, kForwarded);
  b.lane(LaneKind::kCopy);
  for (uint32_t i = 0; i < own.size(); ++i) b.copy(out(rank, held_block(rank, own[i])), in(rank, i));
  if (forwards) b.wait(rank, kForwarded);
  for (size_t a = 0; a < arrivals.size(); ++a) {
    const Message& arrival = arrivals[a];
    if (!awaited[a]) b.wait(arrival.peer, kData);
    for (uint32_t i = 0; i < arrival.experts.size(); ++i)
      b.copy(out(rank, held_block(rank, arrival.experts[i])), slot(rank, arrival.first_slot + i));
    b.signal(arrival.peer, kCredit);
  }
  return std::move(b).finish();
}

}  // namespace moeccl::algo
