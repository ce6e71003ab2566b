// SPDX-License-Identifier: Apache-2.0
// Two levels: data is summed or spread inside a node, and each byte crosses between nodes as seldom as possible. All
// data moves by puts. Nodes may be unequal. On a long line between nodes, several chunks must be under way: there are
// more rotations, and sending, passing on and receiving have separate lanes.
#include "src/algo/families.h"
#include "src/algo/nodes.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

// Pairs inside a node, pairs across nodes and a rank with itself never coincide, so they share numbers.
constexpr uint32_t kSum = 0;      // inputs or partial sums
constexpr uint32_t kResult = 1;   // results
constexpr uint32_t kPartial = 2;  // to itself: partial sums are formed
constexpr uint32_t kDone = 3;     // to itself: the chunk is finished
constexpr uint32_t kBlock = 0, kRelayed = 1;

// dst = the sum of srcs, not yet final.
void partial_sum(ProgramBuilder& b, Ref dst, const std::vector<Ref>& srcs) {
  if (srcs.size() == 1) {
    b.copy(dst, srcs.front());
  } else {
    b.reduce(dst, srcs, false);
  }
}

// AllReduce cuts a chunk into n_owners * n_nodes parts. Member i < n_owners of each node owns the parts of row i; the
// one in node g finishes part g of these. The owners of a row are its rail.
class AllReduceWriter {
 public:
  AllReduceWriter(ProgramBuilder& b, const LevelTree& tree, uint32_t rank)
      : nodes_(tree),
        b_(b),
        rank_(rank),
        node_(nodes_.node_of(rank)),
        row_(nodes_.index_of(rank)),
        n_owners_(nodes_.smallest()) {}

  // Works in place: all inputs of a part have been read when its result comes. kDone closes the circle of credits: a
  // rank's kSum for chunk c says that it has finished chunk c - depth. A rank tells itself too, because parts of a
  // short last chunk lie where other parts of the chunk before it in the slot were.
  void write() {
    if (row_ < n_owners_) {
      sum_rail();  // lanes are in order of urgency, the network first
      sum_node();
    }
    send_to_owners();
    take_results();
  }

 private:
  Ref part_of(Ref ref, uint32_t row, uint32_t node) const {
    return part(ref, row * nodes_.n_nodes() + node, n_owners_ * nodes_.n_nodes());
  }
  uint32_t rail(uint32_t distance) const { return (node_ + distance) % nodes_.n_nodes(); }
  uint32_t owner(uint32_t node) const { return nodes_.members(node)[row_]; }
  // The results have a whole slot. A part of an owner's row has a slot for the input of each member of the node and, at
  // the owner that finishes it, for the sum of each node.
  static constexpr uint32_t kResults = 0;
  Ref member_part(uint32_t at, uint32_t member, uint32_t row, uint32_t node) const {
    return part_of(slot(at, 1 + member * nodes_.n_nodes() + node), row, node);
  }
  Ref rail_part(uint32_t at, uint32_t from_node, uint32_t row, uint32_t node) const {
    return part_of(slot(at, 1 + nodes_.largest() * nodes_.n_nodes() + from_node), row, node);
  }

  void send_to_owners() {
    b_.lane(LaneKind::kIntra);
    b_.wait(rank_, kDone, b_.depth());
    for (const uint32_t p : nodes_.local_peers(rank_)) {
      const uint32_t row = nodes_.index_of(p);
      if (row >= n_owners_) continue;
      for (uint32_t g = 0; g < nodes_.n_nodes(); ++g) b_.put(member_part(p, row_, row, g), part_of(in(rank_), row, g));
      b_.signal(p, kSum);
    }
    if (row_ < n_owners_) b_.signal(rank_, kSum);
  }

