// SPDX-License-Identifier: Apache-2.0
// What a plan costs, for the choice among plans. The clock of plan/cost.h runs the programs of all ranks, which are
// quadratic in their number for most operations: every rank of a large world would spend seconds and hundreds of MiB on
// each choice. Above kMostPricedRanks the price is drawn on from those of three smaller worlds of the same kind.
#pragma once

#include "src/algo/algorithm.h"
#include "src/plan/levels.h"
#include "src/plan/profile.h"

namespace moeccl::comm {

inline constexpr uint32_t kMostPricedRanks = 128;

// Of all ranks' programs. most_ranks: for tests.
double plan_price_ns(const algo::Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree,
                     const plan::Profile& profile, uint32_t most_ranks = kMostPricedRanks);

}  // namespace moeccl::comm
