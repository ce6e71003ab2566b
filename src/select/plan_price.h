// SPDX-License-Identifier: Apache-2.0
// Prices plans for the choice among them. The clock of plan/cost.h runs the programs of all ranks, whose size is
// quadratic in the number of ranks for most operations: every rank of a large world would spend seconds and hundreds of
// MiB on each choice. Above kMostPricedRanks, the price is extrapolated from those of three smaller worlds of the same
// kind.
#pragma once

#include "src/algo/algorithm.h"
#include "src/plan/levels.h"
#include "src/plan/profile.h"

namespace moeccl::comm {

inline constexpr uint32_t kMostPricedRanks = 128;

// Returns the price of all ranks' programs. most_ranks: for tests.
double plan_price_ns(const algo::Algorithm& algorithm, const plan::Shape& shape, const plan::LevelTree& tree,
                     const plan::Profile& profile, uint32_t most_ranks = kMostPricedRanks);

}  // namespace moeccl::comm
