// SPDX-License-Identifier: Apache-2.0
// Entry points of swap.h.
#include "moeccl/swap.h"

#include <algorithm>
#include <utility>

#include "src/api/convert.h"
#include "src/api/moe_handles.h"
#include "src/base/adopt.h"
#include "src/moe/swap/expert_swap.h"
#include "src/moe/swap/level_costs.h"

using namespace moeccl;
using comm::Communicator;

namespace {

struct SwapHandle : api::OnComm<comm::ExpertSwap> {
  static constexpr api::Words kWords{"swap", "object of expert swap", "moecclExpertSwapCreate", "the expert swap's"};
};
using SwapTable = api::HandleTable<SwapHandle, moecclExpertSwap_t, 0xCA>;

}  // namespace

moecclResult_t moecclExpertSwapCreate(moecclExpertSwap_t* swap, moecclComm_t comm_handle,
                                      const moecclExpertSwapConfig_t* config) {
  return api::collective(comm_handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(api::begin_create<SwapTable>(swap, "the address of a moecclExpertSwap_t"));
    return api::give_handle<SwapTable>(swap, comm_handle, comm::ExpertSwap::create(comm, config));
  });
}

moecclResult_t moecclExpertSwapDestroy(moecclExpertSwap_t swap) {
  return api::guarded(nullptr, [&] { return api::destroy<SwapTable>(swap); });
}

moecclResult_t moecclExpertSwapAttach(moecclExpertSwap_t swap, moecclMoe_t moe, const moecclSwapTensor_t* tensors,
                                      int32_t n_tensors, const int32_t* slot_of, int32_t* layer) {
  return api::collective<SwapTable>(swap, "moecclExpertSwapAttach", [&](comm::ExpertSwap& s, Communicator&) -> Status {
    MOECCL_ASSIGN_OR_RETURN(api::LayerHandle * found, api::live<api::LayerTable>(moe));
    Communicator* of_layer = nullptr;
    if (Status alive = api::find_comm(found->layer->comm_handle, &of_layer); !alive.ok())
      return std::move(alive).with_context("the layer's communicator");
    if (n_tensors < 0 || (tensors == nullptr && n_tensors > 0))
      return error(moecclInvalidArgument, "n_tensors is {}{}: give tensors[n_tensors], or 0", n_tensors,
                   tensors == nullptr ? " and tensors NULL" : "");
    return s.attach(*found->layer->moe, {tensors, static_cast<size_t>(n_tensors)}, slot_of, layer);
  });
}

moecclResult_t moecclExpertSwapBegin(moecclExpertSwap_t swap) {
  return api::with<SwapTable>(swap, [&](comm::ExpertSwap& s, Communicator&) { return s.begin(); });
}

moecclResult_t moecclExpertSwapTest(moecclExpertSwap_t swap, int32_t* done) {
  return api::with<SwapTable, api::kLocal>(swap, [&](comm::ExpertSwap& s, Communicator&) { return s.test(done); });
}

moecclResult_t moecclExpertSwapFinish(moecclExpertSwap_t swap, int32_t* n_swaps) {
  return api::collective<SwapTable>(swap, "moecclExpertSwapFinish",
                                    [&](comm::ExpertSwap& s, Communicator&) { return s.finish(n_swaps); });
}

moecclResult_t moecclExpertSwapGetInfo(moecclExpertSwap_t swap, int32_t layer, moecclExpertSwapInfo_t* info) {
  return api::with<SwapTable, api::kLocal>(swap,
                                           [&](comm::ExpertSwap& s, Communicator&) { return s.info(layer, info); });
}

moecclResult_t moecclSwapLevels(moecclComm_t handle, moecclSwapLevels_t* levels, int32_t* group_of_rank,
                                size_t max_groups) {
  return api::with_comm<api::kLocal>(handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(check_out(levels, "levels"));
    const plan::LevelTree& tree = comm.tree();
    const size_t n_levels = tree.depth(), n_groups = n_levels * tree.n_ranks;
    if (n_levels > MOECCL_MAX_LEVELS)
      return error(moecclUnsupported, "the topology has {} levels: moecclSwapLevels lists at most {}", n_levels,
                   MOECCL_MAX_LEVELS);
    if (group_of_rank == nullptr ? max_groups > 0 : max_groups < n_groups)
      return error(moecclInvalidArgument, "group_of_rank{} with max_groups {}: give {} entries, or NULL and 0",
                   group_of_rank == nullptr ? " is NULL" : "", max_groups, n_groups);
    moecclSwapLevels_t made{};
    made.n_ranks = static_cast<int32_t>(tree.n_ranks);
    made.n_levels = static_cast<int32_t>(n_levels);
    for (size_t l = 0; l < n_levels; ++l) {
      made.n_groups[l] = static_cast<int32_t>(tree.levels[l].n_groups);
      if (group_of_rank != nullptr)
        std::copy(tree.levels[l].group_of_rank.begin(), tree.levels[l].group_of_rank.end(),
                  group_of_rank + l * tree.n_ranks);
    }
    const comm::LevelCosts costs = comm::level_costs(tree, *comm.selector().profile());
    std::copy(costs.inter_alpha_us.begin(), costs.inter_alpha_us.end(), made.inter_alpha_us);
    std::copy(costs.inter_beta_us.begin(), costs.inter_beta_us.end(), made.inter_beta_us);
    std::copy(costs.intra_alpha_us.begin(), costs.intra_alpha_us.end(), made.intra_alpha_us);
    std::copy(costs.intra_beta_us.begin(), costs.intra_beta_us.end(), made.intra_beta_us);
    give(made, levels);
    return {};
  });
}
