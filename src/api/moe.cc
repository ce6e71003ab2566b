// SPDX-License-Identifier: Apache-2.0
// Entry points of moe.h.
#include "moeccl/moe.h"

#include <memory>
#include <vector>

#include "src/api/moe_create.h"
#include "src/api/moe_handles.h"
#include "src/base/adopt.h"
#include "src/base/env.h"
#include "src/bootstrap/bootstrap.h"
#include "src/world/config.h"
#include "src/world/staging.h"
#include "topology/discover.h"

using namespace moeccl;
using comm::Communicator;

using api::Layer;
using api::LayerHandle;
using api::LayerTable;
using api::RoutingHandle;
using api::RoutingTable;

namespace {

// The checked arguments of moecclMoeCheck and moecclMoeQuerySize.
struct Question {
  plan::LevelTree tree;
  comm::MoeConfig config;
  uint64_t granted = 0;  // staging bytes of one operation
};

Result<plan::LevelTree> tree_of(int n_ranks, const char* topology) {
  if (n_ranks < 1 || n_ranks > bootstrap::kMaxRanks)
    return error(moecclInvalidArgument, "n_ranks is {}: a communicator has between 1 and {} ranks", n_ranks,
                 bootstrap::kMaxRanks);
  const auto n = static_cast<uint32_t>(n_ranks);
  if (topology == nullptr || *topology == '\0') return plan::LevelTree::flat(n);
  return topology::tree_from_text(topology, n);
}

Result<Question> question(const moecclMoeConfig_t* given, int n_ranks, const char* topology) {
  MOECCL_ASSIGN_OR_RETURN(const moecclMoeConfig_t full, adopt(given, "config"));
  MOECCL_TRY(env_status());
  MOECCL_ASSIGN_OR_RETURN(const uint64_t staging, comm::Config::staging_of(full.staging_bytes));
  Question q;
  MOECCL_ASSIGN_OR_RETURN(q.tree, tree_of(n_ranks, topology));
  MOECCL_ASSIGN_OR_RETURN(q.config, comm::MoeConfig::from(&full, q.tree, full.deterministic == 1));
  q.tree.n_far_levels = plan::far_levels_by_name(q.tree);
  const auto around = comm::Config::Around::of(q.tree, comm::profile_of_variable(q.tree));
  q.granted = comm::granted_staging(comm::Config::staging_on(staging, around));
  return q;
}

Status check(const moecclMoeConfig_t* given, int n_ranks, const char* topology) {
  MOECCL_ASSIGN_OR_RETURN(const Question q, question(given, n_ranks, topology));
  return comm::fitting(q.config, q.tree, q.granted).status();
}

Status query_size(const moecclMoeConfig_t* given, int n_ranks, const char* topology, size_t* bytes) {
  if (bytes == nullptr) return api::null_argument("bytes", "the address of a size_t");
  MOECCL_ASSIGN_OR_RETURN(const Question q, question(given, n_ranks, topology));
  MOECCL_ASSIGN_OR_RETURN(*bytes, comm::query_size(q.config, q.tree, q.granted));
  return {};
}

// Makes a table readable for the host, by a copy if it is in CUDA memory.
template <class T>
Status to_host(Communicator& comm, const T** table, size_t n, std::vector<T>& copy) {
  if (*table == nullptr || n == 0 || !comm.is_device_memory(*table)) return {};
  copy.resize(n);
  MOECCL_TRY(comm.copy_across(copy.data(), *table, n * sizeof(T)));
  *table = copy.data();
  return {};
}

Status update(comm::MoeRouting& routing, Communicator& comm, const int32_t* index, const float* weight,
              size_t n_tokens) {
  MOECCL_TRY(api::outside_groups("the update of a routing"));
  const algo::MoeShape& shape = routing.layer().config().shape;
  std::vector<int32_t> index_copy;
  std::vector<float> weight_copy;
  // Choices in CUDA memory are used where they are, and so are their weights. If there are too many tokens, update()
  // reports it. A layer with expert swap keeps its map on the host.
  const bool fits = n_tokens <= shape.max_tokens;
  const Status copied = contained([&]() -> Status {
    if (fits && routing.layer().map() != nullptr) MOECCL_TRY(to_host(comm, &index, n_tokens * shape.top_k, index_copy));
    if (fits && !comm.is_device_memory(index)) MOECCL_TRY(to_host(comm, &weight, n_tokens * shape.top_k, weight_copy));
    return {};
  });
  return routing.update(index, weight, n_tokens, copied);
}

// Returns T * k of the last update.
Result<size_t> n_weights(const comm::MoeRouting& routing) {
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  MOECCL_TRY(routing.info(&info));
  return info.n_tokens * routing.layer().config().shape.top_k;
}

}  // namespace

moecclResult_t moecclMoeCheck(const moecclMoeConfig_t* config, int n_ranks, const char* topology, char* message,
                              size_t message_bytes) {
  return api::guarded(nullptr, [&]() -> Status {
    Status status = check(config, n_ranks, topology);
    api::copy_text(status.message(), message, message_bytes, nullptr);
    return status;
  });
}

moecclResult_t moecclMoeQuerySize(const moecclMoeConfig_t* config, int n_ranks, const char* topology, size_t* bytes) {
  return api::guarded(nullptr, [&] { return query_size(config, n_ranks, topology, bytes); });
}

