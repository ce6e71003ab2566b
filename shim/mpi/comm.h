// SPDX-License-Identifier: Apache-2.0
// The MoECCL communicator behind an MPI communicator.
#pragma once

#include <moeccl/moeccl.h>
#include <mpi.h>

#include <cstddef>
#include <cstdint>

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

// Prints MoECCL's message and calls the communicator's error handler; returns MPI_ERR_OTHER.
int fail(const char* function, MPI_Comm comm);

}  // namespace moeccl::shim
