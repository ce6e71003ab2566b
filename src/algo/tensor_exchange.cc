// SPDX-License-Identifier: Apache-2.0
// AllToAll between the nodes of a cluster of data that all ranks of a node hold alike (tensor parallelism), in MoNTA's
// variants. Block d of the Input goes to every rank of node d. There are t ranks in a node, e nodes, and I = e blocks.
//
// baseline: every rank sends whole blocks, so t copies of each cross. Each rank has its own.
// o1: drop + AllToAll + AllGather. A rank sends and receives 1/t of each block; then the node puts them together.
// o2: works in chunks: the AllGather of one runs under the AllToAll of the next; the copy into the final order follows
//     each AllGather in its lane (Algorithm 1).
// o3: that copy has a separate lane and runs under the AllGather of the next chunk (Algorithm 2).
// lean: o3, but a node's own block, which all its ranks hold anyway, is copied instead of dropped and gathered.
//
// A node may have any number of ranks: part k of what node d receives comes from rank k mod t of the sender's node, so
// that each byte crosses once. Results are copies of Inputs, so the bits are the same for all variants.
#include <algorithm>

#include "src/algo/families.h"
#include "src/algo/nodes.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

// Ranks of two nodes and ranks of one node are never the same pair, so they share numbers.
constexpr uint32_t kPart = 0;    // a part (baseline: a block) has come from another node; to itself: all have
constexpr uint32_t kGather = 1;  // the sender's parts are in this rank's slots
constexpr uint32_t kCredit = 2;  // the slots of a chunk may be written again
constexpr uint32_t kReady = 3;   // to itself: own parts are in the slots, and sent on

enum class Variant : uint8_t { kBaseline, kO1, kO2, kO3, kLean };

uint32_t wanted_chunks(const Shape& shape, Variant v) {
  const uint32_t given = v == Variant::kO2   ? shape.pipeline_chunks.o2
                         : v == Variant::kO3 ? shape.pipeline_chunks.o3
                                             : shape.pipeline_chunks.lean;
  return given > 0 ? given : tuning::kTensorChunks;
}

bool gathers_own(Variant v) { return v == Variant::kO1 || v == Variant::kO2 || v == Variant::kO3; }

Layout layout_of(const Shape& shape, const LevelTree& tree, Variant v) {
  const uint32_t e = tree.n_tensor_groups();
  if (e == 1) return {0, 1};
  const uint32_t slots = gathers_own(v) ? e : e - 1;
  if (v == Variant::kBaseline) return {slots, tuning::kOneWay};
  if (v == Variant::kO1) return {slots, 1};
  // A chunk passes three stages at once: AllToAll, AllGather, copy. One more rotation hides the credit's way back. o2
  // relies on two.
  return {slots, std::clamp(wanted_chunks(shape, v), tuning::kOverlap, tuning::kOneWay)};
}

uint64_t chunk_bytes(const Shape& shape, const LevelTree& tree, Variant v) {
  const uint64_t bytes = std::max<uint64_t>(1, shape.count * shape.element_bytes);
  if (tree.n_tensor_groups() == 1 || v == Variant::kBaseline) return tuning::kFlatBlocksFar;
  if (v == Variant::kO1) return bytes;
  const uint64_t n = wanted_chunks(shape, v), unit = std::max<uint64_t>(64, shape.element_bytes);
  return ((bytes + n - 1) / n + unit - 1) / unit * unit;
}

class Writer {
 public:
  Writer(ProgramBuilder& b, const LevelTree& tree, uint32_t rank, Variant v)
      : nodes_(tree.tensor_groups(), tree.n_tensor_groups()),
        v_(v),
        b_(b),
        rank_(rank),
        node_(nodes_.node_of(rank)),
        index_(nodes_.index_of(rank)),
        t_(nodes_.size(node_)),
        peers_(nodes_.local_peers(rank)) {
    for (uint32_t i = 1; i < nodes_.n_nodes(); ++i) {
      const uint32_t d = (node_ + i) % nodes_.n_nodes();
      for (uint32_t k = index_; k < nodes_.size(d); k += t_) receivers_.push_back({nodes_.members(d)[k], d, k});
      const uint32_t s = (node_ + nodes_.n_nodes() - i) % nodes_.n_nodes();
      senders_.push_back({nodes_.members(s)[index_ % nodes_.size(s)], s});
    }
  }

  void write() {
    if (nodes_.n_nodes() == 1) {
      b_.copy(out(rank_), in(rank_));
      return;
    }
    if (v_ == Variant::kBaseline) {
      exchange(LaneKind::kInter);
      b_.lane(LaneKind::kCopy);
      b_.copy(out(rank_, node_), in(rank_, node_));
      for (const Sender& s : senders_) {
        b_.wait(s.rank, kPart);
        b_.copy(out(rank_, s.node), slot_of(rank_, s.node));
        b_.signal(s.rank, kCredit);
      }
      return;
    }
    // Lanes are in order of urgency, the network first. In o1 one chunk is under way at a time, so its lanes take
    // turns.
    exchange(LaneKind::kInter);
    b_.lane(LaneKind::kIntra);
    gather();
    if (gathers_apart()) {
      b_.signal(rank_, kReady);
      b_.lane(LaneKind::kCopy);
      b_.wait(rank_, kReady);
    }
    deliver();
  }

