// SPDX-License-Identifier: Apache-2.0
#include "src/algo/tensor_blocks.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/base/hash.h"

namespace moeccl::algo {

namespace {

// kHere and kReady go to the rank itself: all parts have come, and all have been passed on.
enum Sig : uint32_t { kPart, kCredit, kPassed, kReturned, kHere, kReady };

}  // namespace

Result<TensorBlocks> TensorBlocks::make(const LevelTree& tree, const Settings& settings) {
  TensorBlocks t(tree, settings);
  const uint32_t e = t.nodes_.n_nodes();
  uint64_t longest = 0;
  for (uint32_t from = 0; from < e; ++from)
    for (uint32_t to = 0; to < e; ++to)
      if (from != to)
        longest =
            std::max(longest, plan::part_range(t.count(from, to), settings.element_bytes, 0, t.nodes_.size(to)).length);
  t.shape_ = {.op = moecclOpTensorAllToAllv,
              .n_ranks = tree.n_ranks,
              .count = longest,
              .element_bytes = settings.element_bytes,
              .reach = settings.reach,
              .staging_bytes = settings.staging_bytes};
  t.layout_ = {(e - 1) * t.nodes_.largest(), tuning::kOverlap};
  MOECCL_TRY(chunks_fit(t.shape_, t.layout_));
  const uint64_t bytes = longest * settings.element_bytes;
  t.chunking_ =
      cut(t.shape_, t.layout_, std::clamp(bytes / tuning::kTensorChunks, tuning::kFlatBlocks, tuning::kFlatBlocksFar));
  return t;
}

uint64_t TensorBlocks::block(uint32_t node, uint32_t other, bool sent) const {
  uint64_t first = 0;
  for (uint32_t i = 0; i < other; ++i) first += sent ? count(node, i) : count(i, node);
  return first;
}

class TensorBlocks::Writer {
 public:
  Writer(const TensorBlocks& t, uint32_t rank)
      : t_(t),
        me_(rank),
        node_(t.nodes_.node_of(rank)),
        index_(t.nodes_.index_of(rank)),
        b_(t.shape_, rank, t.layout_) {
    const Nodes& nodes = t.nodes_;
    for (uint32_t i = 1; i < nodes.n_nodes(); ++i) others_.push_back((node_ + i) % nodes.n_nodes());
    for (const uint32_t s : others_) senders_.push_back(nodes.members(s)[index_ % nodes.size(s)]);
  }

  BoundRows write() && {
    copy_own();
    if (!others_.empty()) {
      exchange();
      pass();
      deliver();
    }
    BoundRows bound;
    bound.program = std::move(b_).finish();
    bound.rows = std::move(rows_);
    bound.binding.chunking = t_.chunking_;
    bound.binding.element_bytes = t_.s_.element_bytes;
    bound.binding.slot_elements = plan::whole_lines(t_.chunking_.chunk, t_.s_.element_bytes);
    bound.binding.rows = bound.rows;
    return bound;
  }

 private:
  // Returns part `k` of the block from node `from` to node `to`.
  plan::Range part_of(uint32_t from, uint32_t to, uint32_t k) const {
    return plan::part_range(t_.count(from, to), t_.s_.element_bytes, k, t_.nodes_.size(to));
  }
  // Return where rank `index` of a node keeps its part of what node `from` sends, and the part that its mate has passed
  // on.
  static uint32_t number(uint32_t node, uint32_t from) { return from < node ? from : from - 1; }
  uint32_t passed_number(uint32_t index, uint32_t mate, uint32_t from) const {
    const uint32_t e = t_.nodes_.n_nodes();
    return (e - 1) * (1 + (mate < index ? mate : mate - 1)) + number(node_, from);
  }

  template <class Block>
  void step(StepKind kind, Ref dst, Ref src, uint64_t length, const Block& block) {
    b_.rows(kind, dst, src, add_rows(rows_, t_.chunking_, length, block));
  }

  void copy_own() {
    b_.lane(LaneKind::kCopy);
    b_.when(When::kFirst);
    rows_.resize(t_.chunking_.n_chunks);
    rows_[0] = {.src_first = t_.block(node_, node_, true),
                .dst_first = t_.block(node_, node_, false),
                .count = t_.count(node_, node_)};
    b_.rows(StepKind::kScatterRows, out(me_), in(me_), 0);
    b_.when(When::kEvery);
  }

  // A chunk's exchange ends before the next one begins; see tensor_exchange.cc.
  void exchange() {
    const Nodes& nodes = t_.nodes_;
    b_.lane(LaneKind::kInter);
    for (const uint32_t d : others_)
      for (uint32_t k = index_; k < nodes.size(d); k += nodes.size(node_)) {
        const uint32_t to = nodes.members(d)[k];
        const plan::Range part = part_of(node_, d, k);
        const uint64_t first = t_.block(node_, d, true) + part.offset;
        b_.wait(to, kCredit, b_.depth());
        step(StepKind::kGatherRows, slot(to, number(d, node_)), in(me_), part.length,
             [&](uint64_t begin) { return plan::RowBlock{.src_first = first + begin}; });
        b_.signal(to, kPart);
      }
    for (const uint32_t s : senders_) b_.wait(s, kPart);
    b_.signal(me_, kHere);
  }

