// SPDX-License-Identifier: Apache-2.0
// The MoECCL communicator behind an MPI communicator, and the ranks' decision to have one.
#pragma once

#include <moeccl/moeccl.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "shim/mpi/table.h"
#include "src/base/uncancelled.h"

namespace moeccl::shim {

struct Served {
  moecclComm_t comm = nullptr;  // null: MPI keeps this communicator
  int rank = 0, n_ranks = 1;
  uint32_t calls = 0;   // of the shim's functions on this communicator, served by MPI
  uint32_t ask_at = 0;  // the ranks decide when `calls` reaches it
  uint64_t earned = 0;  // calls that MoECCL has served
  bool decided = false;
  bool full_staging = false;         // counted among those that have it
  std::unique_ptr<size_t[]> layout;  // with comm: room for 4 n_ranks numbers, for Alltoallv
};

// Returns what is known of `comm`; null when MPI serves it in any case. One of the first calls for a communicator is
// collective over it and decides alike for all its ranks, so every function of the shim begins with this.
Served* find(MPI_Comm comm);
// After a call that MPI has served on an undecided communicator, with MPI's result. The communicator is taken over
// after some calls. If MPI returned an error, its handler may have freed the communicator and `served`.
void served_by_mpi(Served& served, const char* function, MPI_Comm comm, int code);

// MPI's functions for the shim's own calls, where its own names hide them. Fortran's and ROMIO's calls come in by the
// PMPI_ names, so the shim has these names as well, and neither leads to MPI any more.
void use_mpi(const moecclMpiBelow& after_pmpi);
const moecclMpiBelow& mpi();

// Returns whether all ranks say yes. Collective.
bool all_agree(MPI_Comm comm, bool mine);
// Returns whether this rank gives the notices: the world's rank 0, unless the user wants none.
bool gives_notices();
// Returns an environment variable's value. Empty is as good as not set.
inline std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// While one exists, a call of this thread on this communicator has been passed on, and what comes in for it by the
// shim's names belongs to that call: a tool calls the PMPI_ name, or MPI a function of its own. Such calls go on too,
// and are not counted.
class PassingOn {
 public:
  explicit PassingOn(MPI_Comm comm) : before_(std::exchange(current(), comm)) {}
  ~PassingOn() { current() = before_; }
  PassingOn(const PassingOn&) = delete;
  PassingOn& operator=(const PassingOn&) = delete;
  static bool here(MPI_Comm comm) { return current() == comm; }

 private:
  static MPI_Comm& current() {
    thread_local MPI_Comm comm = MPI_COMM_NULL;
    return comm;
  }
  MPI_Comm before_;
};

// What the shim has done of a call.
struct Outcome {
  bool served = false;     // otherwise the call is MPI's
  int code = MPI_SUCCESS;  // another one goes to the communicator's error handler
};

// The shim's own exceptions may not reach the C program. What the peers wait for will not come, so this goes to the
// error handler of the whole job, which ends the job by default.
int no_memory(const char* function, const std::exception& thrown);
// Runs a part of the shim's work and returns its error. A pthread_cancel of the thread acts after it. Other exceptions
// are those of an error handler that a C++ program has given to MPI, which MPI's functions may call at any time; they
// are the program's to catch.
template <class Body>
int contained(const char* function, Body&& body) {
  const Uncancelled uncancelled;
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
// Runs one of the shim's functions: serve() has the communicator and returns an Outcome, and pass_on() calls the same
// function below the shim.
template <class Serve, class PassOn>
int enter(const char* function, MPI_Comm comm, Serve&& serve, PassOn&& pass_on) {
  if (PassingOn::here(comm)) return pass_on();
  Served* served = nullptr;
  Outcome outcome;
  const int failed = contained(function, [&] {
    served = find(comm);
    if (served != nullptr && served->comm != nullptr) outcome = serve(*served);
  });
  if (failed != MPI_SUCCESS) return failed;
  if (outcome.served) {
    ++served->earned;
    if (outcome.code != MPI_SUCCESS) PMPI_Comm_call_errhandler(comm, outcome.code);
    return outcome.code;
  }
  const bool counts = served != nullptr && !served->decided;
  int ended = MPI_SUCCESS;
  {
    const PassingOn mark(comm);
    ended = pass_on();
  }
  if (!counts) return ended;
  const int wrong = contained(function, [&] { served_by_mpi(*served, function, comm, ended); });
  return wrong != MPI_SUCCESS ? wrong : ended;
}

}  // namespace moeccl::shim
