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
  uint32_t calls = 0;  // of the shim's functions on the communicator that MPI has served
  bool decided = false;
};

// What serves `comm`; null when MPI does. One of the first calls for a communicator is collective over it and decides
// for all its ranks alike: it must be made by every function of the shim before any decision of its own.
const Served* served_by_moeccl(MPI_Comm comm);
// Around every call of a function of the shim. A communicator is taken over when MPI has served some calls on it.
void call_begins();
void call_succeeded();
// Lets go of everything, before MPI_Finalize.
void release_all();

// Prints MoECCL's sentence and calls the communicator's error handler; returns MPI_ERR_OTHER.
int fail(const char* function, MPI_Comm comm);

}  // namespace moeccl::shim
