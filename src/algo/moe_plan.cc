// SPDX-License-Identifier: Apache-2.0
#include "src/algo/moe_plan.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "src/algo/builder.h"
#include "src/base/hash.h"
#include "src/routing/domains.h"

namespace moeccl::algo {

namespace {

// At most one hop uses a pair of ranks (Paths::hop), so one sig for rows and one for freed slots serve both directions
// of both operations. The others order a rank's own lanes.
enum Sig : uint8_t { kData = 0, kCredit = 1, kForwarded = 2, kSummed = 3 };

// Returns the positions of the edges of `hop`: those to greater ranks first, so that ranks do not all turn to one peer.
// The order is reversed for receiving, so that each edge is waited for when its rows come.
std::vector<uint32_t> turn(const std::vector<Edge>& edges, uint32_t hop, uint32_t rank, bool receive) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < edges.size(); ++i)
    if (edges[i].hop == hop) order.push_back(i);
  const auto middle = std::find_if(order.begin(), order.end(), [&](uint32_t i) { return edges[i].peer > rank; });
  std::rotate(order.begin(), middle, order.end());
  if (receive) std::reverse(order.begin(), order.end());
  return order;
}

LaneKind lane_of(const Paths& paths, uint32_t hop) {
  return paths.crosses_outermost(hop) ? LaneKind::kInter : LaneKind::kIntra;
}

// What both operations have in common.
class RowProgram {
 protected:
  RowProgram(const Paths& paths, const RankRows& rank, const MoePlanShape& shape)
      : paths_(paths), r_(rank), shape_(shape), program_(rank.rank, {shape.n_slots, shape.depth}) {
    for (const MoePlanShape::Hop& hop : shape.hops) program_.wide_slots(hop.first, hop.width);
  }

  // Returns the block of edge `index` of this rank, or of an edge in the peer's list of the other direction.
  Ref own_block(const std::vector<Edge>& edges, uint32_t index) const {
    return block(r_.rank, edges[index].hop, place_in_hop(std::span(edges).first(index + 1), &Edge::hop));
  }
  Ref peer_block(const Edge& edge) const { return block(edge.peer, edge.hop, edge.peer_place); }

  // Waits until the peer has given back the slot that this chunk will overwrite.
  void wait_slot(uint32_t peer) { program_.wait(peer, kCredit, shape_.depth); }

  // Adds the parts of each edge in turn; batched, each part of all edges in turn.
  template <class... Parts>
  void for_edges(const std::vector<uint32_t>& edges, Parts&&... parts) {
    if (shape_.batched) {
      (std::for_each(edges.begin(), edges.end(), parts), ...);
      return;
    }
    for (const uint32_t e : edges) (parts(e), ...);
  }

  const Paths& paths_;
  const RankRows& r_;
  const MoePlanShape& shape_;
  ProgramBuilder program_;

 private:
  Ref block(uint32_t rank, uint32_t hop, uint32_t place) const {
    return slot(rank, shape_.hops[hop].first + place * shape_.hops[hop].width);
  }
};

class DispatchBuilder : RowProgram {
 public:
  DispatchBuilder(const Paths& paths, const RankRows& rank, const MoePlanShape& shape)
      : RowProgram(paths, rank, shape), awaited_(rank.edges.in.size(), false) {}

  Program build() {
    program_.lane(lane_of(paths_, 0));
    for_edges(
        turn(r_.edges.out, 0, r_.rank, false), [&](uint32_t j) { wait_slot(r_.edges.out[j].peer); },
        [&](uint32_t j) { gather_own(j); }, [&](uint32_t j) { program_.signal(r_.edges.out[j].peer, kData); });
    if (paths_.n_hops() > 1) {
      program_.lane(lane_of(paths_, 1));
      for (uint32_t h = 1; h < paths_.n_hops(); ++h) forward(h);
      if (forwards_) program_.signal(r_.rank, kForwarded);
    }
    deliver();
    return std::move(program_).finish();
  }

 private:
  void gather_own(uint32_t j) {
    program_.rows(StepKind::kGatherRows, peer_block(r_.edges.out[j]), in(r_.rank), r_.lists.gather(j, 0));
  }

  void await(uint32_t i) {
    if (!awaited_[i]) program_.wait(r_.edges.in[i].peer, kData);
  }

  void forward(uint32_t hop) {
    const std::vector<uint32_t> outs = turn(r_.edges.out, hop, r_.rank, false);
    if (outs.empty()) return;
    for_edges(
        outs, [&](uint32_t j) { wait_slot(r_.edges.out[j].peer); }, [&](uint32_t j) { gather_own(j); });
    for (uint32_t h = 0; h < hop; ++h) {
      for_edges(
          turn(r_.edges.in, h, r_.rank, true),
          [&](uint32_t i) {
            await(i);
            awaited_[i] = forwards_ = true;
          },
          [&](uint32_t i) {
            for (const uint32_t j : outs)
              program_.rows(StepKind::kGatherRows, peer_block(r_.edges.out[j]), own_block(r_.edges.in, i),
                            r_.lists.gather(j, 1 + i));
          });
    }
    for (const uint32_t j : outs) program_.signal(r_.edges.out[j].peer, kData);
  }

