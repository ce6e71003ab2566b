// SPDX-License-Identifier: Apache-2.0
// Entry points of swap.h.
#include "moeccl/swap.h"

#include <memory>
#include <utility>

#include "src/api/convert.h"
#include "src/api/moe_handles.h"
#include "src/moe/swap/expert_swap.h"

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
