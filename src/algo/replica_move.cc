// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_move.h"

#include <algorithm>
#include <span>

#include "src/algo/tuning.h"
#include "src/base/hash.h"

namespace moeccl::algo {

namespace {

enum Sig : uint32_t { kData, kCredit, kPassed, kReturned };

}  // namespace

Result<ReplicaMove> ReplicaMove::make(const ReplicaPlacement& placement, const LevelTree& tree,
                                      const Settings& settings) {
  const bool collects = settings.op == moecclOpCollectGradients;
  if (collects) MOECCL_TRY(every_expert_has_a_slot(placement));
  ReplicaMove m(placement, settings);
  const uint32_t n = placement.n_ranks;
  const uint64_t shard = shard_elements(settings.count, n);
  // A rank receives one piece of each expert, or each rank's piece of each expert that it holds.
  const uint64_t origins = collects ? 1 : shard == 0 ? 0 : (settings.count + shard - 1) / shard;
  const uint64_t places = n == 1 ? 0 : origins * (collects ? placement.n_experts : placement.most_experts);
  m.shape_ = {.op = settings.op,
              .n_ranks = n,
              .count = shard,
              .element_bytes = settings.element_bytes,
              .reach = settings.reach,
              .staging_bytes = settings.staging_bytes};
  const uint32_t pieces = collects ? 1 : std::max(1u, placement.most_experts);  // in what one rank sends to another
  MOECCL_ASSIGN_OR_RETURN(m.places_, StagedPlaces::make(m.shape_, places, tuning::kExpertMove / pieces));
  if (settings.way == Way::kNodes) {
    MOECCL_TRY(needs_nodes(m.shape_, tree));
    m.node_of_ = &tree.levels.front().group_of_rank;
    m.tree_hash_ = tree.hash();
  }
  return m;
}

ReplicaMove::Pieces ReplicaMove::collect_pieces(uint32_t rank, const ExpertPlaces& places) const {
  Pieces all;
  const uint32_t n = placement_.n_ranks;
  const uint64_t shard = shard_elements(s_.count, n);
  const uint64_t mine = shard_of(s_.count, n, rank).length;
  for (uint32_t e = 0; e < placement_.n_experts && mine > 0; ++e) {
    const uint32_t from = gradient_source(placement_, e, rank);
    if (from != rank) all.arriving.push_back({from, e, 0, mine, places.shard(e, shard), nullptr});
  }
  const std::span<const int32_t> slots(placement_.slot_expert);
  for (uint32_t s = placement_.first_slot[rank]; s < placement_.first_slot[rank + 1]; ++s) {
    if (slots[s] < 0) continue;
    const auto e = static_cast<uint32_t>(slots[s]);
    const std::vector<ExpertHost>& hosts = placement_.hosts[e];
    const ExpertHost* host = placement_.host(e, rank);
    if (host->slots[0] != s - placement_.first_slot[rank]) continue;  // a further replica
    const uint64_t first = places.slot(host->slots[0], s_.count);
    if (mine > 0) all.own.push_back({rank, e, 0, mine, first + rank * shard, nullptr});
    // As in gradient_source(): every hosts.size()-th rank that has no replica itself.
    auto other = hosts.begin();
    const auto step = static_cast<uint32_t>(hosts.size());
    for (auto to = static_cast<uint32_t>(host - hosts.data()); to < n; to += step) {
      while (other != hosts.end() && other->rank < to) ++other;
      if (other != hosts.end() && other->rank == to) continue;
      const Shard part = shard_of(s_.count, n, to);
      if (part.length > 0) all.sent.push_back({to, e, 0, part.length, first + part.begin, nullptr});
    }
  }
  return all;
}

ReplicaMove::Pieces ReplicaMove::place_pieces(uint32_t rank, const ExpertPlaces& places) const {
  Pieces all;
  const uint32_t n = placement_.n_ranks, node = node_of(rank);
  const uint64_t shard = shard_elements(s_.count, n);
  const Shard mine = shard_of(s_.count, n, rank);
  for (uint32_t e = 0; e < placement_.n_experts; ++e) {
    const std::vector<const ExpertHost*> hosts = hosts_by_node(placement_, e, node_of_);
    const auto send = [&](const ExpertHost& to) {
      if (to.rank == rank) {
        all.own.push_back({rank, 0, 0, mine.length, places.shard(e, shard), &to});
      } else {
        all.sent.push_back({to.rank, place_number(rank, to.index), 0, mine.length, places.shard(e, shard), nullptr});
      }
    };
    for (size_t first = 0, last = 0; first < hosts.size(); first = last) {
      const uint32_t there = node_of(hosts[first]->rank);
      while (last < hosts.size() && node_of(hosts[last]->rank) == there) ++last;
      const std::span<const ExpertHost* const> group(hosts.data() + first, last - first);
      if (mine.length > 0) {
        if (there != node) {
          send(*group[rank % group.size()]);
        } else {
          for (const ExpertHost* to : group) send(*to);
        }
      }
      if (there != node) continue;
      const auto self = std::find_if(group.begin(), group.end(), [&](const ExpertHost* h) { return h->rank == rank; });
      if (self == group.end()) continue;
      for (uint32_t o = 0; o < n; ++o) {
        const Shard part = shard_of(s_.count, n, o);
        if (o == rank || part.length == 0) continue;
        const ExpertHost& here = **self;
        const uint32_t number = place_number(o, here.index);
        const bool inside = node_of(o) == node;
        const ExpertHost& relay = *group[o % group.size()];
        const Piece piece{inside || relay.rank == rank ? o : relay.rank, number, 0, part.length, part.begin, &here};
        (piece.peer == o ? all.arriving : all.passed_on).push_back(piece);
        if (inside || relay.rank != rank) continue;
        for (const ExpertHost* to : group)
          if (to->rank != rank)
            all.passed.push_back({to->rank, place_number(o, to->index), number, part.length, 0, nullptr});
      }
    }
  }
  return all;
}

uint64_t ReplicaMove::input_elements(uint32_t rank) const {
  return s_.op == moecclOpCollectGradients ? placement_.n_slots(rank) * s_.count
                                           : placement_.n_experts * shard_elements(s_.count, placement_.n_ranks);
}

uint64_t ReplicaMove::output_elements(uint32_t rank) const {
  return s_.op == moecclOpPlaceWeights ? placement_.n_slots(rank) * s_.count
                                       : placement_.n_experts * shard_elements(s_.count, placement_.n_ranks);
}

// Writes a rank's steps and the lists that they name.
class ReplicaMove::Writer {
 public:
  Writer(const ReplicaMove& move, uint32_t rank, const ExpertPlaces& places)
      : m_(move), rank_(rank), places_(places), b_(move.shape_, rank, move.places_.layout) {}