  void deliver() {
    program_.lane(LaneKind::kCopy);
    const Ref own = in(r_.rank), all = out(r_.rank);
    if (r_.owns && shape_.expert_major) {
      program_.when(When::kFirst);
      program_.rows(StepKind::kReduceRows, all, own, 0);
      program_.when(When::kEvery);
    }
    if (r_.owns) program_.rows(StepKind::kScatterRows, all, own, r_.lists.scatter(0));
    if (forwards_) program_.wait(r_.rank, kForwarded);
    for (uint32_t h = 0; h < paths_.n_hops(); ++h) {
      for_edges(
          turn(r_.edges.in, h, r_.rank, true), [&](uint32_t i) { await(i); },
          [&](uint32_t i) {
            if (r_.owns) program_.rows(StepKind::kScatterRows, all, own_block(r_.edges.in, i), r_.lists.scatter(1 + i));
          },
          [&](uint32_t i) { program_.signal(r_.edges.in[i].peer, kCredit); });
    }
  }

  std::vector<bool> awaited_;  // in edges that the forwarding lane waits for
  bool forwards_ = false;
};

class CombineBuilder : RowProgram {
 public:
  CombineBuilder(const Paths& paths, const RankRows& rank, const MoePlanShape& shape)
      : RowProgram(paths, rank, shape), awaited_(rank.edges.out.size(), false) {}

  // Lanes hand on what has come back: later hops, then hop 0, then the copy lane.
  Program build() {
    if (paths_.n_hops() > 1) {
      program_.lane(lane_of(paths_, 1));
      for (uint32_t h = paths_.n_hops() - 1; h > 0; --h) give_back(h);
    }
    const bool later = any_awaited();
    if (later) program_.signal(r_.rank, kForwarded);
    program_.lane(lane_of(paths_, 0));
    if (later) program_.wait(r_.rank, kForwarded);
    give_back(0);
    const bool summed = any_awaited();
    if (summed) program_.signal(r_.rank, kSummed);
    program_.lane(LaneKind::kCopy);
    if (summed) program_.wait(r_.rank, kSummed);
    await_returns(0);
    program_.rows(StepKind::kReduceRows, out(r_.rank), sources(0), 0);
    for (const Edge& edge : r_.edges.out) program_.signal(edge.peer, kCredit);
    return std::move(program_).finish();
  }

 private:
  bool any_awaited() const { return std::find(awaited_.begin(), awaited_.end(), true) != awaited_.end(); }

  // Returns this rank's Input and the slots of out edges from `first` on: the segments of RowLists.
  std::vector<Ref> sources(uint32_t first) const {
    std::vector<Ref> refs{in(r_.rank)};
    for (uint32_t j = first; j < r_.edges.out.size(); ++j) refs.push_back(own_block(r_.edges.out, j));
    return refs;
  }
  void await_returns(uint32_t first) {
    for (uint32_t j = first; j < r_.edges.out.size(); ++j) {
      if (!awaited_[j]) program_.wait(r_.edges.out[j].peer, kData);
      awaited_[j] = true;
    }
  }
  void give_back(uint32_t hop) {
    const std::vector<uint32_t> ins = turn(r_.edges.in, hop, r_.rank, false);
    if (ins.empty()) return;
    const uint32_t first = r_.edges.first_out_after(hop);
    await_returns(first);
    for_edges(
        ins, [&](uint32_t i) { wait_slot(r_.edges.in[i].peer); },
        [&](uint32_t i) { program_.rows(StepKind::kReduceRows, peer_block(r_.edges.in[i]), sources(first), 1 + i); },
        [&](uint32_t i) { program_.signal(r_.edges.in[i].peer, kData); });
  }

  std::vector<bool> awaited_;  // out edges whose returns some lane waits for
};

}  // namespace

MoePlanShape moe_plan_shape(const Paths& paths, bool expert_major, uint64_t slot_rows) {
  MoePlanShape shape;
  uint32_t first = 0;
  for (uint32_t h = 0; h < paths.n_hops(); ++h) {
    shape.hops.push_back({first, paths.widths().slots(h, slot_rows)});
    first += paths.max_edges(h) * shape.hops.back().width;
  }
  shape.n_slots = std::max(1u, first);
  shape.depth = moe_plan_depth(paths.n_hops() > 1);
  shape.expert_major = expert_major;
  return shape;
}

Program build_dispatch(const Paths& paths, const RankRows& rank, const MoePlanShape& shape) {
  return DispatchBuilder(paths, rank, shape).build();
}
Program build_combine(const Paths& paths, const RankRows& rank, const MoePlanShape& shape) {
  return CombineBuilder(paths, rank, shape).build();
}

