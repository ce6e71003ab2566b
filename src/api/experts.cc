// SPDX-License-Identifier: Apache-2.0
// Entry points of experts.h.
#include "moeccl/experts.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "src/api/issue.h"
#include "src/comm/collective.h"
#include "src/moe/experts/expert_calls.h"
#include "src/moe/experts/replica_choice.h"

using namespace moeccl;
using comm::Communicator;
using comm::ExpertCall;

namespace {

moecclResult_t run(const ExpertCall& call, moecclComm_t comm_handle, moecclStream_t stream) {
  return api::collective(comm_handle, [&](Communicator& comm) {
    return api::issue(comm, stream, nullptr,
                      [&](exec::Operation& op) { return comm::prepare_expert_call(comm, call, op); });
  });
}

Status count_choices(const int32_t* topk_index, size_t n_choices, int n_experts, int64_t* counts) {
  if (topk_index == nullptr && n_choices > 0) return api::null_argument("topk_index", "expert numbers");
  for (size_t i = 0; i < n_choices; ++i)
    if (topk_index[i] < -1 || topk_index[i] >= n_experts)
      return error(moecclInvalidArgument, "topk_index[{}] is {}: give an expert from 0 to {}, or -1 for none", i,
                   topk_index[i], n_experts - 1);
  for (int e = 0; e < n_experts; ++e) counts[e] = 0;
  for (size_t i = 0; i < n_choices; ++i)
    if (topk_index[i] >= 0) ++counts[topk_index[i]];
  return {};
}

// Copies the counts of this rank into CUDA memory, in the stream's order.
Status put_counts(Communicator& comm, std::vector<int64_t> own, int64_t* counts, moecclStream_t stream) {
  return api::issue_on_device(comm, stream, [&comm, own = std::move(own), counts](const kernels::KernelTable& table) {
    constexpr size_t kPiece = 64 << 10;  // elements of the engine's ring
    for (size_t first = 0; first < own.size(); first += kPiece) {
      const size_t bytes = std::min(kPiece, own.size() - first) * sizeof(int64_t);
      table.copy(counts + first, comm.cuda()->engine().upload(own.data() + first, bytes), bytes);
    }
  });
}

}  // namespace

moecclResult_t moecclExpertAllReduce(const void* send, void* recv, size_t count, moecclDataType_t type,
                                     moecclRedOp_t op, const moecclPlacement_t* placement, moecclComm_t comm,
                                     moecclStream_t stream) {
  return run({moecclOpExpertAllReduce, send, recv, count, type, op, placement}, comm, stream);
}

moecclResult_t moecclCollectGradients(const void* slots, void* shards, size_t count, moecclDataType_t type,
                                      const moecclPlacement_t* placement, moecclComm_t comm, moecclStream_t stream) {
  return run({moecclOpCollectGradients, slots, shards, count, type, moecclSum, placement}, comm, stream);
}

moecclResult_t moecclPlaceWeights(const void* shards, void* slots, size_t count, moecclDataType_t type,
                                  const moecclPlacement_t* placement, moecclComm_t comm, moecclStream_t stream) {
  return run({moecclOpPlaceWeights, shards, slots, count, type, moecclSum, placement}, comm, stream);
}

moecclResult_t moecclReduceGradients(const void* slots, void* shards, size_t count, moecclDataType_t type,
                                     moecclRedOp_t op, const moecclPlacement_t* placement, moecclComm_t comm,
                                     moecclStream_t stream) {
  return run({moecclOpReduceGradients, slots, shards, count, type, op, placement}, comm, stream);
}

moecclResult_t moecclExpertLayers(moecclOp_t what, const moecclExpertLayer_t* layers, size_t n_layers, size_t count,
                                  moecclDataType_t type, moecclRedOp_t op, moecclComm_t comm_handle,
                                  moecclStream_t stream) {
  const ExpertCall call{what, nullptr, nullptr, count, type, what == moecclOpReduceGradients ? op : moecclSum};
  return api::collective(comm_handle, [&](Communicator& comm) {
    return api::issue(comm, stream, nullptr, [&](exec::Operation& operation) {
      return comm::prepare_expert_layers(comm, call, {layers, n_layers}, operation);
    });
  });
}

size_t moecclExpertShard(size_t count, int n_ranks) {
  return n_ranks < 1 ? 0 : algo::shard_elements(count, static_cast<uint32_t>(n_ranks));
}