  // Calls body(peer, its pieces) for each peer with pieces, the nearest after this rank (or before it) first.
  template <class Body>
  void for_each_peer(std::vector<Piece>& pieces, bool after, Body&& body) {
    const uint32_t n = m_.shape_.n_ranks;
    std::vector<uint32_t> first(n + 1, 0);  // by distance
    const auto distance = [&](uint32_t peer) { return after ? (peer + n - rank_) % n : (rank_ + n - peer) % n; };
    for (const Piece& piece : pieces) ++first[distance(piece.peer) + 1];
    for (uint32_t d = 0; d < n; ++d) first[d + 1] += first[d];
    std::vector<Piece> sorted(pieces.size());
    std::vector<uint32_t> at(first.begin(), first.end() - 1);
    for (const Piece& piece : pieces) sorted[at[distance(piece.peer)]++] = piece;
    pieces = std::move(sorted);
    for (uint32_t d = 1; d < n; ++d)
      if (first[d] < first[d + 1])
        body(after ? b_.after(d) : b_.before(d),
             std::span<const Piece>(pieces.data() + first[d], first[d + 1] - first[d]));
  }

  // Gathers pieces into a peer's staging: from Input, or onwards from this rank's staging.
  void give(uint32_t to, std::span<const Piece> pieces, bool on) {
    for (const Piece& p : pieces) {
      const uint64_t there = in_slot(p.number), here = on ? in_slot(p.origin_place) : p.begin;
      const uint32_t list = add_rows(rows_, m_.chunking(), p.length, [&](uint64_t begin) {
        return plan::RowBlock{.src_first = on ? here : here + begin, .dst_first = there};
      });
      b_.rows(StepKind::kGatherRows, place(to, p.number), on ? place(rank_, p.origin_place) : in(rank_), list);
    }
  }
  // Scatters pieces from this rank's staging into Output.
  void take(std::span<const Piece> pieces) {
    for (const Piece& p : pieces) {
      const auto put = [&](uint64_t first) {
        const uint32_t list = add_rows(rows_, m_.chunking(), p.length, [&](uint64_t begin) {
          return plan::RowBlock{.src_first = in_slot(p.number), .dst_first = first + begin};
        });
        b_.rows(StepKind::kScatterRows, out(rank_), place(rank_, p.number), list);
      };
      for_each_place(p, put);
    }
  }
  // Copies own pieces as a whole, before the first chunk.
  void copy_own(std::span<const Piece> pieces) {
    const uint64_t shard = shard_elements(m_.s_.count, m_.shape_.n_ranks);
    b_.when(When::kFirst);
    for (const Piece& p : pieces) {
      const auto put = [&](uint64_t first) {
        const size_t at = rows_.size();
        rows_.resize(at + m_.chunking().n_chunks);
        rows_[at] = {.src_first = p.begin, .dst_first = first, .count = p.length};
        b_.rows(StepKind::kScatterRows, out(rank_), in(rank_), static_cast<uint32_t>(at / m_.chunking().n_chunks));
      };
      if (p.host == nullptr) {
        put(places_.shard(p.number, shard));
      } else {
        for (const uint32_t s : p.host->slots) put(places_.slot(s, m_.s_.count) + shard * rank_);
      }
    }
    b_.when(When::kEvery);
  }
  ProgramBuilder& builder() { return b_; }

