// SPDX-License-Identifier: Apache-2.0
// The steps that every C entry point shares: find the handle, make the call, map its Status to a code, keep the
// message.
#pragma once

#include <memory>
#include <string>

#include "moeccl/moeccl.h"
#include "src/api/handles.h"
#include "src/base/uncancelled.h"
#include "src/comm/communicator.h"
#include "src/comm/group.h"
#include "src/comm/stream.h"

namespace moeccl::api {

using CommTable = HandleTable<comm::Communicator, moecclComm_t, 0xC1>;
using StreamTable = HandleTable<comm::HostStream, moecclStream_t, 0xC2>;

// Returns the message of this thread's last failure.
const char* thread_error() noexcept;

// Maps a status to a code and keeps its message for the thread and, if given, the communicator.
moecclResult_t finish(const Status& status, comm::Communicator* comm = nullptr) noexcept;

// Whether peers may wait for what a call does. If they may, a call that throws ends its communicator.
enum Scope { kWithPeers, kLocal };

// Runs `body` (which returns a Status) so that nothing is thrown through the C interface. A pthread_cancel of the
// thread acts after the call.
template <Scope kScope = kWithPeers, class Body>
moecclResult_t guarded(comm::Communicator* comm, Body&& body) {
  const Uncancelled uncancelled;
  const bool shields = kScope == kWithPeers && comm != nullptr;
  const Status status = shields ? comm->shielded(body) : contained(body);
  return finish(status, comm);
}

// What messages call a handle: the argument's name, what it refers to, the function that makes one, and whose
// communicator its object has. The type of a table's objects has them as kWords.
struct Words {
  const char *name, *kind, *maker = nullptr, *whose = nullptr;
};
// Returns the object of a live handle that was made in this process, or an error for the caller.
template <class Table>
Result<typename Table::Object*> live(typename Table::Handle handle) {
  const Words& words = Table::Object::kWords;
  auto* const found = Table::get().find(handle);
  if (found == nullptr) {
    return error(moecclInvalidArgument, "{} is {}{}: give one of {}", words.name,
                 handle == nullptr ? "NULL" : "not a live ", handle == nullptr ? "" : words.kind, words.maker);
  }
  if (Table::get().inherited(handle)) {
    return error(moecclInvalidUsage, "{} belongs to the process that this one was forked from: make one here with {}",
                 words.name, words.maker);
  }
  return found;
}
// Destroys the object of a handle after `before` (of a T&) has waited for whatever still uses it. An object that was
// made before this process was forked is only forgotten.
template <class Table, class Before>
Status destroy(typename Table::Handle handle, const Words& words, Before&& before) {
  if (handle == nullptr) return {};
  auto taken = Table::get().take(handle);
  if (!taken)
    return error(moecclInvalidArgument, "{} is not a live {}: was it destroyed before?", words.name, words.kind);
  if (!taken.inherited()) before(*taken.get());
  return {};
}
template <class Table>
Status destroy(typename Table::Handle handle) {
  return destroy<Table>(handle, Table::Object::kWords, [](auto&) {});
}

// Returns InvalidUsage if open groups have calls that use the object of a live handle.
Status not_in_group(const comm::GroupHolds& holds, const char* what);
template <class Table>
Status not_in_group(typename Table::Handle handle, const char* what) {
  const auto object = Table::get().pin(handle);
  return object.get() != nullptr ? not_in_group(object.get()->group_holds(), what) : Status();
}
// Passes on the result of a call that other ranks make too. If the calling thread has an open group, a failed result is
// kept for the end of the group, which then issues nothing.
moecclResult_t member_of_group_that_failed(moecclResult_t result);
inline moecclResult_t member_of_group(moecclResult_t result) {
  return result == moecclSuccess ? result : member_of_group_that_failed(result);
}
using comm::outside_groups;

Status find_comm(moecclComm_t handle, comm::Communicator** comm);
// Calls `body` with the communicator, or reports the bad handle. `whose` names the object that was made with the
// communicator, such as "the layer's"; null if the caller gave the handle itself.
template <Scope kScope = kWithPeers, class Body>
moecclResult_t with_comm(moecclComm_t handle, Body&& body, const char* whose = nullptr) {
  comm::Communicator* comm = nullptr;
  if (Status s = find_comm(handle, &comm); !s.ok())
    return finish(whose == nullptr ? std::move(s) : std::move(s).with_context(format("{} communicator", whose)));
  return guarded<kScope>(comm, [&]() -> Status { return body(*comm); });
}
// Calls `body` with the object of a live handle and its live communicator, or reports the bad handle.
template <class Table, Scope kScope = kWithPeers, class Body>
moecclResult_t with(typename Table::Handle handle, Body&& body) {
  const auto found = live<Table>(handle);
  if (!found.ok()) return finish(found.status());
  auto& made = *found.value();
  return with_comm<kScope>(
      made.comm(), [&](comm::Communicator& comm) { return body(made.object(), comm); }, Table::Object::kWords.whose);
}
// Destroys an object whose tables are used by operations that still run on streams. A communicator that is gone runs
// nothing. A failure is reported where the operation was waited for; here only its end matters.
template <class Table>
Status destroy_idle(typename Table::Handle handle) {
  return destroy<Table>(handle, Table::Object::kWords, [](auto& made) {
    if (comm::Communicator* comm = CommTable::get().find(made.comm()); comm != nullptr) comm->wait_idle();
  });
}
// An object that was made with a communicator.
template <class T>
struct OnComm {
  using Owned = T;
  moecclComm_t comm() const { return comm_handle; }
  T& object() const { return *owned; }
  moecclComm_t comm_handle = nullptr;
  std::unique_ptr<T> owned;
};
// Gives the caller the handle of an object that was made with a communicator.
template <class Table, class T>
Status give_handle(typename Table::Handle* out, moecclComm_t comm, Result<std::unique_ptr<T>> made) {
  MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<T> object, std::move(made));
  auto handle = std::make_unique<typename Table::Object>();
  handle->comm_handle = comm;
  handle->owned = std::move(object);
  MOECCL_ASSIGN_OR_RETURN(*out, Table::get().add(std::move(handle)));
  return {};
}
// Returns the stream of a handle, or null for NULL, the blocking stream. `comm` is the communicator that will use the
// stream; null for none. Its next call, if it has no bytes, is on the stream's kind of memory.
Result<comm::Stream*> find_stream(moecclStream_t handle, const comm::Communicator* comm);
// The frame of a call that ranks make together, which may be part of a group; see member_of_group(). `body` gets the
// communicator; with a table, it gets the object of the handle first.
template <class Body>
moecclResult_t collective(moecclComm_t handle, Body&& body) {
  return member_of_group(with_comm(handle, std::forward<Body>(body)));
}
template <class Table, class Body>
moecclResult_t collective(typename Table::Handle handle, Body&& body) {
  return member_of_group(with<Table>(handle, std::forward<Body>(body)));
}
// For a call `name` that cannot be part of a group.
template <class Table, class Body>
moecclResult_t collective(typename Table::Handle handle, const char* name, Body&& body) {
  return collective<Table>(handle, [&](auto& object, comm::Communicator& comm) -> Status {
    MOECCL_TRY(outside_groups(name));
    return body(object, comm);
  });
}
// For a call on a stream, which `body` gets as its last argument.
template <class Table, class Body>
moecclResult_t collective_on(typename Table::Handle handle, moecclStream_t stream, Body&& body) {
  return collective<Table>(handle, [&](auto& object, comm::Communicator& comm) -> Status {
    MOECCL_ASSIGN_OR_RETURN(comm::Stream* const on, find_stream(stream, &comm));
    return body(object, comm, on);
  });
}
Status null_argument(const char* name, const char* wanted);
inline Status require(const void* pointer, const char* name, const char* wanted) {
  return pointer == nullptr ? null_argument(name, wanted) : Status();
}
// Sets a call's output to NULL until the call succeeds. `type` describes what `out` must point to.
template <class T>
Status clear(T** out, const char* name, const char* type) {
  MOECCL_TRY(require(out, name, type));
  *out = nullptr;
  return {};
}
// Begins a call that makes an object and cannot be part of a group.
template <class Table>
Status begin_create(typename Table::Handle* out, const char* type) {
  MOECCL_TRY(clear(out, Table::Object::kWords.name, type));
  return outside_groups(Table::Object::kWords.maker);
}
// Copies a text for people to read, in the manner of snprintf.
void copy_text(const std::string& text, char* out, size_t out_bytes, size_t* needed);
inline Status give_text(const Result<std::string>& page, char* out, size_t out_bytes, size_t* needed) {
  if (page.ok()) copy_text(page.value(), out, out_bytes, needed);
  return page.status();
}

}  // namespace moeccl::api
