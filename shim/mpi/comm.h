// SPDX-License-Identifier: Apache-2.0
// The MoECCL communicator behind an MPI communicator, and the ranks' decision to have one.
#pragma once

#include <moeccl/moeccl.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

namespace moeccl::shim {

struct Served {
  moecclComm_t comm = nullptr;  // null: MPI keeps this communicator
  int rank = 0, n_ranks = 1;
  uint32_t calls = 0;  // of the shim's functions on this communicator, served by MPI
  bool decided = false;
  bool full_staging = false;  // counted among those that have it
};

// Returns what serves `comm`; null when MPI does. One of the first calls for a communicator is collective over it and
// decides alike for all its ranks, so every function of the shim must call this before it decides anything itself.
const Served* served_by_moeccl(MPI_Comm comm);
// Called around every function of the shim. A communicator is taken over once MPI has served some calls on it.
void call_begins();
void call_succeeded();
// Frees everything, before MPI_Finalize. From then on MPI serves all communicators.
void release_all();

// Returns whether all ranks say yes. Collective.
bool all_agree(MPI_Comm comm, bool mine);
// Returns whether the user wants no notices.
bool quiet();

// While one exists, a call of this thread has been passed on, and what comes in by the shim's names belongs to it: a
// tool calls the PMPI_ name, or MPI a function of the program's. Such calls go on too, and are not counted.
class PassingOn {
 public:
  PassingOn();
  ~PassingOn();
  PassingOn(const PassingOn&) = delete;
  PassingOn& operator=(const PassingOn&) = delete;
  static bool here();
};

// What the shim has done of a call.
struct Outcome {
  bool served = false;     // otherwise the call is MPI's
  int code = MPI_SUCCESS;  // another one goes to the communicator's error handler
};

// The shim's own exceptions may not reach the C program. What the peers wait for will not come, so this goes to the
// error handler of the whole job, which ends the job by default.
int no_memory(const char* function, const std::exception& thrown);
// Runs a part of the shim's work and returns its error. Other exceptions are those of an error handler that a C++
// program has given to MPI, which MPI's functions may call at any time; they are the program's to catch.
template <class Body>
int contained(const char* function, Body&& body) {
  try {
    body();
    return MPI_SUCCESS;
  } catch (const std::bad_alloc& e) {
    return no_memory(function, e);
  } catch (const std::length_error& e) {
    return no_memory(function, e);
  } catch (const std::system_error& e) {
    return no_memory(function, e);
  }
}
// Runs one of the shim's functions: serve() returns an Outcome, and pass_on() calls the same function below the shim.
template <class Serve, class PassOn>
int enter(const char* function, MPI_Comm comm, Serve&& serve, PassOn&& pass_on) {
  if (PassingOn::here()) return pass_on();
  call_begins();
  Outcome outcome;
  if (const int failed = contained(function, [&] { outcome = serve(); }); failed != MPI_SUCCESS) return failed;
  if (outcome.served) {
    if (outcome.code != MPI_SUCCESS) PMPI_Comm_call_errhandler(comm, outcome.code);
    return outcome.code;
  }
  int ended = MPI_SUCCESS;
  {
    const PassingOn mark;
    ended = pass_on();
  }
  return ended == MPI_SUCCESS ? contained(function, call_succeeded) : ended;
}
// Runs MPI_Finalize.
template <class PassOn>
int leave_mpi(PassOn&& pass_on) {
  if (!PassingOn::here()) release_all();
  const PassingOn mark;
  return pass_on();
}

}  // namespace moeccl::shim
