// SPDX-License-Identifier: Apache-2.0
// What an ncclEpHandle_t stands for: the choices of one step, and their routings on MoECCL layers.
//
// Two routings of the same choices are in use. `pairs` is in the Rows layout, with one row of 2 * k words for each
// token and rank that it goes to: it counts rows, carries choices and weights to the experts' ranks, and gradients of
// the weights back, all in host memory. The other, whose rows are the program's, moves those, in the layout that the
// handle asks for. Their rows are in the same order.
#pragma once

#include <functional>

#include "shim/nccl_ep/group.h"

namespace moeccl::shim::ep {

// The choices of one step. Handles on the same memory of the program share them.
struct Routed {
  ~Routed();
  uint64_t version = 0;  // 0: there were no choices yet
  bool agreed = false;   // high throughput: the last update has succeeded, on all ranks
  int top_k = 0;
  size_t n_tokens = 0;
  std::vector<int32_t> index;  // [tokens][k] as MoECCL takes them: a token names an expert once
  std::vector<uint8_t> first;  // [tokens][k] the column whose choice stands for this one
  struct Made {
    moecclRouting_t routing = nullptr;
    uint64_t version = 0;
    bool weighted = false;
  };
  std::map<Shape, Made> made;
  uint64_t pairs_version = 0;     // of `received`
  std::vector<int32_t> received;  // [rows of pairs][k] the global experts that each row's token chose
};

struct Handle {
  Handle(GroupPtr group, ncclEpLayout_t layout, int top_k, int align)
      : group(std::move(group)),
        layout(layout),
        top_k(top_k),
        align(align),
        rows(this->group->config.alloc),
        scales(this->group->config.alloc),
        refusal(this->group->config.alloc) {
    routed->top_k = top_k;
  }
  // Takes over choices of [tokens][k] that a tensor holds. Local.
  ncclResult_t choose(const Tensor& topk_idx, const Place& at);
  // Gets the routing of this step's choices for such rows, with these weights [tokens][k] if they are not null. It is
  // collective when the choices or the weights are new to this shape.
  ncclResult_t routing(const Shape& shape, const float* weights, moecclRouting_t* routing);
  ncclResult_t info(moecclRouting_t routing, moecclRoutingInfo_t* info) const;
  // Gets the routing `pairs` of this step's choices; collective when they are new.
  ncclResult_t by_pairs(moecclRouting_t* routing, moecclRoutingInfo_t* about);
  Shape pairs() const;
  Shape shape(size_t row_bytes, moecclDataType_t type, size_t scale_bytes) const;
  // Sets the counts below. Collective if the choices are new.
  ncclResult_t count();
  // Takes this rank's part in the other ranks' count(), which fails there and names this rank.
  void refuse_count();
  // Sends the choices, and the weights if there are any, to the experts' ranks: received[rows][k] is set, and
  // got[rows][k] if weights are given. Collective.
  ncclResult_t exchange(const float* weights, std::vector<float>* got);
  // What ranks begin a dispatch or combine with: an exchange in host memory, or the rows'.
  enum class Opening { kHost, kRows };
  // Ends this rank's part of such a call, which it has refused with `why`, and returns that. This rank calls an
  // all-reduce instead, so ranks that all refuse go on, and others fail at once because the ranks' calls differ.
  ncclResult_t refuse(const char* function, ncclResult_t why, Opening opening, cudaStream_t stream);
  // Returns whether rows that need no scales can move without an exchange before.
  bool rows_are_routed() const;

  GroupPtr group;
  ncclEpLayout_t layout;
  int top_k, align;
  std::shared_ptr<Routed> routed = std::make_shared<Routed>();
  // High throughput: the rows that the choices bring.
  uint64_t counted = 0;                  // the version of the choices that these belong to
  size_t n_rows = 0;                     // padding included
  std::vector<int64_t> counts, offsets;  // [local experts] rows, in expert-major order padded; first rows, only there
  Tensor topk_idx;                       // low latency: read at each dispatch
  // Low latency: rows [dense, dense + n) of the routing lie at rows [slot, slot + n) of the program's tensors.
  struct Run {
    size_t dense, slot, n;
  };
  std::vector<Run> runs;
  size_t n_dense = 0;
  uint64_t dispatched = 0;                         // the version of the choices that `runs` belong to
  Scratch rows, scales;                            // in between, where a routing's rows are not the program's
  bool rows_on_device = false;                     // the last dispatch's
  Scratch refusal;                                 // the bytes of refuse()
  std::function<ncclResult_t(cudaStream_t)> rest;  // what ncclEpComplete has to do
};

ncclResult_t make_handle(const char* function, ncclEpHandle_t* out, const GroupPtr& group, ncclEpLayout_t layout,
                         const ncclEpHandleConfig_t* config, int top_k, const ncclEpTensor_t* memory);
ncclResult_t memory_size(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config, size_t* size,
                         int top_k);
ncclResult_t free_handle(ncclEpHandle_t handle);
// Begins a call on a handle.
ncclResult_t handle_of(const char* function, ncclEpHandle_t handle, Handle** out, InUse* in_use);
Handle& handle_in(ncclEpHandle_t handle);
ncclResult_t update_handle(const char* function, Handle& h, const ncclEpTensor_t* topk_idx,
                           const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream);

// The two modes' operations, with structs that are already taken over.
struct DispatchCall {
  ncclEpDispatchInputs_t inputs;
  ncclEpDispatchOutputs_t outputs;
  ncclEpLayoutInfo_t layout_info;
  ncclEpDispatchConfig_t config;
  cudaStream_t stream;
};
struct CombineCall {
  ncclEpCombineInputs_t inputs;
  ncclEpCombineOutputs_t outputs;
  ncclEpCombineConfig_t config;
  cudaStream_t stream;
};
ncclResult_t dispatch_throughput(Handle& h, const DispatchCall& call);
ncclResult_t combine_throughput(Handle& h, const CombineCall& call);
ncclResult_t dispatch_latency(Handle& h, const DispatchCall& call);
ncclResult_t combine_latency(Handle& h, const CombineCall& call);
Handle::Opening opening_of_dispatch(const Handle& h, ncclEpPassDir_t direction);
Handle::Opening opening_of_combine(const Handle& h, ncclEpPassDir_t direction);

// The rows of a dispatch, after the checks of its recipe.
struct Rows {
  Tensor in, in_scales, out, out_scales;
  size_t row_bytes = 0, scale_bytes = 0;
  moecclDataType_t type = moecclUint8;  // of sums; bytes for rows with scales
};
ncclResult_t read_rows(const Tensors& tensors, const Handle& h, const DispatchCall& call, Rows* rows);
// Moves rows: dispatches to the program's tensors or to the handle's own.
ncclResult_t move_rows(moecclRouting_t routing, const Rows& rows, void* out, void* out_scales, const Place& at);
// The rows of a combine.
struct Sums {
  Tensor in, out;
  size_t row_bytes = 0;
  moecclDataType_t type = moecclUint8;
};
ncclResult_t read_sums(const Tensors& tensors, const Handle& h, const CombineCall& call, Sums* sums);

}  // namespace moeccl::shim::ep