  // Sums this rank's row over the node, into its own slots.
  void sum_node() {
    b_.lane(LaneKind::kMain);
    b_.wait(rank_, kSum);
    for (const uint32_t p : nodes_.local_peers(rank_)) b_.wait(p, kSum);
    for (uint32_t i = 1; i <= nodes_.n_nodes(); ++i) {
      const uint32_t g = rail(i);
      std::vector<Ref> srcs;
      for (const uint32_t p : nodes_.members(node_))
        srcs.push_back(p == rank_ ? part_of(in(rank_), row_, g) : member_part(rank_, nodes_.index_of(p), row_, g));
      const Ref sum = member_part(rank_, row_, row_, g);
      partial_sum(b_, sum, srcs);
      if (g == node_) continue;
      b_.put(rail_part(owner(g), node_, row_, g), sum);
      b_.signal(owner(g), kSum);
    }
    b_.signal(rank_, kPartial);
  }

  // Sums this rank's part of the row over the rail. Then results go along the rail and into the node, from this rank's
  // output: even in place, its inputs have all been read by then.
  void sum_rail() {
    b_.lane(LaneKind::kInter);
    b_.wait(rank_, kPartial);
    std::vector<Ref> srcs;
    for (uint32_t g = 0; g < nodes_.n_nodes(); ++g) {
      if (g != node_) b_.wait(owner(g), kSum);
      srcs.push_back(g == node_ ? member_part(rank_, row_, row_, g) : rail_part(rank_, g, row_, node_));
    }
    const Ref result = part_of(out(rank_), row_, node_);
    b_.reduce(result, srcs, true, true);
    for (uint32_t i = 1; i < nodes_.n_nodes(); ++i) {
      b_.put(part_of(slot(owner(rail(i)), kResults), row_, node_), result);
      b_.signal(owner(rail(i)), kResult);
    }
    spread(result, node_);
    for (uint32_t i = 1; i < nodes_.n_nodes(); ++i) {
      const uint32_t g = rail(nodes_.n_nodes() - i);
      const Ref taken = part_of(out(rank_), row_, g);
      b_.wait(owner(g), kResult);
      b_.copy(taken, part_of(slot(rank_, kResults), row_, g));
      spread(taken, g);
    }
    b_.signal(rank_, kResult);
  }

  void spread(Ref result, uint32_t g) {
    for (const uint32_t p : nodes_.local_peers(rank_)) {
      b_.put(part_of(slot(p, kResults), row_, g), result);
      b_.signal(p, kResult);
    }
  }

  void take_results() {
    b_.lane(LaneKind::kCopy);
    for (uint32_t i = 0; i < nodes_.n_nodes(); ++i) {
      for (const uint32_t p : nodes_.local_peers(rank_)) {
        const uint32_t row = nodes_.index_of(p);
        if (row >= n_owners_) continue;
        const uint32_t g = rail(nodes_.n_nodes() - i);  // in the order in which owners spread them
        b_.wait(p, kResult);
        b_.copy(part_of(out(rank_), row, g), part_of(slot(rank_, kResults), row, g));
      }
    }
    if (row_ < n_owners_) b_.wait(rank_, kResult);
    b_.signal(rank_, kDone);
  }

  Nodes nodes_;
  ProgramBuilder& b_;
  uint32_t rank_, node_, row_, n_owners_;
};

void all_reduce(ProgramBuilder& b, const Shape&, const LevelTree& tree, uint32_t rank) {
  AllReduceWriter(b, tree, rank).write();
}

bool far(const Shape& shape) { return crosses_long_line(shape, tuning::kHierBlocks); }
uint32_t depth_of(const Shape& shape) { return rotations(shape, tuning::kHierBlocks, tuning::kOverlap); }
uint64_t block_chunk(const Shape& shape, const LevelTree& tree) {
  if (!far(shape)) return tuning::kHierBlocks;
  return far_chunk(shape, static_cast<double>(streams_across(shape, tree).outside), tuning::kHierBlocks);
}

