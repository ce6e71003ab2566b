// SPDX-License-Identifier: Apache-2.0
// What the ranks do once they have agreed: MoECCL's part, in join.cc. aside.cc is a rank without MoECCL.
#pragma once

#include "shim/mpi/comm.h"

namespace moeccl::shim {

// Returns whether this rank has MoECCL, and room for another communicator.
bool can_join();
// Sets served.comm on all ranks or on none. Collective over comm.
void join(MPI_Comm comm, Served& served);
void leave(Served& served);

}  // namespace moeccl::shim
