// SPDX-License-Identifier: Apache-2.0
// Entry points of replace.h.
#include "moeccl/replace.h"

#include <memory>

#include "src/api/moe_handles.h"
#include "src/moe/moe_replace.h"

using namespace moeccl;
using comm::Communicator;
using comm::MoeReplacement;

namespace {

struct ReplacementHandle {
  static constexpr api::Words kWords{"replacement", "replacement", "moecclReplaceCreate", "the replacement's"};
  moecclComm_t comm() const { return layer->comm_handle; }
  const ReplacementHandle& object() const { return *this; }
  std::shared_ptr<api::Layer> layer;
  std::unique_ptr<MoeReplacement> replacement;
  moecclRouting_t routing = nullptr;  // of the current step
};
using ReplacementTable = api::HandleTable<ReplacementHandle, moecclReplacement_t, 0xC7>;

// Calls `body` with a live replacement whose communicator is live too. Unless the call begins a step, its routing must
// also be live.
template <api::Scope kScope = api::kWithPeers, class Body>
moecclResult_t with_replacement(moecclReplacement_t handle, Body&& body, bool begins = false) {
  return api::with<ReplacementTable, kScope>(handle, [&](const ReplacementHandle& r, Communicator& comm) -> Status {
    if (!begins && r.routing != nullptr && api::RoutingTable::get().find(r.routing) == nullptr)
      return error(moecclInvalidUsage, "the step's routing was destroyed: keep it until the step's last call");
    return body(*r.replacement, comm);
  });
}

}  // namespace

moecclResult_t moecclReplaceCreate(moecclReplacement_t* replacement, moecclMoe_t moe,
                                   const moecclReplaceConfig_t* config) {
  const auto create = [&](const std::shared_ptr<api::Layer>& layer, Communicator&) -> Status {
    MOECCL_TRY(api::begin_create<ReplacementTable>(replacement, "the address of a moecclReplacement_t"));
    auto made = std::make_unique<ReplacementHandle>(ReplacementHandle{layer, nullptr, nullptr});
    MOECCL_ASSIGN_OR_RETURN(made->replacement, MoeReplacement::create(*made->layer->moe, config));
    MOECCL_ASSIGN_OR_RETURN(*replacement, ReplacementTable::get().add(std::move(made)));
    return {};
  };
  return api::collective<api::LayerTable>(moe, create);
}

moecclResult_t moecclReplaceDestroy(moecclReplacement_t replacement) {
  return api::guarded(nullptr, [&] { return api::destroy_idle<ReplacementTable>(replacement); });
}

moecclResult_t moecclReplaceBegin(moecclReplacement_t replacement, moecclRouting_t routing, const int32_t* next,
                                  const int32_t* placement) {
  const auto begin = [&](MoeReplacement& r, Communicator&) -> Status {
    MOECCL_TRY(api::outside_groups("moecclReplaceBegin"));
    MOECCL_ASSIGN_OR_RETURN(api::RoutingHandle * found, api::live<api::RoutingTable>(routing));
    ReplacementTable::get().find(replacement)->routing = routing;
    return r.begin(found->routing, next, placement);
  };
  return api::member_of_group(with_replacement(replacement, begin, true));
}

moecclResult_t moecclReplaceRows(moecclReplacement_t replacement, size_t* n_rows) {
  return with_replacement<api::kLocal>(replacement, [&](MoeReplacement& r, Communicator&) -> Status {
    MOECCL_TRY(api::require(n_rows, "n_rows", "the address of a size_t"));
    return r.rows(n_rows);
  });
}

moecclResult_t moecclReplaceResidual(moecclReplacement_t replacement, const void* x, const void* dispatched, void* in) {
  return with_replacement<api::kLocal>(replacement,
                                       [&](MoeReplacement& r, Communicator&) { return r.residual(x, dispatched, in); });
}

moecclResult_t moecclReplaceCombine(moecclReplacement_t replacement, const void* in, void* out, moecclStream_t stream) {
  return api::member_of_group(with_replacement(replacement, [&](MoeReplacement& r, Communicator& comm) -> Status {
    MOECCL_ASSIGN_OR_RETURN(comm::Stream* const on, api::find_stream(stream, &comm));
    return r.combine(in, out, on);
  }));
}

moecclResult_t moecclReplaceCombineBackward(moecclReplacement_t replacement, const void* grad_out, void* grad_in,
                                            const void* in, float* grad_weight, moecclStream_t stream) {
  return api::member_of_group(with_replacement(replacement, [&](MoeReplacement& r, Communicator& comm) -> Status {
    MOECCL_ASSIGN_OR_RETURN(comm::Stream* const on, api::find_stream(stream, &comm));
    const auto n_weights = [&]() -> Result<size_t> { return r.n_choices(); };
    return api::combine_backward(r, comm, {grad_out, grad_in, in, grad_weight}, n_weights, on);
  }));
}

moecclResult_t moecclReplaceResidualBackward(moecclReplacement_t replacement, const void* grad_in,
                                             void* grad_dispatched, void* grad_x) {
  return with_replacement<api::kLocal>(replacement, [&](MoeReplacement& r, Communicator&) {
    return r.residual_backward(grad_in, grad_dispatched, grad_x);
  });
}

moecclResult_t moecclReplaceGetInfo(moecclReplacement_t replacement, moecclReplaceInfo_t* info) {
  return with_replacement<api::kLocal>(replacement, [&](MoeReplacement& r, Communicator&) { return r.info(info); });
}
