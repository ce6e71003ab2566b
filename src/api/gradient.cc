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

struct GradientHandle {
  moecclComm_t comm_handle;
  std::unique_ptr<comm::GradientReturn> gradients;
};
using GradientTable = api::HandleTable<GradientHandle, moecclGradientReturn_t, 0xCB>;

template <class Body>
moecclResult_t with_gradients(moecclGradientReturn_t handle, Body&& body) {
  const Result<GradientHandle*> found =
      api::live(GradientTable::get(), handle, "gradients", "gradient return", "moecclGradientReturnCreate");
  if (!found.ok()) return api::finish(found.status());
  comm::GradientReturn& gradients = *found.value()->gradients;
  return api::with_comm(
      found.value()->comm_handle, [&](Communicator& comm) { return body(gradients, comm); }, "the gradient return's");
}

}  // namespace

moecclResult_t moecclGradientReturnCreate(moecclGradientReturn_t* gradients, moecclHybrid_t hybrid,
                                          moecclComm_t comm_handle, const moecclGradientReturnConfig_t* config) {
  return api::with_hybrid(hybrid, [&](comm::Hybrid& h, Communicator&) -> Status {
    MOECCL_TRY(api::clear(gradients, "gradients", "the address of a moecclGradientReturn_t"));
    MOECCL_TRY(api::outside_groups("moecclGradientReturnCreate"));
    auto handle = std::make_unique<GradientHandle>();
    handle->comm_handle = comm_handle == nullptr ? api::HybridTable::get().find(hybrid)->comm_handle : comm_handle;
    return api::make_on(handle->comm_handle, [&](Communicator& comm) -> Status {
      MOECCL_ASSIGN_OR_RETURN(handle->gradients, comm::GradientReturn::create(h, comm, config));
      MOECCL_ASSIGN_OR_RETURN(*gradients, GradientTable::get().add(std::move(handle)));
      return {};
    });
  });
}

moecclResult_t moecclGradientReturnDestroy(moecclGradientReturn_t gradients) {
  return api::guarded(nullptr, [&] {
    return api::destroy(GradientTable::get(), gradients, "gradients", "gradient return", [](GradientHandle& h) {
      api::wait_for_operations(h.comm_handle);
      return Status();
    });
  });
}

moecclResult_t moecclGradientReturnGetInfo(moecclGradientReturn_t gradients, int layer,
                                           moecclGradientReturnInfo_t* info) {
  return with_gradients(gradients, [&](comm::GradientReturn& g, Communicator&) { return g.info(layer, info); });
}

moecclResult_t moecclGradientReturnReduce(moecclGradientReturn_t gradients, int layer, const void* held, void* own,
                                          moecclStream_t stream_handle) {
  return with_gradients(gradients, [&](comm::GradientReturn& g, Communicator& comm) -> Status {
    MOECCL_TRY(api::outside_groups("moecclGradientReturnReduce"));
    comm::Stream* stream = nullptr;
    MOECCL_TRY(api::find_stream(stream_handle, &comm, &stream));
    return g.reduce(layer, held, own, stream);
  });
}

moecclResult_t moecclGradientReturnReset(moecclGradientReturn_t gradients, int layer) {
  return with_gradients(gradients, [&](comm::GradientReturn& g, Communicator&) { return g.reset(layer); });
}
