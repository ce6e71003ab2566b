// SPDX-License-Identifier: Apache-2.0
#include "src/moe/swap/level_costs.h"

#include "src/routing/hiermoe_model.h"

namespace moeccl::comm {

LevelCosts level_costs(const plan::LevelTree& tree, const plan::Profile& profile) {
  const bool measured = profile.all_to_all.standard.bytes_per_ns > 0;
  const plan::AllToAllCosts fits = measured ? profile.all_to_all : algo::all_to_all_of_links(tree);
  const uint32_t depth = tree.depth();
  const bool known = algo::hiermoe_knows({algo::PathKind::kHier, depth}, fits).ok() &&
                     algo::hiermoe_knows({algo::PathKind::kHier, 1}, fits).ok() && fits.intra.size() + 1 >= depth;
  const auto add = [&](std::vector<double>& alpha, std::vector<double>& beta, const plan::AllToAllCosts::Fit* fit) {
    const bool says = known && fit != nullptr && fit->bytes_per_ns > 0;
    alpha.push_back(says ? fit->alpha_ns / 1e3 : 0);
    beta.push_back(says ? 1e-3 / fit->bytes_per_ns : 1e-3);
  };
  LevelCosts costs;
  for (uint32_t l = 0; l < depth; ++l) {
    add(costs.inter_alpha_us, costs.inter_beta_us, l < fits.inter.size() ? &fits.inter[l] : nullptr);
    add(costs.intra_alpha_us, costs.intra_beta_us,
        l == 0                      ? &fits.standard
        : l - 1 < fits.intra.size() ? &fits.intra[l - 1]
                                    : nullptr);
  }
  return costs;
}

}  // namespace moeccl::comm