 private:
  struct Receiver {
    uint32_t rank, node, part;
  };
  struct Sender {
    uint32_t rank, node;
  };
  bool gathers_apart() const { return v_ == Variant::kO3 || v_ == Variant::kLean; }

  // Returns where `rank` keeps the block of `node`. Its own block has a place only if it is gathered.
  Ref slot_of(uint32_t rank, uint32_t node) const {
    const bool skip = !gathers_own(v_) && node > nodes_.node_of(rank);
    return slot(rank, skip ? node - 1 : node);
  }

  // The drop and the AllToAll.
  void exchange(LaneKind kind) {
    b_.lane(kind);
    for (const Receiver& r : receivers_) {
      const uint32_t parts = v_ == Variant::kBaseline ? 1 : nodes_.size(r.node);
      const uint32_t k = v_ == Variant::kBaseline ? 0 : r.part;
      b_.wait(r.rank, kCredit, b_.depth());
      b_.put(part(slot_of(r.rank, node_), k, parts), part(in(rank_, r.node), k, parts));
      b_.signal(r.rank, kPart);
    }
    if (v_ == Variant::kBaseline) return;
    // A chunk's exchange ends before the next one begins. Ranks of a node share its uplink: if one sent all its chunks
    // ahead, the first chunk of another would queue behind them, and nothing could be gathered meanwhile.
    for (const Sender& s : senders_) b_.wait(s.rank, kPart);
    b_.signal(rank_, kPart);
  }

  // The AllGather puts own parts into the peers' slots. In o2 a peer's kGather of the chunk before says that it has
  // read what was there two chunks ago; the other variants need a credit for that.
  void gather() {
    b_.wait(rank_, kPart);
    for (const uint32_t p : peers_) {
      if (v_ != Variant::kO2) b_.wait(p, kCredit, b_.depth());
      if (gathers_own(v_)) b_.put(mine(slot_of(p, node_)), mine(in(rank_, node_)));
      for (const Sender& s : senders_) b_.put(mine(slot_of(p, s.node)), mine(slot_of(rank_, s.node)));
      b_.signal(p, kGather);
    }
  }

  // The copy into the final order.
  void deliver() {
    if (!gathers_own(v_)) b_.copy(out(rank_, node_), in(rank_, node_));
    for (const uint32_t p : peers_) b_.wait(p, kGather);
    for (const Sender& s : senders_) b_.copy(out(rank_, s.node), slot_of(rank_, s.node));
    if (gathers_own(v_)) {
      b_.copy(mine(out(rank_, node_)), mine(in(rank_, node_)));
      for (const uint32_t p : peers_) {
        const uint32_t k = nodes_.index_of(p);
        b_.copy(part(out(rank_, node_), k, t_), part(slot_of(rank_, node_), k, t_));
      }
    }
    for (const Sender& s : senders_) b_.signal(s.rank, kCredit);
    if (v_ == Variant::kO2) return;
    for (const uint32_t p : peers_) b_.signal(p, kCredit);
  }

  Ref mine(Ref ref) const { return part(ref, index_, t_); }

  Nodes nodes_;
  Variant v_;
  ProgramBuilder& b_;
  uint32_t rank_, node_, index_, t_;
  std::vector<uint32_t> peers_;
  std::vector<Receiver> receivers_;  // of this rank's blocks or parts, from the next node on
  std::vector<Sender> senders_;      // one in each other node
};

template <Variant V>
Layout layout(const Shape& shape, const LevelTree& tree) {
  return layout_of(shape, tree, V);
}
template <Variant V>
uint64_t chunks(const Shape& shape, const LevelTree& tree) {
  return chunk_bytes(shape, tree, V);
}
template <Variant V>
void write(ProgramBuilder& b, const Shape&, const LevelTree& tree, uint32_t rank) {
  Writer(b, tree, rank, V).write();
}
template <Variant V>
constexpr Algorithm entry(const char* name, const char* summary) {
  return {moecclOpTensorAllToAll, name, summary, kNothing, layout<V>, tuning::kFlatBlocksFar, write<V>, chunks<V>};
}

constexpr Algorithm kAlgorithms[] = {
    entry<Variant::kO1>("o1", "each rank exchanges 1/t of the blocks, then the node gathers them"),
    entry<Variant::kO2>("o2", "in chunks: one is gathered while the next is exchanged"),
    entry<Variant::kO3>("o3", "in chunks: one is copied out while the next is gathered and the next exchanged"),
    entry<Variant::kLean>("lean", "o3, but a node's own block is not gathered"),
    entry<Variant::kBaseline>("baseline", "each rank exchanges whole blocks: t copies of each cross"),
};

}  // namespace

std::span<const Algorithm> tensor_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
