// SPDX-License-Identifier: Apache-2.0
// What an ncclEpGroup_t stands for: a communicator, the group's config, and the MoECCL layers of its handles.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "shim/nccl_ep/memory.h"

namespace moeccl::shim::ep {

// The rows of one MoECCL layer. Layers of equal shapes are one.
struct Shape {
  moecclMoeLayout_t layout = moecclLayoutRows;
  int top_k = 1;
  size_t row_bytes = 0;
  moecclDataType_t type = moecclUint8;
  size_t scale_bytes = 0;
  int align = 1;  // rows; expert-major layout
  auto key() const { return std::make_tuple(layout, top_k, row_bytes, type, scale_bytes, align); }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

struct Routed;

struct Group {
  ~Group();
  bool low_latency() const { return config.algorithm == NCCL_EP_ALGO_LOW_LATENCY; }
  int n_ranks() const { return member.n_ranks; }
  int n_local() const { return static_cast<int>(config.num_experts) / member.n_ranks; }
  int first_expert() const { return n_local() * member.rank; }
  // The most rows that a rank keeps; in eager mode there is no such number.
  bool eager() const { return config.max_recv_tokens_per_rank == NCCL_EP_AUTO; }
  bool drops() const { return !eager() && config.overflow_policy == NCCL_EP_OVERFLOW_DROP; }
  size_t most_rows() const { return eager() ? SIZE_MAX : config.max_recv_tokens_per_rank; }
  // Whether a rank has failed or did not come in time, which the communicator never forgets.
  bool lost_a_rank() const;
  // Gets the layer of a shape; the first call is collective.
  ncclResult_t layer(const Shape& shape, moecclMoe_t* layer);

  ncclComm_t comm = nullptr;
  moecclNcclMember member{};
  ncclEpGroupConfig_t config{};
  std::map<Shape, moecclMoe_t> layers;
  std::vector<int> active;       // [ranks] 0: masked
  bool loss_is_cleared = false;  // by ncclEpErrorClear
  // The choices of handles on the program's own memory, by its address: a handle on the same memory goes on with them.
  // Nothing tells that the program has freed that memory, so of choices without a handle the latest are kept.
  static constexpr size_t kMostKept = 4096;
  struct Kept {
    std::shared_ptr<Routed> routed;
    uint64_t last_handle = 0;
  };
  std::map<const void*, Kept> kept;
  uint64_t n_handles = 0;  // that were made on the program's memory
};
using GroupPtr = std::shared_ptr<Group>;

// A call's use of a group's communicator, which is not freed before the call ends, and of its device, which is current
// for the thread meanwhile.
class InUse {
 public:
  InUse() = default;
  ~InUse() {
    if (held_ != nullptr) hooks()->leave(held_);
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
  // Returns an error for a communicator that has ended or is suspended.
  ncclResult_t begin(const char* function, const Group& group);

 private:
  std::optional<device::Current> device_;
  void* held_ = nullptr;
};

ncclResult_t make_group(ncclEpGroup_t* out, ncclComm_t comm, const ncclEpGroupConfig_t* config);
ncclResult_t free_group(ncclEpGroup_t group);
// Returns InvalidArgument for NULL.
ncclResult_t group_of(const char* function, ncclEpGroup_t handle, GroupPtr* group);

}  // namespace moeccl::shim::ep