Status api::create_moe(moecclMoe_t* moe, moecclComm_t comm_handle, Communicator& comm, const moecclMoeConfig_t* config,
                       std::shared_ptr<const algo::Domains> domains, const Status& refusal) {
  MOECCL_TRY(api::clear(moe, "moe", "the address of a moecclMoe_t"));
  MOECCL_TRY(api::outside_groups("the creation of a layer"));
  auto layer = std::make_shared<Layer>(comm_handle, comm);
  comm::Selector& selector = comm.selector();
  MOECCL_ASSIGN_OR_RETURN(layer->moe, comm::MoeLayer::create(layer->channel, config, std::move(domains),
                                                             selector.forced(moecclOpDispatch), refusal));
  if (const Status& follows = layer->moe->follows_force(); !follows.ok())
    selector.warn_of_force(moecclOpDispatch, layer->moe->config().hash(),
                           follows.message() + "; layers of this config run the cheapest plan instead");
  MOECCL_ASSIGN_OR_RETURN(*moe, LayerTable::get().add(std::make_unique<LayerHandle>(LayerHandle{std::move(layer)})));
  return {};
}

moecclResult_t moecclMoeCreate(moecclMoe_t* moe, moecclComm_t comm_handle, const moecclMoeConfig_t* config) {
  return api::collective(comm_handle,
                         [&](Communicator& comm) { return api::create_moe(moe, comm_handle, comm, config, nullptr); });
}

moecclResult_t moecclMoeDestroy(moecclMoe_t moe) {
  return api::guarded(nullptr, [&] { return api::destroy<LayerTable>(moe); });
}

moecclResult_t moecclRoutingCreate(moecclRouting_t* routing, moecclMoe_t moe, const int32_t* topk_index,
                                   const float* topk_weight, size_t n_tokens) {
  return api::collective<LayerTable>(moe, [&](const std::shared_ptr<Layer>& layer, Communicator& comm) -> Status {
    MOECCL_TRY(api::clear(routing, "routing", "the address of a moecclRouting_t"));
    auto made = std::make_unique<RoutingHandle>(layer);
    MOECCL_TRY(update(made->routing, comm, topk_index, topk_weight, n_tokens));
    MOECCL_ASSIGN_OR_RETURN(*routing, RoutingTable::get().add(std::move(made)));
    return {};
  });
}

moecclResult_t moecclRoutingUpdate(moecclRouting_t routing, const int32_t* topk_index, const float* topk_weight,
                                   size_t n_tokens) {
  return api::collective<RoutingTable>(routing, [&](comm::MoeRouting& r, Communicator& comm) {
    return update(r, comm, topk_index, topk_weight, n_tokens);
  });
}

moecclResult_t moecclRoutingUpdateOnStream(moecclRouting_t routing, const int32_t* topk_index, const float* topk_weight,
                                           size_t n_tokens, const uint64_t* n_tokens_device, moecclStream_t stream) {
  return api::collective_on<RoutingTable>(routing, stream, [&](comm::MoeRouting& r, Communicator&, comm::Stream* on) {
    return r.update_on_stream({topk_index, topk_weight, n_tokens, n_tokens_device}, on);
  });
}

moecclResult_t moecclRoutingDestroy(moecclRouting_t routing) {
  return api::guarded(nullptr, [&] { return api::destroy_idle<RoutingTable>(routing); });
}

moecclResult_t moecclRoutingGetInfo(moecclRouting_t routing, moecclRoutingInfo_t* info) {
  return api::with<RoutingTable, api::kLocal>(routing,
                                              [&](comm::MoeRouting& r, Communicator&) { return r.info(info); });
}

moecclResult_t moecclRoutingGetDeviceInfo(moecclRouting_t routing, moecclRoutingDeviceInfo_t* info) {
  return api::with<RoutingTable, api::kLocal>(routing,
                                              [&](comm::MoeRouting& r, Communicator&) { return r.device_info(info); });
}

moecclResult_t moecclDispatch(moecclRouting_t routing, const void* in, void* out, moecclStream_t stream) {
  return api::collective_on<RoutingTable>(
      routing, stream, [&](comm::MoeRouting& r, Communicator&, comm::Stream* on) { return r.dispatch(in, out, on); });
}

moecclResult_t moecclDispatchScaled(moecclRouting_t routing, const void* in, const void* in_scales, void* out,
                                    void* out_scales, moecclStream_t stream) {
  return api::collective_on<RoutingTable>(routing, stream, [&](comm::MoeRouting& r, Communicator&, comm::Stream* on) {
    return r.dispatch_scaled(in, out, {in_scales, out_scales, 0}, on);
  });
}

moecclResult_t moecclCombine(moecclRouting_t routing, const void* in, void* out, moecclStream_t stream) {
  return api::collective_on<RoutingTable>(
      routing, stream, [&](comm::MoeRouting& r, Communicator&, comm::Stream* on) { return r.combine(in, out, on); });
}

moecclResult_t moecclDispatchBackward(moecclRouting_t routing, const void* grad_out, void* grad_in,
                                      moecclStream_t stream) {
  return api::collective_on<RoutingTable>(routing, stream, [&](comm::MoeRouting& r, Communicator&, comm::Stream* on) {
    return r.dispatch_backward(grad_out, grad_in, on);
  });
}

moecclResult_t moecclCombineBackward(moecclRouting_t routing, const void* grad_out, void* grad_in, const void* in,
                                     float* grad_weight, moecclStream_t stream) {
  return api::collective_on<RoutingTable>(
      routing, stream, [&](comm::MoeRouting& r, Communicator& comm, comm::Stream* on) {
        const auto n = [&] { return n_weights(r); };
        return api::combine_backward(r, comm, {grad_out, grad_in, in, grad_weight}, n, on);
      });
}

moecclResult_t moecclMoeExplain(moecclRouting_t routing, char* text, size_t text_bytes, size_t* needed) {
  return api::with<RoutingTable, api::kLocal>(routing, [&](comm::MoeRouting& r, Communicator&) -> Status {
    return api::give_text(r.explain(), text, text_bytes, needed);
  });
}
