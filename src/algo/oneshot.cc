// SPDX-License-Identifier: Apache-2.0
// Small messages: every rank stages its whole message, signals once, and reads what it needs from its peers' staging.
// There is no second synchronisation: the next operation stages elsewhere (see Memory in plan.h).
#include "src/algo/families.h"
#include "src/algo/pull.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kReady = 0;

void all_reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  b.copy(slot(rank, 0), in(rank));
  b.signal_all(kReady);
  b.wait_all(kReady);
  b.reduce(out(rank), peers_slots(shape, rank, 0, in(rank)), true);
}

void reduce(ProgramBuilder& b, const Shape& shape, const LevelTree&, uint32_t rank) {
  if (rank == shape.root) {
    b.wait_all(kReady);
    b.reduce(out(rank), peers_slots(shape, rank, 0, in(rank)), true);
  } else {
    b.copy(slot(rank, 0), in(rank));
    b.signal(shape.root, kReady);
  }
}

constexpr const char* kSummary = "stage the whole message, signal once, read from all";
constexpr Algorithm kAlgorithms[] = {
    {moecclOpAllReduce, "oneshot", kSummary, kStagingViews, slots<1, 1>, kWhole, all_reduce},
    {moecclOpReduce, "oneshot", kSummary, kStagingViews, slots<1, 1>, kWhole, reduce},
    {moecclOpBroadcast, "oneshot", kSummary, kStagingViews, slots<1, 1>, kWhole, pull_broadcast},
    {moecclOpAllGather, "oneshot", kSummary, kStagingViews, slots<1, 1>, kWhole, pull_all_gather},
    {moecclOpReduceScatter, "oneshot", kSummary, kStagingViews, rank_slots<0, 1>, kWhole, pull_reduce_scatter},
    {moecclOpAllToAll, "oneshot", kSummary, kStagingViews, rank_slots<0, 1>, kWhole, pull_all_to_all},
    {moecclOpGather, "oneshot", kSummary, kStagingViews, slots<1, 1>, kWhole, pull_gather},
    {moecclOpScatter, "oneshot", kSummary, kStagingViews, rank_slots<0, 1>, kWhole, pull_scatter},
};

}  // namespace

std::span<const Algorithm> oneshot_algorithms() { return kAlgorithms; }

}  // namespace moeccl::algo
