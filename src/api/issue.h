// From a prepared operation to its run: at once, on a stream, or with its group.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "src/api/convert.h"
#include "src/comm/group.h"

namespace moeccl::api {

// `prepare(operation)` checks the call and fills it. maker: of the handle, besides the communicator's, that the
// operation was made with; null: it needs none.
template <class Prepare>
Status issue(comm::Communicator& comm, moecclStream_t stream_handle, comm::GroupHolds* maker, Prepare&& prepare) {
  comm::Call made;
  made.comm = &comm;
  made.maker = maker;
  made.operation = std::make_unique<exec::Operation>();
  MOECCL_TRY(find_stream(stream_handle, &made.stream));
  MOECCL_TRY(prepare(*made.operation));
  comm::Group& group = comm::Group::of_this_thread();
  if (group.open()) {
    group.add(std::move(made));
    return {};
  }
  if (made.stream == nullptr) return comm.run_in_turn(comm.take_ticket(), *made.operation);
  std::vector<comm::Call> calls;
  calls.push_back(std::move(made));
  return comm::issue(std::move(calls));
}

// This rank's own work on CUDA memory: at once, or in the stream's order.
inline Status issue_on_device(comm::Communicator& comm, moecclStream_t stream_handle,
                              std::function<void(const kernels::KernelTable&)> body) {
  comm::Stream* stream = nullptr;
  MOECCL_TRY(find_stream(stream_handle, &stream));
  if (stream == nullptr) return comm.run_on_device(comm.take_ticket(), body);
  MOECCL_TRY(stream->ready());
  return comm::enqueue_in_turn(
      comm, *stream, [&comm, body = std::move(body)](uint64_t ticket) { return comm.run_on_device(ticket, body); });
}

}  // namespace moeccl::api
