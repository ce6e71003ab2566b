// Small messages: every rank stages its whole message, signals once, and reads what it needs from its peers' staging.
// There is no second synchronisation: the next operation stages elsewhere (see Memory in plan.h).
#include "src/algo/families.h"
#include "src/algo/pull.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kReady = 0;

Layout layout_of(const Shape& shape) {
  const bool blocks = shape.op == moecclOpReduceScatter || shape.op == moecclOpAllToAll || shape.op == moecclOpScatter;
  return {blocks ? shape.n_ranks : 1, 1};
}

Status applies(const Shape& shape, const LevelTree&) {
  MOECCL_TRY(needs_staging_views(shape));
  return whole_fits(shape, layout_of(shape));
}

Chunking chunking(const Shape& shape, const LevelTree&) { return whole(shape); }

Program all_reduce(const Shape& shape, const LevelTree&, uint32_t rank) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout_of(shape));
  b.copy(slot(rank, 0), in(rank));
  b.signal_all(kReady);
  b.wait_all(kReady);
  b.reduce(out(rank), peers_slots(shape, rank, 0, in(rank)), true);
  return std::move(b).finish();
}

Program reduce(const Shape& shape, const LevelTree&, uint32_t rank) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout_of(shape));
  if (rank == shape.root) {
    b.wait_all(kReady);
    b.reduce(out(rank), peers_slots(shape, rank, 0, in(rank)), true);
  } else {
    b.copy(slot(rank, 0), in(rank));
    b.signal(shape.root, kReady);
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
  return pull_broadcast(shape, rank, layout_of(shape), false);
}
Program gather(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_gather(shape, rank, layout_of(shape), false);
}
Program scatter(const Shape& shape, const LevelTree&, uint32_t rank) {
  return pull_scatter(shape, rank, layout_of(shape), false);
}

constexpr const char* kSummary = "stage the whole message, signal once, read from all";
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "oneshot", kSummary, applies, chunking, all_reduce},
    {moecclOpReduce, "oneshot", kSummary, applies, chunking, reduce},
    {moecclOpBroadcast, "oneshot", kSummary, applies, chunking, broadcast},
    {moecclOpAllGather, "oneshot", kSummary, applies, chunking, all_gather},
    {moecclOpReduceScatter, "oneshot", kSummary, applies, chunking, reduce_scatter},
    {moecclOpAllToAll, "oneshot", kSummary, applies, chunking, all_to_all},
    {moecclOpGather, "oneshot", kSummary, applies, chunking, gather},
    {moecclOpScatter, "oneshot", kSummary, applies, chunking, scatter},
};

}  // namespace

std::span<const Algorithm> oneshot_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
