// SPDX-License-Identifier: Apache-2.0
// Shared by all plan builders: a writer of programs, the cut into chunks, and reasons not to apply.
#pragma once

#include <cassert>
#include <span>
#include <utility>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/base/status.h"

namespace moeccl::algo {

using plan::Buffer;
using plan::Chunking;
using plan::LaneKind;
using plan::LevelTree;
using plan::Program;
using plan::Ref;
using plan::Shape;
using plan::Step;
using plan::StepKind;
using plan::When;

// Layouts of a fixed number of slots, or of one slot per rank plus kMore.
template <uint32_t kSlots, uint32_t kDepth>
Layout slots(const Shape&, const LevelTree&) {
  return {kSlots, kDepth};
}
template <int kMore, uint32_t kDepth>
Layout rank_slots(const Shape& shape, const LevelTree&) {
  return {shape.n_ranks + kMore, kDepth};
}

inline Ref in(uint32_t rank, uint32_t block = 0) { return {rank, Buffer::kInput, static_cast<uint16_t>(block), 0, 1}; }
inline Ref out(uint32_t rank, uint32_t block = 0) {
  return {rank, Buffer::kOutput, static_cast<uint16_t>(block), 0, 1};
}
inline Ref slot(uint32_t rank, uint32_t index) { return {rank, Buffer::kStaging, static_cast<uint16_t>(index), 0, 1}; }
// Returns part `index` of `parts` of a whole extent.
inline Ref part(Ref ref, uint32_t index, uint32_t parts) {
  ref.part = static_cast<uint16_t>(index);
  ref.parts = static_cast<uint16_t>(parts);
  return ref;
}

// Appends steps to one rank's program. lane() begins a lane and when() sets the mode of the steps that follow.
class ProgramBuilder {
 public:
  ProgramBuilder(const Shape& shape, uint32_t rank, Layout layout) : ProgramBuilder(rank, layout, shape.n_ranks) {}
  // n_ranks: for steps that go to all of them.
  ProgramBuilder(uint32_t rank, Layout layout, uint32_t n_ranks = 1) : n_(n_ranks), me_(rank) {
    program_.rank = rank;
    program_.n_slots = layout.n_slots;
    program_.depth = layout.depth;
    program_.n_part_slots = layout.n_part_slots;
    program_.slot_parts = layout.slot_parts;
    lane(LaneKind::kMain);
  }

  void lane(LaneKind kind) {
    if (!program_.lanes.empty() && program_.lanes.back().steps.empty()) program_.lanes.pop_back();
    program_.lanes.push_back({kind, {}});
  }
  void when(When when) { when_ = when; }
  // From slot `first` on, blocks take `width` slots each.
  void wide_slots(uint32_t first, uint32_t width) { program_.slot_runs.push_back({first, width}); }

  void put(Ref dst, Ref src) { move(StepKind::kPut, dst, src); }
  void copy(Ref dst, Ref src) { move(StepKind::kCopy, dst, src); }
  // Keeps the data that this rank copies to its own staging from here on in its cache (Step::read_again).
  void cache_staging() { caches_staging_ = true; }
  // Adds a row step with its list in the Binding. `final`: as in reduce().
  void rows(StepKind kind, Ref dst, std::span<const Ref> srcs, uint32_t list, bool final = false) {
    Step& step = add(kind, srcs);
    step.dst = dst;
    step.rows = list;
    step.final_reduce = final;
  }
  void rows(StepKind kind, Ref dst, Ref src, uint32_t list) { rows(kind, dst, {&src, 1}, list); }
  // Reduces srcs, in this order, into dst. `final`: the result is what the user gets.
  void reduce(Ref dst, std::span<const Ref> srcs, bool final, bool read_again = false) {
    Step& step = add(StepKind::kReduce, srcs);
    step.dst = dst;
    step.final_reduce = final;
    step.read_again = read_again;
  }

  // Sets the divisor of the step before, which is a final reduction.
  void divide(uint32_t divisor) { program_.lanes.back().steps.back().divisor = divisor; }