// Each block goes once to each other node, to the rank that stands for its owner there and passes it on.
class AllGatherWriter {
 public:
  AllGatherWriter(ProgramBuilder& b, const LevelTree& tree, uint32_t rank)
      : nodes_(tree), b_(b), rank_(rank), peers_(nodes_.local_peers(rank)) {}

  void write() {
    send();
    b_.copy(out(rank_, rank_), in(rank_));
    take_local();
    relay();
    take_relayed();
  }

  // As in flat.cc, a rank sends at most half the rotations ahead of what it has taken and passed on, so no credits are
  // needed.
  void write_in_lanes() {
    b_.lane(LaneKind::kInter);
    b_.wait(rank_, kDone, b_.depth() / 2);
    send();
    b_.lane(LaneKind::kMain);
    relay();
    b_.signal(rank_, kPartial);
    b_.lane(LaneKind::kCopy);
    b_.copy(out(rank_, rank_), in(rank_));
    take_local();
    take_relayed();
    b_.wait(rank_, kPartial);
    b_.signal(rank_, kDone);
  }

 private:
  void send() {
    const uint32_t node = nodes_.node_of(rank_), n_nodes = nodes_.n_nodes();
    for (uint32_t i = 1; i < n_nodes; ++i) {
      const uint32_t relay = nodes_.relay((node + i) % n_nodes, rank_);
      b_.put(slot(relay, rank_), in(rank_));
      b_.signal(relay, kBlock);
    }
    for (const uint32_t p : peers_) {
      b_.put(slot(p, rank_), in(rank_));
      b_.signal(p, kBlock);
    }
  }

  void take_local() {
    for (const uint32_t p : peers_) {
      b_.wait(p, kBlock);
      b_.copy(out(rank_, p), slot(rank_, p));
    }
  }

  void relay() {
    for (const uint32_t src : nodes_.relayed_by(rank_)) {
      b_.wait(src, kBlock);
      for (const uint32_t p : peers_) {
        b_.put(slot(p, src), slot(rank_, src));
        b_.signal(p, kRelayed);
      }
      b_.copy(out(rank_, src), slot(rank_, src));
    }
  }

  void take_relayed() {
    for (const uint32_t p : peers_) {
      for (const uint32_t src : nodes_.relayed_by(p)) {
        b_.wait(p, kRelayed);
        b_.copy(out(rank_, src), slot(rank_, src));
      }
    }
  }

  Nodes nodes_;
  ProgramBuilder& b_;
  uint32_t rank_;
  std::vector<uint32_t> peers_;
};

void all_gather(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank) {
  AllGatherWriter writer(b, tree, rank);
  if (far(shape)) {
    writer.write_in_lanes();
  } else {
    writer.write();
  }
}
Layout all_gather_slots(const Shape& shape, const LevelTree&) { return {shape.n_ranks, depth_of(shape)}; }

// Slots: first those of the relay, then the inputs of the node's members, then the sums of other nodes.
uint32_t member_slot(const Nodes& nodes, uint32_t rank) { return nodes.relay_slots() + nodes.index_of(rank); }
uint32_t node_slot(const Nodes& nodes, uint32_t node) { return nodes.relay_slots() + nodes.largest() + node; }

// Sends inputs to the local peer that owns their block, or that stands for its owner in another node.
void send_inputs(ProgramBuilder& b, const Nodes& nodes, uint32_t rank) {
  send_local(b, nodes, rank, member_slot(nodes, rank), kSum);
}

// Sends the node's sum of each block that this rank relays to the block's owner.
void send_sums(ProgramBuilder& b, const Nodes& nodes, uint32_t rank) {
  const uint32_t node = nodes.node_of(rank);
  const std::vector<uint32_t> relayed = nodes.relayed_by(rank);
  for (uint32_t k = 0; k < relayed.size(); ++k) {
    Ref sum = in(rank, relayed[k]);
    if (nodes.size(node) > 1) {
      std::vector<Ref> srcs;
      for (uint32_t i = 0; i < nodes.size(node); ++i)
        srcs.push_back(i == nodes.index_of(rank) ? sum : slot(rank, relay_slot(nodes, rank, k, i)));
      sum = slot(rank, relay_slot(nodes, rank, k, nodes.index_of(rank)));
      b.reduce(sum, srcs, false);
    }
    b.put(slot(relayed[k], node_slot(nodes, node)), sum);
    b.signal(relayed[k], kSum);
  }
}

