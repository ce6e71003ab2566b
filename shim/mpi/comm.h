// SPDX-License-Identifier: Apache-2.0
// The MoECCL communicator behind an MPI communicator, and the ranks' decision to have one.
#pragma once

#include <moeccl/moeccl.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <exception>

namespace moeccl::shim {

struct Served {
  moecclComm_t comm = nullptr;  // null: MPI keeps this communicator
  int rank = 0, n_ranks = 1;
  uint32_t calls = 0;  // of the shim's functions on this communicator, served by MPI
  bool decided = false;
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

// No exception may reach the C program. What the peers wait for will not come, so this goes to the error handler of the
// whole job, which ends the job by default.
int no_memory(const char* function, const std::exception& thrown);
// Runs one of the shim's functions.
template <class Body>
int enter(const char* function, Body&& body) {
  try {
    call_begins();
    const int ended = body();
    if (ended == MPI_SUCCESS) call_succeeded();
    return ended;
  } catch (const std::exception& e) {
    return no_memory(function, e);
  }
}

}  // namespace moeccl::shim
