// SPDX-License-Identifier: Apache-2.0
// What expert swap assumes about the AlltoAlls of each level (HierMoE, Eq. 1-5 and 8).
#pragma once

#include <vector>

#include "src/plan/levels.h"
#include "src/plan/profile.h"

namespace moeccl::comm {

// Figures of Eq. 8, one for each level, outermost first, as moecclSwapProblem_t has them: in us, and us per byte.
struct LevelCosts {
  std::vector<double> inter_alpha_us, inter_beta_us, intra_alpha_us, intra_beta_us;
};

// Takes the profile's AlltoAlls or, without these, derives them from the tree's links. Where links are not known, a
// byte costs the same at every level.
LevelCosts level_costs(const plan::LevelTree& tree, const plan::Profile& profile);

}  // namespace moeccl::comm