  BoundRows finish() && {
    BoundRows bound;
    bound.program = std::move(b_).finish();
    bound.rows = std::move(rows_);
    bound.binding.chunking = m_.chunking();
    bound.binding.element_bytes = m_.s_.element_bytes;
    bound.binding.slot_elements = m_.places_.slot_elements();
    bound.binding.rows = bound.rows;
    return bound;
  }

 private:
  Ref place(uint32_t rank, uint32_t number) const { return m_.places_.ref(rank, number); }
  uint64_t in_slot(uint32_t number) const { return m_.places_.first_row(number); }
  template <class Put>
  void for_each_place(const Piece& p, Put&& put) const {
    if (p.host == nullptr) return put(p.begin);
    for (const uint32_t s : p.host->slots) put(places_.slot(s, m_.s_.count) + p.begin);
  }

  const ReplicaMove& m_;
  uint32_t rank_;
  const ExpertPlaces& places_;
  ProgramBuilder b_;
  std::vector<plan::RowBlock> rows_;
};

BoundRows ReplicaMove::build(uint32_t rank, const ExpertPlaces& places) const {
  Pieces pieces = s_.op == moecclOpCollectGradients ? collect_pieces(rank, places) : place_pieces(rank, places);
  Writer w(*this, rank, places);
  ProgramBuilder& b = w.builder();

  b.lane(LaneKind::kInter);
  w.for_each_peer(pieces.sent, true, [&](uint32_t to, std::span<const Piece> sent) {
    b.wait(to, kCredit, b.depth());
    w.give(to, sent, false);
    b.signal(to, kData);
  });

  b.lane(LaneKind::kCopy);
  w.copy_own(pieces.own);
  std::vector<uint32_t> creditors;
  w.for_each_peer(pieces.arriving, false, [&](uint32_t from, std::span<const Piece> arriving) {
    b.wait(from, kData);
    w.take(arriving);
    // Pieces that are passed on are read once more, so their credit follows later.
    if (pieces.passed.empty() || node_of(from) == node_of(rank)) {
      b.signal(from, kCredit);
    } else {
      creditors.push_back(from);
    }
  });
  w.for_each_peer(pieces.passed, true, [&](uint32_t to, std::span<const Piece> passed) {
    b.wait(to, kReturned, b.depth());
    w.give(to, passed, true);
    b.signal(to, kPassed);
  });
  for (const uint32_t from : creditors) b.signal(from, kCredit);

  b.lane(LaneKind::kIntra);
  w.for_each_peer(pieces.passed_on, false, [&](uint32_t from, std::span<const Piece> passed) {
    b.wait(from, kPassed);
    w.take(passed);
    b.signal(from, kReturned);
  });
  return std::move(w).finish();
}

uint64_t ReplicaMove::hash() const {
  uint64_t h = hash_combine(placement_.hash(), static_cast<uint64_t>(s_.op));
  return hash_combine(places_.hash(hash_combine(hash_combine(h, s_.count), s_.element_bytes)), tree_hash_);
}

}  // namespace moeccl::algo
