// SPDX-License-Identifier: Apache-2.0
// The MPI functions that the shim's own names hide. Fortran's and ROMIO's calls come in by the PMPI_ names, so the shim
// has these names as well, and neither leads to MPI any more.
#pragma once

#include "shim/mpi/table.h"

namespace moeccl::shim {

// Fills what the loader did not find after the shim, because MPI was loaded outside the global scope.
void find_mpi(moecclMpiBelow& after_mpi, moecclMpiBelow& after_pmpi);
// For the shim's own calls, after find_mpi().
const moecclMpiBelow& mpi();

}  // namespace moeccl::shim
