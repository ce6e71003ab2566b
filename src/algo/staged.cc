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
constexpr uint32_t kDone = 2;     // to oneself: results of a chunk have been read

Layout layout_of(const Shape& shape) {
  switch (shape.op) {
    case moecclOpAllReduce:
    case moecclOpReduce:
      return {2, tuning::kOverlap};
    case moecclOpAllGather:
      return {1, tuning::kOverlap};
    case moecclOpBroadcast:
    case moecclOpGather:
      return {1, tuning::kOneWay};
    default:
      return {shape.n_ranks, tuning::kOverlap};
  }
}

uint64_t chunk_bytes(moecclOp_t op) {
  switch (op) {
    case moecclOpAllReduce:
      return tuning::kStagedAllReduce;
    case moecclOpReduce:
      return tuning::kStagedReduce;
    case moecclOpAllGather:
      return tuning::kStagedAllGather;
    case moecclOpBroadcast:
      return tuning::kStagedBroadcast;
    case moecclOpGather:
      return tuning::kStagedGather;
    default:
      return tuning::kStagedBlocks;
  }
}

Status applies(const Shape& shape, const LevelTree&) {
  MOECCL_TRY(needs_staging_views(shape));
  return chunks_fit(shape, layout_of(shape));
}

Chunking chunking(const Shape& shape, const LevelTree&) { return cut(shape, layout_of(shape), chunk_bytes(shape.op)); }

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

// Three lanes, the one that others wait for first: reduce the own part, copy in, copy out. Copies in run ahead by the
// depth. A rank's kReady for chunk c follows its kDone of chunk c - depth, so whoever has it may also overwrite what
// that rank read of chunk c - depth.
Program all_reduce(const Shape& shape, const LevelTree&, uint32_t rank) {
  if (shape.n_ranks == 1) return solo(shape);
  const uint32_t n = shape.n_ranks;
  const Layout layout = layout_of(shape);
  ProgramBuilder b(shape, rank, layout);
  const Ref result = part(slot(rank, 1), rank, n);
  b.wait_all(kReady);
  const Ref own = part(out(rank), rank, n);
  b.reduce(own, peers_slots(shape, rank, 0, part(in(rank), rank, n)), true, true);
  b.copy(result, own);
  b.signal_all(kReduced);
  b.lane(LaneKind::kCopy);
  b.wait(rank, kDone, layout.depth);
  stage_parts(b, n, rank);
  b.lane(LaneKind::kIntra);
  collect_parts(b, n, rank);
  return std::move(b).finish();
}

// As all_reduce, but only the root hears of results. So copies in and reductions share a lane: a rank's kReady for
// chunk c + 1 then says that it has read chunk c. At the root it also says that chunk c + 1 - depth is copied out.
Program reduce(const Shape& shape, const LevelTree&, uint32_t rank) {
  if (shape.n_ranks == 1) return solo(shape);
  const uint32_t n = shape.n_ranks;
  const Layout layout = layout_of(shape);
  const bool root = rank == shape.root;
  ProgramBuilder b(shape, rank, layout);
  if (root) b.wait(rank, kDone, layout.depth);
  stage_parts(b, n, rank);
  b.wait_all(kReady);
  b.reduce(part(root ? out(rank) : slot(rank, 1), rank, n), peers_slots(shape, rank, 0, part(in(rank), rank, n)), true);
  if (root) {
    b.lane(LaneKind::kIntra);
    collect_parts(b, n, rank);
  } else {
    b.signal(shape.root, kReduced);
  }
  return std::move(b).finish();
}

Program all_gather(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_all_gather(shape, rank, layout_of(shape));
}
Program reduce_scatter(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_reduce_scatter(shape, rank, layout_of(shape));
}
Program all_to_all(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_all_to_all(shape, rank, layout_of(shape));
}
Program broadcast(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_broadcast(shape, rank, layout_of(shape), true);
}
Program gather(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_gather(shape, rank, layout_of(shape), true);
}
Program scatter(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_scatter(shape, rank, layout_of(shape), true);
}

constexpr const char* kSum = "stage inputs, each rank reduces one part, read all parts";
constexpr const char* kPull = "stage inputs chunk by chunk, read from peers' staging";
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "staged", kSum, applies, chunking, all_reduce},
    {moecclOpReduce, "staged", kSum, applies, chunking, reduce},
    {moecclOpBroadcast, "staged", kPull, applies, chunking, broadcast},
    {moecclOpAllGather, "staged", kPull, applies, chunking, all_gather},
    {moecclOpReduceScatter, "staged", kPull, applies, chunking, reduce_scatter},
    {moecclOpAllToAll, "staged", kPull, applies, chunking, all_to_all},
    {moecclOpAllToAllv, "staged", kPull, applies, chunking, all_to_all},
    {moecclOpGather, "staged", kPull, applies, chunking, gather},
    {moecclOpScatter, "staged", kPull, applies, chunking, scatter},
};

}  // namespace

std::span<const Algorithm> staged_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