  void signal(uint32_t peer, uint32_t sig) { synchronise(StepKind::kSignal, peer, sig, 0); }
  void wait(uint32_t peer, uint32_t sig, uint32_t lag = 0) { synchronise(StepKind::kWait, peer, sig, lag); }
  void signal_all(uint32_t sig) {
    for (uint32_t i = 1; i < n_; ++i) signal(after(i), sig);
  }
  void wait_all(uint32_t sig, uint32_t lag = 0) {
    for (uint32_t i = 1; i < n_; ++i) wait(before(i), sig, lag);
  }

  // The rank `distance` places after or before this one. With these, ranks do not all turn to the same peer at once.
  uint32_t after(uint32_t distance) const { return (me_ + distance) % n_; }
  uint32_t before(uint32_t distance) const { return (me_ + n_ - distance % n_) % n_; }
  // Returns the number of rotations of the staging.
  uint32_t depth() const { return program_.depth; }

  Program finish() && {
    if (program_.lanes.size() > 1 && program_.lanes.back().steps.empty()) program_.lanes.pop_back();
    program_.finalize();
    return std::move(program_);
  }

 private:
  Step& add(StepKind kind, std::span<const Ref> srcs) {
    Step step;
    step.kind = kind;
    step.when = when_;
    step.first_src = static_cast<uint32_t>(program_.srcs.size());
    step.n_srcs = static_cast<uint32_t>(srcs.size());
    program_.srcs.insert(program_.srcs.end(), srcs.begin(), srcs.end());
    program_.lanes.back().steps.push_back(step);
    return program_.lanes.back().steps.back();
  }
  void move(StepKind kind, Ref dst, Ref src) {
    Step& step = add(kind, {&src, 1});
    step.dst = dst;
    step.read_again = caches_staging_ && dst.buffer == Buffer::kStaging;
  }
  void synchronise(StepKind kind, uint32_t peer, uint32_t sig, uint32_t lag) {
    assert(sig < plan::kMaxSigs);
    Step& step = add(kind, {});
    step.peer = peer;
    step.sig = static_cast<uint8_t>(sig);
    step.lag = static_cast<uint16_t>(lag);
  }

  uint32_t n_, me_;
  When when_ = When::kEvery;
  bool caches_staging_ = false;
  Program program_;
};

// Returns whether a message is worth the rotations of a long line: its data crosses one, and it is longer than a chunk
// of `chunk_bytes`, which suffices elsewhere.
bool crosses_long_line(const Shape& shape, uint64_t chunk_bytes);
// Returns the rotations for a message: kFar if it crosses one, else `usual`.
uint32_t rotations(const Shape& shape, uint64_t chunk_bytes, uint32_t usual);
// Returns the chunk with which kFar rotations keep the long line busy when at least `streams` of them enter a group at
// the same time, each with a chunk; at least `least`.
uint64_t far_chunk(const Shape& shape, double streams, uint64_t least);
// How many ranks send to others across the long line into one group of its level, in the group with the fewest.
struct Streams {
  uint64_t pairs = 0;    // where every rank outside sends to every rank inside
  uint64_t outside = 0;  // where every rank outside sends to one rank inside
  uint64_t inside = 0;   // where every rank inside receives from one rank outside
};
Streams streams_across(const Shape& shape, const LevelTree& tree);

// Cuts blocks of shape.count into even chunks of at most `chunk_bytes` that fit the staging.
Chunking cut(const Shape& shape, Layout layout, uint64_t chunk_bytes);
// Fails if cut() gives more chunks than can be counted.
Status chunks_cover(const Shape& shape, const Chunking& chunking);
// Returns one chunk for the whole block, whatever its length.
Chunking whole(const Shape& shape);
// Fail unless the smallest chunk, or the whole block, fits the staging.
Status chunks_fit(const Shape& shape, Layout layout);
Status whole_fits(const Shape& shape, Layout layout);

// Reasons not to apply to several ranks; see Needs.
Status needs_staging_views(const Shape& shape);
Status needs_views(const Shape& shape);
Status needs_reads(const Shape& shape);
Status needs_no_scaling(const Shape& shape);
Status needs_any_order(const Shape& shape, const char* name);
Status needs_nodes(const Shape& shape, const LevelTree& tree);

}  // namespace moeccl::algo
