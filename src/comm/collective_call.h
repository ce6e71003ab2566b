// SPDX-License-Identifier: Apache-2.0
// A collective as a C caller requests it, and the part of a call that is kept for its repetition.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "src/exec/operation.h"

namespace moeccl::comm {

struct CollectiveCall {
  moecclOp_t op = moecclOpAllReduce;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  moecclDataType_t type = moecclInt8;
  moecclRedOp_t reduce = moecclSum;
  int root = 0;
  // Only for AllToAllv.
  const size_t *send_counts = nullptr, *send_displs = nullptr, *recv_counts = nullptr, *recv_displs = nullptr;
};

// Programs repeat the same calls. A small operation takes 0.13 us between two near cores, and preparing it again would
// cost a quarter of that (docs/decisions.md), so its preparation is kept.
struct PreparedCall {
  // Returns true if `c` is this call except for its buffers and an AllToAllv's sizes, under the same plans.
  bool is(const CollectiveCall& c, uint64_t plans_now) const {
    return plans == plans_now && call.op == c.op && call.type == c.type && call.count == c.count &&
           call.reduce == c.reduce && call.root == c.root;
  }

  uint64_t plans = 0;  // the Selector::version() under which it was prepared; 0: it was not
  CollectiveCall call;
  uint64_t in_bytes = 0, out_bytes = 0;  // of the buffers that this rank uses; unused by AllToAllv
  bool tried = false;                    // one of several plans under trial ran
  exec::Operation operation;
};

// The last calls of a communicator, indexed by what makes them alike. Used by the thread whose turn it is.
class PreparedCalls {
 public:
  PreparedCall& of(const CollectiveCall& c) {
    const uint64_t mixed = (c.count * 16 + static_cast<uint64_t>(c.op)) * 0x9e3779b97f4a7c15u;
    return calls_[mixed >> 61];
  }

 private:
  std::array<PreparedCall, 8> calls_;
};

}  // namespace moeccl::comm
