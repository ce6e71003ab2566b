// What every C entry point does: find the handle, call, map Status to a code, keep the sentence.
#pragma once

#include <cstring>
#include <string>

#include "moeccl/moeccl.h"
#include "src/api/handles.h"
#include "src/comm/communicator.h"
#include "src/comm/stream.h"

namespace moeccl::api {

using CommTable = HandleTable<comm::Communicator, moecclComm_t, 0xC1>;
using StreamTable = HandleTable<comm::HostStream, moecclStream_t, 0xC2>;

// The sentence of this thread's last failure.
const char* thread_error() noexcept;

// Maps a status; keeps its sentence for the thread and, when given, the communicator.
moecclResult_t finish(const Status& status, comm::Communicator* comm = nullptr) noexcept;

// Runs `body` (returning Status) so that nothing is thrown through the C interface. A call that throws ends its
// communicator: peers may wait for what this rank could not do.
template <class Body>
moecclResult_t guarded(comm::Communicator* comm, Body&& body) {
  const Status status = comm != nullptr ? comm->shielded(body) : contained(body);
  return finish(status, comm);
}

Status find_comm(moecclComm_t handle, comm::Communicator** comm);
// Calls `body` with the communicator, or reports the bad handle. whose: of an object that was made with it, such as
// "the layer's"; null: the caller gave the handle.
template <class Body>
moecclResult_t with_comm(moecclComm_t handle, Body&& body, const char* whose = nullptr) {
  comm::Communicator* comm = nullptr;
  if (Status s = find_comm(handle, &comm); !s.ok())
    return finish(whose == nullptr ? std::move(s) : std::move(s).with_context(format("{} communicator", whose)));
  return guarded(comm, [&]() -> Status { return body(*comm); });
}
// NULL is the blocking stream: *stream null.
Status find_stream(moecclStream_t handle, comm::Stream** stream);
// An enumeration's number, whatever a C caller put there: in C++ even the load of a value outside the enumeration is
// undefined.
template <class Enum>
int number_of(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int));
  int number;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}
Status null_argument(const char* name, const char* wanted);
// Copies a page for a person as snprintf does.
void copy_text(const std::string& text, char* out, size_t out_bytes, size_t* needed);

}  // namespace moeccl::api
