// SPDX-License-Identifier: Apache-2.0
// Entry points of gradient.h.
#include "moeccl/gradient.h"

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
  return api::create_from<GradientTable>(gradients, "the address of a moecclGradientReturn_t", hybrid, comm_handle,
                                         config);
}

moecclResult_t moecclGradientReturnDestroy(moecclGradientReturn_t gradients) {
  return api::guarded(nullptr, [&] {
    return api::destroy<GradientTable>(gradients, GradientHandle::kWords, [](GradientHandle& made) {
      Communicator* const comm = api::CommTable::get().find(made.comm());
      if (comm != nullptr) comm->wait_idle();
      if (comm == nullptr || comm->aborted()) made.object().let_go_of_streams();
    });
  });
}

moecclResult_t moecclGradientReturnGetInfo(moecclGradientReturn_t gradients, int layer,
                                           moecclGradientReturnInfo_t* info) {
  return api::with<GradientTable, api::kLocal>(
      gradients, [&](comm::GradientReturn& g, Communicator&) { return g.info(layer, info); });
}

moecclResult_t moecclGradientReturnReduce(moecclGradientReturn_t gradients, int layer, const void* held, void* own,
                                          moecclStream_t stream_handle) {
  constexpr const char* kName = "moecclGradientReturnReduce";
  return api::collective<GradientTable>(gradients, kName, [&](comm::GradientReturn& g, Communicator& comm) -> Status {
    MOECCL_ASSIGN_OR_RETURN(comm::Stream* const stream, api::find_stream(stream_handle, &comm));
    return g.reduce(layer, held, own, stream);
  });
}

moecclResult_t moecclGradientReturnReset(moecclGradientReturn_t gradients, int layer) {
  return api::with<GradientTable, api::kLocal>(gradients,
                                               [&](comm::GradientReturn& g, Communicator&) { return g.reset(layer); });
}
