// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl_ep/group.h"

#include <array>

// The program's handle.
struct ncclEpGroup {
  moeccl::shim::ep::GroupPtr group;
};

namespace moeccl::shim::ep {
namespace {

constexpr const char* kMake = "ncclEpCreateGroup";

ncclResult_t refuse(const std::string& why) {
  return fail(ncclInvalidArgument, std::string(kMake) + ": config->" + why);
}

ncclResult_t check_config(const ncclEpGroupConfig_t& c, int n_ranks) {
  const auto n = static_cast<unsigned>(n_ranks);
  if (c.algorithm != NCCL_EP_ALGO_LOW_LATENCY && c.algorithm != NCCL_EP_ALGO_HIGH_THROUGHPUT)
    return refuse("algorithm is " + std::to_string(c.algorithm) +
                  ": give NCCL_EP_ALGO_LOW_LATENCY or NCCL_EP_ALGO_HIGH_THROUGHPUT");
  const bool high = c.algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
  if (c.num_experts == 0 || c.num_experts % n != 0)
    return refuse("num_experts is " + std::to_string(c.num_experts) + ": give a multiple of the " + std::to_string(n) +
                  " ranks");
  if (c.max_dispatch_tokens_per_rank == 0)
    return refuse("max_dispatch_tokens_per_rank is 0: give the most tokens that any rank brings");
  if (c.max_token_bytes == 0 || (high && c.max_token_bytes % 16 != 0))
    return refuse("max_token_bytes is " + std::to_string(c.max_token_bytes) + ": give the most bytes of a row" +
                  (high ? ", a multiple of 16" : ""));
  if (high && c.max_recv_tokens_per_rank != NCCL_EP_AUTO && c.max_recv_tokens_per_rank < c.max_dispatch_tokens_per_rank)
    return refuse("max_recv_tokens_per_rank is " + std::to_string(c.max_recv_tokens_per_rank) +
                  ": give at least max_dispatch_tokens_per_rank, or NCCL_EP_AUTO");
  if (c.overflow_policy < NCCL_EP_OVERFLOW_AUTO || c.overflow_policy > NCCL_EP_OVERFLOW_DROP)
    return refuse("overflow_policy is " + std::to_string(c.overflow_policy) + ": give an ncclEpOverflowPolicy_t");
  if (high && c.overflow_policy == NCCL_EP_OVERFLOW_DROP && c.max_recv_tokens_per_rank == NCCL_EP_AUTO)
    return refuse("overflow_policy is NCCL_EP_OVERFLOW_DROP without max_recv_tokens_per_rank: set both");
  if ((c.alloc.alloc_fn == nullptr) != (c.alloc.free_fn == nullptr))
    return fail(ncclInvalidUsage, std::string(kMake) + ": config->alloc has one function of two: set both or none");
  return ncclSuccess;
}

// All ranks see the same difference, or that a rank refuses its own config, and fail together.
ncclResult_t agree(const Group& g, ncclResult_t own) {
  const ncclEpGroupConfig_t& c = g.config;
  constexpr std::array kNames = {
      "algorithm",       "num_experts", "max_dispatch_tokens_per_rank", "max_recv_tokens_per_rank",
      "overflow_policy", "enable_mask"};
  using Fields = std::array<uint32_t, kNames.size() + 1>;
  const Fields mine = {static_cast<uint32_t>(c.algorithm),
                       c.num_experts,
                       c.max_dispatch_tokens_per_rank,
                       c.max_recv_tokens_per_rank,
                       static_cast<uint32_t>(c.overflow_policy),
                       c.enable_mask,
                       static_cast<uint32_t>(own)};
  std::vector<Fields> all(static_cast<size_t>(g.n_ranks()));
  MOECCL_EP_TRY(
      from_moeccl(moecclAllGather(mine.data(), all.data(), mine.size(), moecclUint32, g.member.comm, nullptr)));
  if (own != ncclSuccess) return own;
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r].back() != ncclSuccess)
      return fail(ncclInvalidArgument, std::string(kMake) + ": rank " + std::to_string(r) +
                                           " refuses its config: ncclGetLastError there says why");
  for (size_t r = 1; r < all.size(); ++r)
    for (size_t i = 0; i < kNames.size(); ++i)
      if (all[r][i] != all[0][i])
        return refuse(std::string(kNames[i]) + " is " + std::to_string(all[0][i]) + " on rank 0 and " +
                      std::to_string(all[r][i]) + " on rank " + std::to_string(r) + ": give the same on all ranks");
  return ncclSuccess;
}

}  // namespace