  void pass() {
    b_.lane(LaneKind::kIntra);
    b_.wait(me_, kHere);
    for (const uint32_t p : t_.nodes_.local_peers(me_)) {
      b_.wait(p, kReturned, b_.depth());
      for (const uint32_t s : others_)
        step(StepKind::kGatherRows, slot(p, passed_number(t_.nodes_.index_of(p), index_, s)),
             slot(me_, number(node_, s)), part_of(s, node_, index_).length, [](uint64_t) { return plan::RowBlock{}; });
      b_.signal(p, kPassed);
    }
    b_.signal(me_, kReady);
  }

  void deliver() {
    b_.lane(LaneKind::kCopy);
    b_.wait(me_, kReady);
    for (const uint32_t s : others_) place(s, index_, number(node_, s));
    for (const uint32_t s : senders_) b_.signal(s, kCredit);
    for (const uint32_t p : t_.nodes_.local_peers(me_)) {
      const uint32_t mate = t_.nodes_.index_of(p);
      b_.wait(p, kPassed);
      for (const uint32_t s : others_) place(s, mate, passed_number(index_, mate, s));
      b_.signal(p, kReturned);
    }
  }
  // Copies part `k` of what node `from` sends from this rank's staging to its place.
  void place(uint32_t from, uint32_t k, uint32_t number) {
    const plan::Range part = part_of(from, node_, k);
    const uint64_t first = t_.block(node_, from, false) + part.offset;
    step(StepKind::kScatterRows, out(me_), slot(me_, number), part.length,
         [&](uint64_t begin) { return plan::RowBlock{.dst_first = first + begin}; });
  }

  const TensorBlocks& t_;
  uint32_t me_, node_, index_;
  ProgramBuilder b_;
  std::vector<uint32_t> others_;   // nodes, from the next one on
  std::vector<uint32_t> senders_;  // one in each other node
  std::vector<plan::RowBlock> rows_;
};

BoundRows TensorBlocks::build(uint32_t rank) const { return Writer(*this, rank).write(); }

// Every rank of a node gets all blocks; part k of a block comes from the rank that sends to rank k of the node.
plan::RowExpectation TensorBlocks::expected() const {
  plan::RowExpectation all;
  for (uint32_t r = 0; r < shape_.n_ranks; ++r) {
    all.input_rows.push_back(input_elements(r));
    std::vector<plan::ExpectedRow>& rows = all.output.emplace_back();
    const uint32_t mine = nodes_.node_of(r);
    for (uint32_t from = 0; from < nodes_.n_nodes(); ++from) {
      const uint64_t first = block(from, mine, true);
      const uint32_t parts = from == mine ? 1 : nodes_.size(mine);
      for (uint32_t k = 0; k < parts; ++k) {
        const plan::Range part = plan::part_range(count(from, mine), s_.element_bytes, k, parts);
        const uint32_t sender = from == mine ? r : nodes_.members(from)[k % nodes_.size(from)];
        for (uint64_t i = 0; i < part.length; ++i)
          rows.push_back({{{sender, static_cast<uint32_t>(first + part.offset + i), 1}}, false});
      }
    }
  }
  return all;
}

Status prove_tensor_blocks(const LevelTree& tree, std::span<const uint64_t> counts, const plan::Reach& reach) {
  constexpr uint64_t kChunk = 3, kMostOfPart = 2 * kChunk + 1;
  constexpr uint32_t kLine = 64;
  const Nodes nodes(tree.tensor_groups(), tree.n_tensor_groups());
  std::vector<uint64_t> few(counts.begin(), counts.end());
  for (uint64_t& n : few) n = std::min(n, kMostOfPart * nodes.largest());
  const uint64_t slots = uint64_t{nodes.n_nodes()} * nodes.largest() * tuning::kOverlap;
  MOECCL_ASSIGN_OR_RETURN(const TensorBlocks small,
                          TensorBlocks::make(tree, {few, kLine, reach, slots * kChunk * kLine}));
  const WholeRows all = whole_rows(small);
  const plan::RowExpectation expected = small.expected();
  return plan::check({all.plan, all.bindings, &expected}).with_context("the plan is wrong, please report it");
}

uint64_t TensorBlocks::hash() const {
  uint64_t h = hash_combine(static_cast<uint64_t>(shape_.op), s_.element_bytes);
  for (const uint64_t n : s_.counts) h = hash_combine(h, n);
  for (uint32_t r = 0; r < shape_.n_ranks; ++r) h = hash_combine(h, nodes_.node_of(r));
  return hash_combine(hash_combine(h, chunking_.chunk), layout_.n_slots * uint64_t{16} + layout_.depth);
}

}  // namespace moeccl::algo
