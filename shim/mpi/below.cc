// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/below.h"

#include <dlfcn.h>

namespace moeccl::shim {
namespace {

const moecclMpiBelow* own = nullptr;

// Opens the MPI library by one of its functions that the shim does not have.
void* library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&PMPI_Comm_rank), &info) == 0 || info.dli_fname == nullptr) return nullptr;
  return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

}  // namespace

void find_mpi(moecclMpiBelow& after_mpi, moecclMpiBelow& after_pmpi) {
  void* const from = after_pmpi.Finalize == nullptr ? library() : nullptr;
#define FILL(name, parameters, arguments)                                                      \
  if (from != nullptr && after_pmpi.name == nullptr) {                                         \
    after_pmpi.name = reinterpret_cast<decltype(after_pmpi.name)>(dlsym(from, "PMPI_" #name)); \
  }                                                                                            \
  if (after_mpi.name == nullptr) after_mpi.name = after_pmpi.name;
#define MPI_FUNCTION FILL
#include "shim/mpi/functions.def"
#undef MPI_FUNCTION
#undef FILL
  own = &after_pmpi;
}

const moecclMpiBelow& mpi() { return *own; }

}  // namespace moeccl::shim