void take_sums(ProgramBuilder& b, const Nodes& nodes, uint32_t rank) {
  const uint32_t node = nodes.node_of(rank), n_nodes = nodes.n_nodes();
  std::vector<Ref> srcs;
  for (const uint32_t p : nodes.members(node))
    srcs.push_back(p == rank ? in(rank, rank) : slot(rank, member_slot(nodes, p)));
  for (uint32_t i = 1; i < n_nodes; ++i) {
    const uint32_t other = (node + n_nodes - i) % n_nodes;
    b.wait(nodes.relay(other, rank), kSum);
    srcs.push_back(slot(rank, node_slot(nodes, other)));
  }
  b.reduce(out(rank), srcs, true);
}

// Each node sends one sum of each block, from the rank that stands for its owner.
void reduce_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank) {
  const Nodes nodes(tree);
  const auto wait_for_inputs = [&] {
    for (const uint32_t p : nodes.local_peers(rank)) b.wait(p, kSum);
  };
  if (!far(shape)) {
    send_inputs(b, nodes, rank);
    wait_for_inputs();
    send_sums(b, nodes, rank);
    return take_sums(b, nodes, rank);
  }
  // A rank sends at most half the rotations ahead of what it has finished, as in AllGather.
  b.lane(LaneKind::kIntra);
  b.wait(rank, kDone, b.depth() / 2);
  send_inputs(b, nodes, rank);
  b.signal(rank, kSum);
  b.lane(LaneKind::kInter);
  b.wait(rank, kSum);
  wait_for_inputs();
  send_sums(b, nodes, rank);
  b.signal(rank, kPartial);
  b.lane(LaneKind::kMain);
  b.wait(rank, kPartial);
  take_sums(b, nodes, rank);
  b.signal(rank, kDone);
}

Layout all_reduce_slots(const Shape& shape, const LevelTree& tree) {
  const Nodes nodes(tree);
  const uint32_t n_nodes = nodes.n_nodes();
  return {1, depth_of(shape), (nodes.largest() + 1) * n_nodes, nodes.smallest() * n_nodes};
}
// Each part takes steps of its own, so a chunk of many parts is longer.
uint64_t all_reduce_chunk(const Shape& shape, const LevelTree& tree) {
  const uint64_t least = std::max(tuning::kHierAllReduce, all_reduce_slots(shape, tree).slot_parts * tuning::kHierPart);
  // Each node gets the sums of all other nodes for its parts, and their results.
  const double nodes = Nodes(tree).n_nodes();
  return far(shape) ? far_chunk(shape, 2 * (nodes - 1) / nodes, least) : least;
}
Layout reduce_scatter_slots(const Shape& shape, const LevelTree& tree) {
  const Nodes nodes(tree);
  return {nodes.relay_slots() + nodes.largest() + nodes.n_nodes(), depth_of(shape)};
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "hier", "sum parts inside nodes, then along rails of nodes, and back", kNodes | kAnyOrder,
     all_reduce_slots, tuning::kHierAllReduce, all_reduce, all_reduce_chunk},
    {moecclOpAllGather, "hier", "each block crosses once to each node, which spreads it", kNodes, all_gather_slots,
     tuning::kHierBlocks, all_gather, block_chunk},
    {moecclOpReduceScatter, "hier", "each node sends one sum of each block", kNodes | kAnyOrder, reduce_scatter_slots,
     tuning::kHierBlocks, reduce_scatter, block_chunk},
};

}  // namespace

std::span<const Algorithm> hier_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
