// SPDX-License-Identifier: Apache-2.0
// From a prepared operation to its execution: at once, on a stream, or with its group.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "src/api/convert.h"
#include "src/comm/collective.h"
#include "src/comm/group.h"

namespace moeccl::api {

// `prepare(operation)` checks the call and fills the operation. `maker` belongs to the second handle of the call, such
// as a layer; null if the call has only a communicator.
template <class Prepare>
Status issue(comm::Communicator& comm, moecclStream_t stream_handle, comm::GroupHolds* maker, Prepare&& prepare) {
  comm::Call call{.comm = &comm, .operation = std::make_unique<exec::Operation>(), .maker = maker};
  MOECCL_ASSIGN_OR_RETURN(call.stream, find_stream(stream_handle, &comm));
  MOECCL_TRY(comm::or_break_off(comm, call.stream, prepare(*call.operation)));
  return comm::issue(std::move(call));
}

// Runs this rank's own work on CUDA memory, at once or in the stream's order.
inline Status issue_on_device(comm::Communicator& comm, moecclStream_t stream_handle,
                              std::function<void(const kernels::KernelTable&)> body) {
  MOECCL_ASSIGN_OR_RETURN(comm::Stream* const stream, find_stream(stream_handle, &comm));
  if (stream == nullptr) return comm.run_on_device(comm.take_ticket(), body);
  MOECCL_TRY(stream->ready());
  return comm::enqueue_in_turn(
      comm, *stream, [&comm, body = std::move(body)](uint64_t ticket) { return comm.run_on_device(ticket, body); });
}

}  // namespace moeccl::api
