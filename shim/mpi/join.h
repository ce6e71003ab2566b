// SPDX-License-Identifier: Apache-2.0
// What the ranks do once they have agreed: MoECCL's part, in join.cc. aside.cc is a rank without MoECCL.
#pragma once

#include "shim/mpi/comm.h"

namespace moeccl::shim {

// A communicator that a program makes for some calls never earns back what taking it over costs. MPI serves its first
// calls, and serves more of them first after communicators that were freed too early. All ranks make the same calls on
// a communicator, so their counts agree. Calls that MPI refuses do not count, because one rank may try them alone.
constexpr uint32_t kCallsForMpi = 8;
// Returns how many calls MPI is to serve first, in this rank's view. Ranks may differ.
uint32_t patience();

// Returns whether this rank has MoECCL, and room for another communicator.
bool can_join();
// Sets served.comm on all ranks or on none. Collective over comm.
void join(MPI_Comm comm, Served& served);
void leave(Served& served);

}  // namespace moeccl::shim
