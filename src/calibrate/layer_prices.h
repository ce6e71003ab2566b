// SPDX-License-Identifier: Apache-2.0
// Counts and prices the candidates of a layer's dispatch and combine for a routing on a topology, two at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "src/algo/moe_price.h"
#include "src/plan/levels.h"
#include "src/plan/profile.h"
#include "src/routing/domains.h"

namespace moeccl::comm {

// A candidate, in both directions.
struct LayerPlan {
  // domains: as in Paths.
  LayerPlan(const algo::MoeAlgorithm& a, const plan::LevelTree& tree, const algo::Placement& placement,
            const algo::Domains* domains)
      : algorithm(a), paths(a, tree, placement, domains) {}

  algo::MoeAlgorithm algorithm;
  algo::Paths paths;
  algo::Traffic traffic;
  std::string refusal;              // not empty: why it is not priced
  const LayerPlan* same = nullptr;  // an earlier candidate that is the same plan and has its prices
  algo::MoeCost dispatch, combine;

  bool priced() const { return refusal.empty() && same == nullptr; }
  const LayerPlan& prices() const { return same != nullptr ? *same : *this; }
};

// Counts the routing's rows. refuse: returns why a plan of this many steps a chunk is not to be priced, or "".
Status count_layer(std::deque<LayerPlan>& plans, const algo::RoutedLayer& layer,
                   const std::function<std::string(uint64_t steps)>& refuse);
Status price_layer(std::deque<LayerPlan>& plans, const plan::LevelTree& tree, const plan::Profile& profile,
                   uint64_t row_bytes);

}  // namespace moeccl::comm
