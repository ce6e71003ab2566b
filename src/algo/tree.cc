// SPDX-License-Identifier: Apache-2.0
// Binomial trees: log2(n) steps of the whole message, by puts into the parent's or the children's staging.
#include "src/algo/builder.h"
#include "src/algo/families.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kUp = 0;      // a child's sum is in the parent's slot
constexpr uint32_t kDown = 1;    // the result is in the child's slot
constexpr uint32_t kCredit = 2;  // slots of a chunk are free again

// Ranks are counted from the root. The children of v are v + 1, v + 2, v + 4, ... below v's lowest set bit.
struct Place {
  uint32_t parent = 0;
  uint32_t index = 0;              // among the parent's children
  std::vector<uint32_t> children;  // by distance, ascending: the last has the largest subtree
};

Place place_of(uint32_t n, uint32_t root, uint32_t rank) {
  Place place;
  const uint32_t v = (rank + n - root) % n;
  for (uint32_t bit = 1; bit < n; bit <<= 1) {
    if (v & bit) {
      place.parent = (v - bit + root) % n;
      break;
    }
    if (v + bit < n) place.children.push_back((v + bit + root) % n);
    ++place.index;
  }
  return place;
}

uint32_t log2_ceil(uint32_t n) {
  uint32_t log = 0;
  while ((uint64_t{1} << log) < n) ++log;
  return log;
}

uint64_t chunk_bytes(const Shape& shape, const LevelTree&) {
  return crosses_long_line(shape, tuning::kTree) ? far_chunk(shape, 1, tuning::kTree) : tuning::kTree;
}

// Sums arrive in slot k from child k. AllReduce has one more slot, the last, for results.
Layout sums(const Shape& shape, const LevelTree&) {
  return {log2_ceil(shape.n_ranks), rotations(shape, tuning::kTree, tuning::kOneWay)};
}
Layout sums_and_result(const Shape& shape, const LevelTree&) {
  return {log2_ceil(shape.n_ranks) + 1, rotations(shape, tuning::kTree, tuning::kOverlap)};
}
Layout one_slot(const Shape& shape, const LevelTree&) { return {1, rotations(shape, tuning::kTree, tuning::kOneWay)}; }

// Sums this rank's input with its children's slots.
void sum_up(ProgramBuilder& b, const Place& place, uint32_t rank, Ref sum, bool final) {
  std::vector<Ref> srcs = {in(rank)};
  for (uint32_t k = 0; k < place.children.size(); ++k) {
    b.wait(place.children[k], kUp);
    srcs.push_back(slot(rank, k));
  }
  if (!place.children.empty()) b.reduce(sum, srcs, final);
}

void put_up(ProgramBuilder& b, const Place& place, uint32_t rank) {
  b.put(slot(place.parent, place.index), place.children.empty() ? in(rank) : slot(rank, 0));
  b.signal(place.parent, kUp);
}

// Passes `src` on, to the largest subtree first.
void pass_down(ProgramBuilder& b, const Place& place, Ref src, uint32_t to_slot) {
  for (size_t k = place.children.size(); k-- > 0;) {
    b.put(slot(place.children[k], to_slot), src);
    b.signal(place.children[k], kDown);
  }
}

void broadcast(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Place place = place_of(shape.n_ranks, shape.root, rank);
  const bool root = rank == shape.root;
  const Ref src = root ? in(rank) : slot(rank, 0);
  if (!root) b.wait(place.parent, kDown);
  for (const uint32_t child : place.children) b.wait(child, kCredit, b.depth());
  pass_down(b, place, src, 0);
  b.copy(out(rank), src);
  if (!root) b.signal(place.parent, kCredit);
}

void reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Place place = place_of(shape.n_ranks, shape.root, rank);
  const bool root = rank == shape.root;
  sum_up(b, place, rank, root ? out(rank) : slot(rank, 0), root);
  if (!root) {
    b.wait(place.parent, kCredit, b.depth());
    put_up(b, place, rank);
  }
  for (const uint32_t child : place.children) b.signal(child, kCredit);
}

// Two lanes, so that a chunk goes up while the one before comes down. A rank that has the result of chunk c - depth
// knows that its sums of that chunk were read; the rank that sends it chunk c's result knows from its sum of chunk c
// that the slot is free.
void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const Place place = place_of(shape.n_ranks, 0, rank);
  const bool root = rank == 0;
  const uint32_t result_slot = log2_ceil(shape.n_ranks);
  const Ref result = slot(rank, result_slot);
  b.wait(rank, kCredit, b.depth());
  sum_up(b, place, rank, root ? result : slot(rank, 0), root);
  if (root) {
    b.signal(rank, kDown);
  } else {
    put_up(b, place, rank);
  }
  b.lane(LaneKind::kIntra);
  b.wait(root ? rank : place.parent, kDown);
  pass_down(b, place, result, result_slot);
  b.copy(out(rank), result);
  b.signal(rank, kCredit);
}

constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "tree", "sum up a binomial tree, then down", kAnyOrder, sums_and_result, tuning::kTree,
     all_reduce, chunk_bytes},
    {moecclOpReduce, "tree", "sum up a binomial tree", kAnyOrder, sums, tuning::kTree, reduce, chunk_bytes},
    {moecclOpBroadcast, "tree", "down a binomial tree", kNothing, one_slot, tuning::kTree, broadcast, chunk_bytes},
};

}  // namespace

std::span<const Algorithm> tree_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