uint64_t moe_plan_hash(moecclOp_t op, const Paths& paths, const plan::LevelTree& tree, const Placement& placement,
                       const MoePlanShape& shape) {
  uint64_t hash = tree.hash();
  const auto add = [&](uint64_t word) { hash = hash_combine(hash, word); };
  add(static_cast<uint64_t>(op)), add(static_cast<uint64_t>(paths.algorithm().kind)), add(paths.algorithm().dims);
  add(shape.n_slots), add(shape.depth), add(shape.expert_major), add(shape.batched);
  for (const MoePlanShape::Hop& hop : shape.hops) add(hop.width);
  for (const uint32_t owner : placement.owner) add(owner);
  if (paths.domains_hash() != 0) add(paths.domains_hash());
  return hash;
}

namespace {

// Returns the slots of a rotation.
uint64_t slots_of(const Paths& paths, uint64_t slot_rows) {
  uint64_t n = 0;
  for (uint32_t h = 0; h < paths.n_hops(); ++h) n += uint64_t{paths.max_edges(h)} * paths.widths().slots(h, slot_rows);
  return std::max<uint64_t>(n, 1);
}

// Returns whether a Ref can number the slots of a rotation.
bool have_numbers(const Paths& paths, uint64_t slot_rows) { return slots_of(paths, slot_rows) <= UINT16_MAX; }

// Returns the rows that a block needs for a token of each origin. Blocks of several slots have at least that.
uint64_t least_rows(const MoeShape& shape, const Paths& paths) {
  return paths.algorithm().dedup() ? 1 : uint64_t{paths.max_origins()} * shape.top_k;
}

// Returns the rows that fill whole cache lines, so that two ranks do not write to one line.
uint64_t rows_of_lines(const MoeShape& shape) { return 64 / std::gcd<uint64_t>(64, shape.widest_row()); }

uint64_t in_whole_lines(const MoeShape& shape, uint64_t rows) {
  const uint64_t line = rows_of_lines(shape);
  return rows > line ? (rows + line - 1) / line * line : rows;
}

// Returns the staging of a plan whose slots have this many rows.
uint64_t staging_with(const MoeShape& shape, const Paths& paths, uint64_t slot_rows) {
  return moe_staging_bytes(shape, moe_plan_shape(paths, false, slot_rows), slot_rows);
}

}  // namespace

uint64_t moe_slot_rows(const MoeShape& shape, const Paths& paths, uint64_t staging_bytes) {
  const uint64_t depth = moe_plan_depth(paths.n_hops() > 1), budget = staging_bytes / depth / shape.widest_row();
  const uint64_t copies = paths.algorithm().dedup() ? 1 : shape.top_k, line = rows_of_lines(shape);
  const uint64_t most = std::max<uint64_t>(1, paths.max_origins() * shape.max_tokens * copies);
  uint64_t rows = std::min(budget / slots_of(paths, UINT64_MAX), (most + line - 1) / line * line);
  if (rows >= line) rows -= rows % line;
  if (!paths.algorithm().dedup()) return rows >= least_rows(shape, paths) ? rows : 0;
  // More rows in a slot let more tokens cross at once. Blocks of many origins then have few slots to spare for them.
  while (rows > 0 && (!have_numbers(paths, rows) || slots_of(paths, rows) * rows > budget))
    rows -= rows > line ? line : 1;
  return rows;
}

uint64_t moe_least_staging(const MoeShape& shape, const Paths& paths) {
  uint64_t rows = least_rows(shape, paths);
  while (!have_numbers(paths, rows)) ++rows;
  return staging_with(shape, paths, in_whole_lines(shape, rows));
}

uint64_t moe_staging_for(const MoeShape& shape, const Paths& paths, uint64_t n_chunks) {
  const auto suffices = [&](uint64_t slot_rows) {
    for (uint32_t h = 0; h < paths.n_hops(); ++h) {
      const double block = paths.mean_rows(h, shape.top_k) * static_cast<double>(shape.max_tokens);
      if (block > static_cast<double>(n_chunks * paths.widths().rows(h, slot_rows))) return false;
    }
    return have_numbers(paths, slot_rows);
  };
  uint64_t rows = 1;
  while (!suffices(in_whole_lines(shape, rows))) rows *= 2;
  return std::max(staging_with(shape, paths, in_whole_lines(shape, rows)), moe_least_staging(shape, paths));
}

uint64_t moe_staging_bytes(const MoeShape& shape, const MoePlanShape& plan, uint64_t slot_rows) {
  return uint64_t{plan.n_slots} * plan.depth * slot_rows * shape.widest_row();
}

plan::Binding moe_binding(const MoeShape& shape, uint32_t n_chunks, uint64_t slot_rows) {
  plan::Binding binding;
  binding.chunking = {slot_rows, n_chunks};
  binding.element_bytes = static_cast<uint32_t>(shape.row_bytes);
  binding.slot_elements = slot_rows;
  return binding;
}

}  // namespace moeccl::algo