bool Group::lost_a_rank() const {
  moecclResult_t state = moecclSuccess;
  return moecclCommGetAsyncError(member.comm, &state) == moecclSuccess &&
         (state == moecclRemoteError || state == moecclTimeout);
}

ncclResult_t InUse::begin(const char* function, const Group& group) {
  if (!device_.emplace(group.member.device).ok())
    return fail(ncclUnhandledCudaError, std::string(function) + ": CUDA device " + std::to_string(group.member.device) +
                                            ", the communicator's, cannot be made current");
  return hooks()->enter(function, group.comm, &held_);
}

Group::~Group() {
  kept.clear();
  for (const auto& [shape, layer] : layers) (void)moecclMoeDestroy(layer);
}

ncclResult_t Group::layer(const Shape& shape, moecclMoe_t* out) {
  if (const auto found = layers.find(shape); found != layers.end()) {
    *out = found->second;
    return ncclSuccess;
  }
  moecclMoeConfig_t c = MOECCL_MOE_CONFIG_INIT;
  c.hidden_bytes = shape.row_bytes;
  c.type = shape.type;
  c.top_k = shape.top_k;
  c.n_experts = static_cast<int32_t>(config.num_experts);
  c.max_tokens = config.max_dispatch_tokens_per_rank;
  c.layout = shape.layout;
  c.align_rows = shape.align;
  c.scale_bytes = shape.scale_bytes;
  MOECCL_EP_TRY(from_moeccl(moecclMoeCreate(out, member.comm, &c)));
  layers.emplace(shape, *out);
  return ncclSuccess;
}

ncclResult_t make_group(ncclEpGroup_t* out, ncclComm_t comm, const ncclEpGroupConfig_t* config) {
  if (out == nullptr) return fail(ncclInvalidArgument, std::string(kMake) + ": ep_group is NULL: give an address");
  *out = nullptr;
  std::string why;
  if (hooks(&why) == nullptr)
    return fail(ncclInvalidUsage,
                std::string(kMake) + ": the communicator is not of MoECCL's NCCL shim (" + why +
                    "): put libmoeccl-nccl.so into LD_PRELOAD, or the folder of its libnccl.so.2 into "
                    "LD_LIBRARY_PATH; or run with NVIDIA's libnccl_ep.so.0");
  auto made = std::make_shared<Group>();
  MOECCL_EP_TRY(hooks()->member(kMake, comm, &made->member));
  made->comm = comm;
  InUse in_use;
  MOECCL_EP_TRY(in_use.begin(kMake, *made));
  ncclResult_t own = take(kMake, "config", config, NCCL_EP_GROUP_CONFIG_V1_SIZE, false, &made->config);
  if (own == ncclSuccess) own = check_config(made->config, made->n_ranks());
  if (made->low_latency()) made->config.max_recv_tokens_per_rank = NCCL_EP_AUTO;  // no limit there
  MOECCL_EP_TRY(agree(*made, own));
  made->active.assign(static_cast<size_t>(made->n_ranks()), 1);
  *out = new ncclEpGroup{std::move(made)};
  return ncclSuccess;
}

ncclResult_t free_group(ncclEpGroup_t group) {
  if (group == nullptr) return ncclSuccess;
  InUse in_use;
  (void)in_use.begin("ncclEpGroupDestroy", *group->group);  // the communicator may have ended before
  delete group;
  return ncclSuccess;
}

ncclResult_t group_of(const char* function, ncclEpGroup_t handle, GroupPtr* group) {
  if (handle == nullptr)
    return fail(ncclInvalidArgument, std::string(function) + ": ep_group is NULL: give one of ncclEpCreateGroup");
  *group = handle->group;
  return ncclSuccess;
}

}  // namespace moeccl::shim::ep
