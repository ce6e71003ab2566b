// SPDX-License-Identifier: Apache-2.0
// Entry points of gradient.h.
#include "moeccl/gradient.h"

#include <memory>

#include "src/api/convert.h"
#include "src/api/hybrid_handle.h"
#include "src/moe/migrate/gradient_return.h"

using namespace moeccl;
using comm::Communicator;

namespace {

struct GradientHandle : api::OnComm<comm::GradientReturn> {
  static constexpr api::Words kWords{"gradients", "gradient return", "moecclGradientReturnCreate",
                                     "the gradient return's"};
};
using GradientTable = api::HandleTable<GradientHandle, moecclGradientReturn_t, 0xCB>;

}  // namespace

moecclResult_t moecclGradientReturnCreate(moecclGradientReturn_t* gradients, moecclHybrid_t hybrid,
                                          moecclComm_t comm_handle, const moecclGradientReturnConfig_t* config) {
  return api::member_of_group(api::with<api::HybridTable>(hybrid, [&](comm::Hybrid& h, Communicator&) -> Status {
    MOECCL_TRY(api::clear(gradients, "gradients", "the address of a moecclGradientReturn_t"));
    MOECCL_TRY(api::outside_groups("moecclGradientReturnCreate"));
    if (comm_handle == nullptr) comm_handle = api::HybridTable::get().find(hybrid)->comm_handle;
    return api::make_on(comm_handle, [&](Communicator& comm) {
      return api::give_handle<GradientTable>(gradients, comm_handle, comm::GradientReturn::create(h, comm, config));
    });
  }));
}

moecclResult_t moecclGradientReturnDestroy(moecclGradientReturn_t gradients) {
  return api::guarded(nullptr, [&] { return api::destroy_idle<GradientTable>(gradients); });
}

moecclResult_t moecclGradientReturnGetInfo(moecclGradientReturn_t gradients, int layer,
                                           moecclGradientReturnInfo_t* info) {
  return api::with<GradientTable, api::kLocal>(
      gradients, [&](comm::GradientReturn& g, Communicator&) { return g.info(layer, info); });
}

moecclResult_t moecclGradientReturnReduce(moecclGradientReturn_t gradients, int layer, const void* held, void* own,
                                          moecclStream_t stream_handle) {
  return api::member_of_group(
      api::with<GradientTable>(gradients, [&](comm::GradientReturn& g, Communicator& comm) -> Status {
        MOECCL_TRY(api::outside_groups("moecclGradientReturnReduce"));
        comm::Stream* stream = nullptr;
        MOECCL_TRY(api::find_stream(stream_handle, &comm, &stream));
        return g.reduce(layer, held, own, stream);
      }));
}

moecclResult_t moecclGradientReturnReset(moecclGradientReturn_t gradients, int layer) {
  return api::with<GradientTable, api::kLocal>(gradients,
                                               [&](comm::GradientReturn& g, Communicator&) { return g.reset(layer); });
}
