// SPDX-License-Identifier: Apache-2.0
// From a C call of moecclTensorAllToAllv to a prepared operation.
#pragma once

#include "src/comm/communicator.h"

namespace moeccl::comm {

struct TensorBlocksCall {
  const void* send = nullptr;
  void* recv = nullptr;
  const size_t* counts = nullptr;  // [e][e]
  moecclDataType_t type = moecclInt8;
};

// Fills `op`, which must outlive its run and owns the plan that was built.
Status prepare_tensor_blocks(Communicator& comm, const TensorBlocksCall& call, exec::Operation& op);

}  // namespace moeccl::comm
