// SPDX-License-Identifier: Apache-2.0
// What host and device share of the persistent kernel for operations whose sizes differ between ranks and steps:
// dispatch, combine and their backward passes, whose row lists are in device memory with their routing, and AllToAllv,
// whose sizes are in the launch.
#pragma once

#include "kernels/cuda/walk_args.h"

namespace moeccl::cuda {

// plan::RowBlock and plan::SumBlock: one list for one chunk. Addresses are the device's.
struct WalkRowBlock {
  const uint32_t *src_index, *dst_index;
  const float* weights;
  uint64_t src_first, dst_first, count;
};
struct WalkSumBlock {
  const uint64_t* offsets;  // [count + 1] into terms and weights
  const RowTermBits* terms;
  const float* weights;
  const uint32_t* dst_index;
  uint64_t dst_first, count;
};

// A routing's tables. They keep their address when the routing is updated, so that a launch that a graph replays finds
// those of the last update. List l for chunk c is at l * n_chunks + c.
struct WalkTables {
  uint32_t ready;  // 0: the last update failed
  uint32_t n_chunks;
  const WalkRowBlock* rows;   // of dispatch
  const WalkSumBlock* zeros;  // [n_chunks] of dispatch: zero the padding
  const WalkSumBlock* sums;   // of combine
  uint32_t fault;             // why an update on the device failed (TableFault); 0: the update was by the host
  uint32_t fault_rank, fault_value;
};

struct WalkRowsArgs {
  WalkArgs walk;  // elements are rows, with their scales if they have any
  const WalkTables* tables;
  uint32_t dispatch;         // its sums are `zeros`
  uint32_t weighted;         // apply the lists' weights
  uint32_t grouped;          // sums use the nested groups of deterministic mode
  uint32_t type;             // number of the element type
  uint32_t row_elements;     // of the type, without scales
  uint32_t scale_bytes;      // of a row; 0: no scales
  const void* input_scales;  // in addition to walk.input and walk.output
  void* output_scales;
};

struct WalkSplitsArgs {
  WalkArgs walk;
  uint64_t largest;  // of all counts below
  // [n_ranks], in elements.
  uint64_t send_counts[kMaxSources], send_displs[kMaxSources], recv_counts[kMaxSources], recv_displs[kMaxSources];
};

}  // namespace moeccl::cuda