moecclResult_t moecclGradientSource(const moecclPlacement_t* placement, int n_ranks, int expert, int rank,
                                    int* source) {
  return api::guarded(nullptr, [&]() -> Status {
    if (source == nullptr) return api::null_argument("source", "the address of an int");
    if (n_ranks < 1 || n_ranks > 65535)
      return error(moecclInvalidArgument, "n_ranks is {}: a communicator has between 1 and 65535 ranks", n_ranks);
    MOECCL_ASSIGN_OR_RETURN(const algo::ReplicaPlacement p,
                            comm::read_placement(placement, static_cast<uint32_t>(n_ranks)));
    if (expert < 0 || static_cast<uint32_t>(expert) >= p.n_experts)
      return error(moecclInvalidArgument, "expert is {}: give 0 to {}", expert, p.n_experts - 1);
    if (rank < 0 || rank >= n_ranks)
      return error(moecclInvalidArgument, "rank is {}: give a rank from 0 to {}", rank, n_ranks - 1);
    if (p.hosts[static_cast<size_t>(expert)].empty())
      return error(moecclInvalidArgument, "expert {} has no slot in the placement", expert);
    *source = static_cast<int>(gradient_source(p, static_cast<uint32_t>(expert), static_cast<uint32_t>(rank)));
    return {};
  });
}

moecclResult_t moecclExpertPopularity(const int32_t* topk_index, size_t n_choices, int n_experts, int64_t* counts,
                                      moecclComm_t comm, moecclStream_t stream) {
  return api::collective(comm, [&](Communicator& c) -> Status {
    MOECCL_TRY(c.check_reach({topk_index, counts}));
    MOECCL_TRY(comm::check_expert_number(n_experts));
    if (!comm::fits_in_memory(n_choices, sizeof(int32_t), 1))
      return error(moecclInvalidArgument, "n_choices is {}: give a number that fits in memory", n_choices);
    std::vector<int32_t> choices;
    if (topk_index != nullptr && c.is_device_memory(topk_index)) {
      MOECCL_ASSIGN_OR_RETURN(comm::Stream* const order, api::find_stream(stream, &c));
      if (order != nullptr) MOECCL_TRY(order->ready());
      choices.resize(n_choices);
      MOECCL_TRY(c.copy_across(choices.data(), topk_index, n_choices * sizeof(int32_t), order));
      topk_index = choices.data();
    }
    if (counts == nullptr) return api::null_argument("counts", "an array of n_experts counts");
    // Earlier work on the stream may still use `counts`, so this rank's counts lie elsewhere until the sum is formed.
    auto own = std::make_shared<std::vector<int64_t>>(static_cast<size_t>(n_experts));
    MOECCL_TRY(count_choices(topk_index, n_choices, n_experts, own->data()));
    comm::CollectiveCall sum{.op = moecclOpAllReduce,
                             .send = own->data(),
                             .recv = counts,
                             .count = static_cast<size_t>(n_experts),
                             .type = moecclInt64};
    if (c.is_device_memory(counts)) {
      MOECCL_TRY(put_counts(c, std::move(*own), counts, stream));
      sum.send = counts;
    }
    return api::issue(c, stream, nullptr, [&](exec::Operation& op) {
      MOECCL_TRY(comm::prepare_collective(c, sum, op));
      op.own_input = std::move(own);
      return Status();
    });
  });
}

moecclResult_t moecclChooseReplicas(const moecclReplicaDispatch_t* dispatch, const int32_t* topk_index, size_t n_tokens,
                                    int32_t* slot_index, int64_t* popularity, int64_t* dropped, moecclComm_t comm) {
  return api::collective(comm, [&](Communicator& c) -> Status {
    MOECCL_TRY(api::outside_groups("moecclChooseReplicas"));
    return comm::choose_replicas(c, dispatch, {topk_index, n_tokens, slot_index, popularity, dropped});
  });
}

moecclResult_t moecclExpertExplain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                   const moecclPlacement_t* placement, char* text, size_t text_bytes, size_t* needed) {
  return api::with_comm<api::kLocal>(comm, [&](Communicator& c) -> Status {
    ExpertCall call;
    call.op = op;
    call.count = count;
    call.type = type;
    call.placement = placement;
    return api::give_text(comm::explain_expert_call(c, call), text, text_bytes, needed);
  });
}
