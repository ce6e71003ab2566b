// SPDX-License-Identifier: Apache-2.0
// Buffers that peers can reach: one pass over the data, with no staging in between. Ranks meet before (all buffers are
// ready) and after (no rank touches them any more). Reductions need views. Moves need reads, and use views where
// pushing is faster.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kArrived = 0;  // the sender's buffers are ready
constexpr uint32_t kDone = 1;     // the sender no longer touches the receiver's buffers
constexpr uint32_t kRead = 2;     // the sender has read a chunk of the receiver's input

bool pushes(const Shape& shape) { return shape.reach.views; }

void meet(ProgramBuilder& b, When when, uint32_t sig) {
  b.when(when);
  b.signal_all(sig);
  b.wait_all(sig);
  b.when(When::kEvery);
}

// Returns this rank's part (or block) of all inputs, in rank order.
std::vector<Ref> all_inputs(const Shape& shape, uint32_t block, uint32_t index, uint32_t parts) {
  std::vector<Ref> srcs;
  for (uint32_t p = 0; p < shape.n_ranks; ++p) srcs.push_back(part(in(p, block), index, parts));
  return srcs;
}

// Works in place: only this rank reads part `rank` of any input, and only it writes part `rank` of any output. The host
// executor joins the reduction and its moves: each element is read once and written once to each output.
void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t n = shape.n_ranks;
  meet(b, When::kFirst, kArrived);
  const Ref result = part(out(rank), rank, n);
  b.reduce(result, all_inputs(shape, 0, rank, n), true, true);
  for (uint32_t i = 1; i < n; ++i) b.put(part(out(b.after(i)), rank, n), result);
  meet(b, When::kLast, kDone);
}

void reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t n = shape.n_ranks, root = shape.root;
  meet(b, When::kFirst, kArrived);
  const Ref own = part(rank == root ? out(rank) : slot(rank, 0), rank, n);
  b.reduce(own, all_inputs(shape, 0, rank, n), true);
  if (rank != root) b.put(part(out(root), rank, n), own);
  meet(b, When::kLast, kDone);
}

// Works in place: the output is the block of this rank's input that no peer reads.
void reduce_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  meet(b, When::kFirst, kArrived);
  b.reduce(out(rank), all_inputs(shape, rank, 0, 1), true);
  meet(b, When::kLast, kDone);
}

// Pushing reads a chunk from memory once and writes it n times. Where buffers can only be read, peers pull.
void all_gather(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (pushes(shape)) {
    meet(b, When::kFirst, kArrived);
    b.copy(out(rank, rank), in(rank));
    for (uint32_t i = 1; i < shape.n_ranks; ++i) b.put(out(b.after(i), rank), in(rank));
  } else {
    b.copy(out(rank, rank), in(rank));  // before peers come to read: in place it is the same memory
    meet(b, When::kEvery, kArrived);
    for (uint32_t i = 1; i < shape.n_ranks; ++i) b.copy(out(rank, b.after(i)), in(b.after(i)));
  }
  meet(b, When::kLast, kDone);
}

// A rank tells each peer that it has read the peer's block. Out of place, no rank needs to wait for that before the
// end, so those waits have a separate lane. A rank that works in place must wait: it sets the blocks aside until its
// peers have read the memory that they go to. in_place is private, so both programs exchange the same signals.
void all_to_all(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t n = shape.n_ranks;
  meet(b, When::kFirst, kArrived);
  if (!shape.in_place) b.copy(out(rank, rank), in(rank, rank));
  for (uint32_t i = 1; i < n; ++i) {
    const uint32_t p = b.after(i);
    b.copy(shape.in_place ? slot(rank, p) : out(rank, p), in(p, rank));
    b.signal(p, kRead);
  }
  if (!shape.in_place) b.lane(LaneKind::kCopy);
  for (uint32_t i = 1; i < n; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kRead);
    if (shape.in_place) b.copy(out(rank, p), slot(rank, p));
  }
}

void all_to_all_v(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  meet(b, When::kFirst, kArrived);
  b.copy(out(rank, rank), in(rank, rank));
  for (uint32_t i = 1; i < shape.n_ranks; ++i) b.copy(out(rank, b.after(i)), in(b.after(i), rank));
  meet(b, When::kLast, kDone);
}

// Peers pull from the root's input: all of it, or their block of it.
void from_root(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Ref src = in(shape.root, shape.op == moecclOpScatter ? rank : 0);
  if (rank == shape.root) {
    b.copy(out(rank), src);  // before peers come to read: in place it is the same memory
    b.signal_all(kArrived);
    b.wait_all(kDone);
  } else {
    b.wait(shape.root, kArrived);
    b.copy(out(rank), src);
    b.signal(shape.root, kDone);
  }
}

// With views, all ranks push their blocks at once; otherwise the root pulls.
void gather(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t root = shape.root;
  if (rank == root) {
    if (pushes(shape)) b.signal_all(kArrived);
    b.copy(out(rank, rank), in(rank));
    for (uint32_t i = 1; i < shape.n_ranks; ++i) {
      const uint32_t p = b.after(i);
      if (pushes(shape)) {
        b.wait(p, kDone);
      } else {
        b.wait(p, kArrived);
        b.copy(out(rank, p), in(p));
        b.signal(p, kDone);
      }
    }
  } else if (pushes(shape)) {
    b.wait(root, kArrived);
    b.put(out(root, rank), in(rank));
    b.signal(root, kDone);
  } else {
    b.signal(root, kArrived);
    b.wait(root, kDone);
  }
}

// A pushed chunk is read once and stays in the cache for n writes.
uint64_t gathered(const Shape& shape, const LevelTree&) { return pushes(shape) ? tuning::kDirectAllGather : kWhole; }

constexpr const char* kSum = "each rank reduces its part from all inputs and writes it to all outputs";
constexpr const char* kMove = "copy once, between the users' buffers";
constexpr uint32_t kSums = kViews | kUnscaled;
constexpr auto kNone = slots<0, 1>;
constexpr auto kOne = slots<1, 1>;
constexpr auto kEach = rank_slots<0, 1>;
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "direct", kSum, kSums, kNone, tuning::kDirectAllReduce, all_reduce},
    {moecclOpReduce, "direct", kSum, kSums, kOne, tuning::kDirectReduce, reduce},
    {moecclOpBroadcast, "direct", kMove, kReads, kNone, kWhole, from_root},
    {moecclOpAllGather, "direct", kMove, kReads, kNone, kWhole, all_gather, gathered},
    {moecclOpReduceScatter, "direct", kSum, kSums, kNone, kWhole, reduce_scatter},
    {moecclOpAllToAll, "direct", kMove, kReads, kEach, tuning::kDirectAllToAll, all_to_all},
    {moecclOpAllToAllv, "direct", kMove, kReads, kNone, kWhole, all_to_all_v},
    {moecclOpGather, "direct", kMove, kReads, kNone, kWhole, gather},
    {moecclOpScatter, "direct", kMove, kReads, kNone, kWhole, from_root},
};

}  // namespace

std::span<const Algorithm> direct_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
