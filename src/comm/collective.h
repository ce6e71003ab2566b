// From a C call's arguments to a prepared operation: checks first, with sentences that name argument, value and remedy.
#pragma once

#include "src/comm/communicator.h"

namespace moeccl::comm {

struct CollectiveCall {
  moecclOp_t op = moecclOpAllReduce;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;
  moecclDataType_t type = moecclInt8;
  moecclRedOp_t reduce = moecclSum;
  int root = 0;
  // AllToAllv
  const size_t *send_counts = nullptr, *send_displs = nullptr, *recv_counts = nullptr, *recv_displs = nullptr;
};

// Fills `op`, which must outlive its run.
Status prepare_collective(Communicator& comm, const CollectiveCall& call, exec::Operation& op);
// Blocks; outside of groups.
Status run_collective(Communicator& comm, const CollectiveCall& call);
// Checks a Send or Recv and fills `message`.
Status prepare_message(Communicator& comm, const void* data, size_t count, moecclDataType_t type, int peer,
                       bool is_send, exec::Message& message);
Status create_premul(Communicator& comm, const void* scalar, moecclDataType_t type, moecclRedOp_t* op);
Status destroy_premul(Communicator& comm, moecclRedOp_t op);

}  // namespace moeccl::comm
