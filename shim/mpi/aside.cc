// SPDX-License-Identifier: Apache-2.0
// Takes the core's place on a rank where that does not load, for example because MoECCL is missing there. MPI serves
// all calls. This rank counts them and answers the other ranks' questions, as it would with MOECCL_SHIM_MPI=off.
#include "shim/mpi/join.h"
#include "shim/mpi/progress.h"
#include "shim/mpi/table.h"

namespace moeccl::shim {

uint32_t patience() { return kCallsForMpi; }
bool can_join() { return false; }
void join(MPI_Comm, Served&) {}
void leave(Served&) {}
void progress() {}
void end_progress() {}

namespace {
namespace core {

// Never called, because no communicator is served.
#define MPI_FUNCTION(name, parameters, arguments) \
  template <class... Arguments>                   \
  Outcome name(const Served&, Arguments...) {     \
    return {};                                    \
  }
#define MPI_LARGE(name, parameters, arguments)
#include "shim/mpi/functions.def"

}  // namespace core
}  // namespace
}  // namespace moeccl::shim

#include "shim/mpi/export_table.inc"
