// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_move.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/base/hash.h"

namespace moeccl::algo {

namespace {

enum Sig : uint32_t { kData, kCredit };

// The lists that row steps name, chunk by chunk.
class Lists {
 public:
  explicit Lists(uint32_t n_chunks) : n_chunks_(n_chunks) {}
  // A list whose chunk c holds what `block(c)` says; returns its number.
  template <class Block>
  uint32_t add(Block&& block) {
    for (uint32_t c = 0; c < n_chunks_; ++c) rows_.push_back(block(c));
    return static_cast<uint32_t>(rows_.size() / n_chunks_ - 1);
  }
  std::vector<plan::RowBlock> take() { return std::move(rows_); }

 private:
  uint32_t n_chunks_;
  std::vector<plan::RowBlock> rows_;
};

}  // namespace

Result<ReplicaMove> ReplicaMove::make(const ReplicaPlacement& placement, const Settings& settings) {
  for (uint32_t e = 0; e < placement.n_experts && settings.op == moecclOpCollectGradients; ++e) {
    if (placement.hosts[e].empty())
      return error(moecclInvalidArgument,
                   "slot_expert has no slot for expert {}: its gradient is nowhere; give every expert a slot", e);
  }
  ReplicaMove m(placement, settings);
  const uint32_t n = placement.n_ranks;
  m.sent_.resize(size_t{n} * n);
  uint64_t most = 0;
  uint32_t most_senders = 0;
  for (uint32_t to = 0; to < n; ++to) {
    uint32_t senders = 0;
    for (uint32_t from = 0; from < n; ++from) {
      uint64_t total = 0;
      for (const Piece& piece : m.pieces(from, to)) total += piece.length;
      m.sent_[size_t{from} * n + to] = total;
      if (from == to || total == 0) continue;
      most = std::max(most, total);
      ++senders;
    }
    most_senders = std::max(most_senders, senders);
  }
  Shape& shape = m.shape_;
  shape = {.op = settings.op,
           .n_ranks = n,
           .count = most,
           .element_bytes = settings.element_bytes,
           .reach = settings.reach,
           .staging_bytes = settings.staging_bytes};
  m.layout_ = {most_senders, tuning::kOverlap};
  MOECCL_TRY(chunks_fit(shape, m.layout_));
  m.chunking_ = cut(shape, m.layout_, tuning::kExpertMove);
  return m;
}

std::vector<ReplicaMove::Piece> ReplicaMove::pieces(uint32_t from, uint32_t to) const {
  std::vector<Piece> all;
  const uint64_t shard = shard_elements(s_.count, placement_.n_ranks);
  for (uint32_t e = 0; e < placement_.n_experts; ++e) {
    if (s_.op == moecclOpCollectGradients) {
      if (gradient_source(placement_, e, to) != from) continue;
      const Shard part = shard_of(s_.count, placement_.n_ranks, to);
      const ExpertHost* host = placement_.host(e, from);
      if (part.length > 0) all.push_back({host->slots[0] * s_.count + part.begin, part.length, {e * shard}});
    } else {
      const Shard part = shard_of(s_.count, placement_.n_ranks, from);
      const ExpertHost* host = placement_.host(e, to);
      if (host == nullptr || part.length == 0) continue;
      Piece piece{e * shard, part.length, {}};
      for (const uint32_t s : host->slots) piece.dst.push_back(s * s_.count + part.begin);
      all.push_back(std::move(piece));
    }
  }
  return all;
}

uint64_t ReplicaMove::sent(uint32_t from, uint32_t to) const { return sent_[size_t{from} * placement_.n_ranks + to]; }

uint64_t ReplicaMove::input_elements(uint32_t rank) const {
  return s_.op == moecclOpCollectGradients ? placement_.n_slots(rank) * s_.count
                                           : placement_.n_experts * shard_elements(s_.count, placement_.n_ranks);
}

uint64_t ReplicaMove::output_elements(uint32_t rank) const {
  return s_.op == moecclOpPlaceWeights ? placement_.n_slots(rank) * s_.count
                                       : placement_.n_experts * shard_elements(s_.count, placement_.n_ranks);
}

uint32_t ReplicaMove::slot_index(uint32_t from, uint32_t to) const {
  uint32_t index = 0;
  for (uint32_t r = 0; r < from; ++r)
    if (r != to && sent(r, to) > 0) ++index;
  return index;
}

uint64_t ReplicaMove::slot_elements() const {
  const uint64_t line = s_.element_bytes >= 64 ? 1 : 64 / s_.element_bytes;
  return (chunking_.chunk + line - 1) / line * line;
}

ReplicaMove::Bound ReplicaMove::build(uint32_t rank) const {
  const uint64_t slot_size = chunking_.chunk;
  Lists lists(chunking_.n_chunks);
  ProgramBuilder b(shape_, rank, layout_);
  // Elements of the packed stream of a pair that are both in [begin, end) and in chunk c.
  const auto overlap = [&](uint64_t begin, uint64_t end, uint32_t c) {
    const uint64_t first = std::max(begin, slot_size * c), last = std::min(end, slot_size * (c + 1));
    return Shard{first, last > first ? last - first : 0};
  };

  b.lane(LaneKind::kInter);
  for (uint32_t i = 1; i < shape_.n_ranks; ++i) {
    const uint32_t to = b.after(i);
    if (sent(rank, to) == 0) continue;
    b.wait(to, kCredit, layout_.depth);
    uint64_t packed = 0;
    for (const Piece& piece : pieces(rank, to)) {
      const uint32_t list = lists.add([&](uint32_t c) {
        const Shard both = overlap(packed, packed + piece.length, c);
        plan::RowBlock block;
        block.src_first = piece.src + both.begin - packed;
        block.dst_first = both.begin - slot_size * c;
        block.count = both.length;
        return block;
      });
      b.rows(StepKind::kGatherRows, slot(to, slot_index(rank, to)), in(rank), list);
      packed += piece.length;
    }
    b.signal(to, kData);
  }

  b.lane(LaneKind::kCopy);
  b.when(When::kFirst);
  for (const Piece& piece : pieces(rank, rank)) {
    for (const uint64_t dst : piece.dst) {
      const uint32_t list = lists.add([&](uint32_t c) {
        plan::RowBlock block;
        block.src_first = piece.src;
        block.dst_first = dst;
        block.count = c == 0 ? piece.length : 0;
        return block;
      });
      b.rows(StepKind::kScatterRows, out(rank), in(rank), list);
    }
  }
  b.when(When::kEvery);
  for (uint32_t i = 1; i < shape_.n_ranks; ++i) {
    const uint32_t from = b.before(i);
    if (sent(from, rank) == 0) continue;
    b.wait(from, kData);
    uint64_t packed = 0;
    for (const Piece& piece : pieces(from, rank)) {
      for (const uint64_t dst : piece.dst) {
        const uint32_t list = lists.add([&](uint32_t c) {
          const Shard both = overlap(packed, packed + piece.length, c);
          plan::RowBlock block;
          block.src_first = both.begin - slot_size * c;
          block.dst_first = dst + both.begin - packed;
          block.count = both.length;
          return block;
        });
        b.rows(StepKind::kScatterRows, out(rank), slot(rank, slot_index(from, rank)), list);
      }
      packed += piece.length;
    }
    b.signal(from, kCredit);
  }
  Bound bound;
  bound.program = std::move(b).finish();
  bound.rows = lists.take();
  bound.binding.chunking = chunking_;
  bound.binding.element_bytes = s_.element_bytes;
  bound.binding.slot_elements = slot_elements();
  bound.binding.rows = bound.rows;
  return bound;
}

uint64_t ReplicaMove::hash() const {
  uint64_t h = hash_combine(placement_.hash(), static_cast<uint64_t>(s_.op));
  h = hash_combine(hash_combine(h, s_.count), s_.element_bytes);
  return hash_combine(hash_combine(h, chunking_.chunk), layout_.n_slots * uint64_t{16} + layout_.depth);
}

}  // namespace moeccl::algo
