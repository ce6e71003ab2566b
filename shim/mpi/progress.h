// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace moeccl::shim {

// Lets MPI work on what it has begun for this rank: messages above the eager limit, non-blocking collectives, windows.
// Only for a thread that is within one of the shim's functions, and as such may call MPI. Reports no error, because
// MPI reports one to the call that it concerns.
void progress();
// Within MPI_Finalize: gives back what progress() uses.
void end_progress();

}  // namespace moeccl::shim
