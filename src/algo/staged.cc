// SPDX-License-Identifier: Apache-2.0
// Private buffers of ranks on one host: data passes through the staging chunk by chunk, so that the second copy finds
// it in the cache. Lanes let a rank work ahead instead of waiting: where ranks outnumber cores, a wait costs a context
// switch.
#include "src/algo/families.h"
#include "src/algo/pull.h"
#include "src/algo/tuning.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kReady = 0;    // inputs of a chunk are in slot 0
constexpr uint32_t kReduced = 1;  // the sender's part of the result is in its slot 1
constexpr uint32_t kDone = 2;     // to itself: results of a chunk have been read

// Copies the parts that others reduce into slot 0.
void stage_parts(ProgramBuilder& b, uint32_t n, uint32_t rank) {
  for (uint32_t i = 1; i < n; ++i) b.copy(part(slot(rank, 0), b.after(i), n), part(in(rank), b.after(i), n));
  b.signal_all(kReady);
}

// Copies the parts that others have reduced from their slots 1.
void collect_parts(ProgramBuilder& b, uint32_t n, uint32_t rank) {
  for (uint32_t i = 1; i < n; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kReduced);
    b.copy(part(out(rank), p, n), part(slot(p, 1), p, n));
  }
  b.signal(rank, kDone);
}

// Three lanes, beginning with the one that others wait for: reduce the own part, copy in, copy out. Copies in run ahead
// by the depth. A rank's kReady for chunk c follows its kDone of chunk c - depth, so a rank that has received it may
// also overwrite what the sender read of chunk c - depth.
void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t n = shape.n_ranks;
  const Ref result = part(slot(rank, 1), rank, n);
  b.wait_all(kReady);
  const Ref own = part(out(rank), rank, n);
  b.reduce(own, peers_slots(shape, rank, 0, part(in(rank), rank, n)), true, true);
  b.copy(result, own);
  b.signal_all(kReduced);
  b.lane(LaneKind::kCopy);
  b.wait(rank, kDone, b.depth());
  stage_parts(b, n, rank);
  b.lane(LaneKind::kIntra);
  collect_parts(b, n, rank);
}

// As all_reduce, but only the root hears of results, so copies in and reductions share a lane: a rank's kReady for
// chunk c + 1 then says that it has read chunk c. From the root it also says that chunk c + 1 - depth is copied out.
void reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  const uint32_t n = shape.n_ranks;
  const bool root = rank == shape.root;
  if (root) b.wait(rank, kDone, b.depth());
  stage_parts(b, n, rank);
  b.wait_all(kReady);
  b.reduce(part(root ? out(rank) : slot(rank, 1), rank, n), peers_slots(shape, rank, 0, part(in(rank), rank, n)), true);
  if (root) {
    b.lane(LaneKind::kIntra);
    collect_parts(b, n, rank);
  } else {
    b.signal(shape.root, kReduced);
  }
}

// The same with stores that stay in the writer's cache: faster where readers share it or are close, several times
// slower where the host has placed two cores far apart.
template <auto kSteps>
void cached(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank) {
  b.cache_staging();
  kSteps(b, shape, tree, rank);
}

constexpr const char* kSum = "stage inputs, each rank reduces one part, read all parts";
constexpr const char* kPull = "stage inputs chunk by chunk, read from peers' staging";
constexpr const char* kCached = "as staged, through the cache";
constexpr auto kParts = slots<2, tuning::kOverlap>;
constexpr auto kAll = slots<1, tuning::kOverlap>;
constexpr auto kOne = slots<1, tuning::kOneWay>;
constexpr auto kEach = rank_slots<0, tuning::kOverlap>;
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "staged", kSum, kStagingViews, kParts, tuning::kStagedAllReduce, all_reduce},
    {moecclOpReduce, "staged", kSum, kStagingViews, kParts, tuning::kStagedReduce, reduce},
    {moecclOpBroadcast, "staged", kPull, kStagingViews, kOne, tuning::kStagedBroadcast, pull_broadcast},
    {moecclOpAllGather, "staged", kPull, kStagingViews, kAll, tuning::kStagedAllGather, pull_all_gather},
    {moecclOpReduceScatter, "staged", kPull, kStagingViews, kEach, tuning::kStagedBlocks, pull_reduce_scatter},
    {moecclOpAllToAll, "staged", kPull, kStagingViews, kEach, tuning::kStagedBlocks, pull_all_to_all},
    {moecclOpAllToAllv, "staged", kPull, kStagingViews, kEach, tuning::kStagedBlocks, pull_all_to_all},
    {moecclOpGather, "staged", kPull, kStagingViews, kOne, tuning::kStagedGather, pull_gather},
    {moecclOpScatter, "staged", kPull, kStagingViews, kEach, tuning::kStagedBlocks, pull_scatter},
    {moecclOpAllReduce, "cached", kCached, kStagingViews, kParts, tuning::kCachedAllReduce, cached<all_reduce>},
    {moecclOpAllGather, "cached", kCached, kStagingViews, kAll, tuning::kCachedAllGather, cached<pull_all_gather>},
    {moecclOpReduceScatter, "cached", kCached, kStagingViews, kEach, tuning::kCachedBlocks,
     cached<pull_reduce_scatter>},
    {moecclOpAllToAll, "cached", kCached, kStagingViews, kEach, tuning::kCachedBlocks, cached<pull_all_to_all>},
    {moecclOpAllToAllv, "cached", kCached, kStagingViews, kEach, tuning::kCachedBlocks, cached<pull_all_to_all>},
};

}  // namespace

std::span<const Algorithm> staged_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
