// SPDX-License-Identifier: Apache-2.0
// Entry points of hybrid.h.
#include "moeccl/hybrid.h"

#include "src/api/hybrid_handle.h"
#include "src/api/issue.h"
#include "src/api/moe_create.h"
#include "src/base/adopt.h"

using namespace moeccl;
using comm::Communicator;

namespace {

using api::HybridTable;

Status create_layer(const comm::Hybrid& hybrid, moecclMoe_t* moe, moecclComm_t comm_handle, Communicator& comm,
                    const moecclMoeConfig_t* given) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  const auto n_experts = static_cast<int32_t>(hybrid.homes().n_experts());
  const Status refusal = [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(config, adopt(given, "config"));
    MOECCL_TRY(hybrid.same_ranks(comm));
    if (config.n_experts != 0 && config.n_experts != n_experts)
      return error(moecclInvalidArgument, "config.n_experts is {}: the hybrid placement has {}", config.n_experts,
                   n_experts);
    if (config.expert_rank == nullptr) return {};
    return error(moecclInvalidArgument,
                 "config.expert_rank is given: the hybrid placement says which rank owns which expert");
  }();
  config.n_experts = n_experts;
  config.expert_rank = hybrid.expert_rank().data();
  return api::create_moe(moe, comm_handle, comm, &config, hybrid.domains(), refusal);
}

}  // namespace

moecclResult_t moecclHybridCreate(moecclHybrid_t* hybrid, moecclComm_t comm_handle,
                                  const moecclHybridConfig_t* config) {
  return api::collective(comm_handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(api::begin_create<HybridTable>(hybrid, "the address of a moecclHybrid_t"));
    return api::give_handle<HybridTable>(hybrid, comm_handle, comm::Hybrid::create(comm, config));
  });
}

moecclResult_t moecclHybridDestroy(moecclHybrid_t hybrid) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::not_in_group<HybridTable>(hybrid, "placement"));
    return api::destroy_idle<HybridTable>(hybrid);
  });
}

moecclResult_t moecclHybridGetInfo(moecclHybrid_t hybrid, moecclHybridInfo_t* info) {
  return api::with<HybridTable, api::kLocal>(hybrid, [&](comm::Hybrid& h, Communicator&) { return h.info(info); });
}

moecclResult_t moecclHybridMoeCreate(moecclMoe_t* moe, moecclHybrid_t hybrid, moecclComm_t comm_handle,
                                     const moecclMoeConfig_t* config) {
  return api::collective<HybridTable>(hybrid, [&](comm::Hybrid& h, Communicator&) {
    return api::make_on(comm_handle,
                        [&](Communicator& comm) { return create_layer(h, moe, comm_handle, comm, config); });
  });
}

moecclResult_t moecclHybridGather(moecclHybrid_t hybrid, const void* own, void* held, size_t expert_bytes,
                                  moecclStream_t stream) {
  return api::collective<HybridTable>(hybrid, [&](comm::Hybrid& h, Communicator& comm) {
    return api::issue(comm, stream, &h.group_holds(),
                      [&](exec::Operation& op) { return h.prepare_gather(own, held, expert_bytes, op); });
  });
}

moecclResult_t moecclHybridReduce(moecclHybrid_t hybrid, const void* held, void* own, size_t count,
                                  moecclDataType_t type, moecclStream_t stream) {
  return api::collective<HybridTable>(hybrid, [&](comm::Hybrid& h, Communicator& comm) {
    return api::issue(comm, stream, &h.group_holds(),
                      [&](exec::Operation& op) { return h.prepare_reduce(held, own, count, type, op); });
  });
}

moecclResult_t moecclHybridExplain(moecclHybrid_t hybrid, size_t expert_bytes, char* text, size_t text_bytes,
                                   size_t* needed) {
  return api::with<HybridTable, api::kLocal>(hybrid, [&](comm::Hybrid& h, Communicator&) -> Status {
    return api::give_text(h.explain(expert_bytes), text, text_bytes, needed);
  });
}

moecclResult_t moecclCommTraffic(moecclComm_t comm_handle, moecclTraffic_t* to, int n_ranks) {
  return api::with_comm<api::kLocal>(comm_handle, [&](Communicator& comm) -> Status {
    if (to == nullptr) return api::null_argument("to", "an array of n_ranks moecclTraffic_t");
    if (n_ranks != static_cast<int>(comm.n_ranks()))
      return error(moecclInvalidArgument, "n_ranks is {}: the communicator has {} ranks", n_ranks, comm.n_ranks());
    for (uint32_t r = 0; r < comm.n_ranks(); ++r) {
      const exec::Fabric::Traffic& traffic = comm.fabric().traffic[r];
      to[r] = {traffic.bytes, traffic.messages};
    }
    return {};
  });
}
