// SPDX-License-Identifier: Apache-2.0
// Takes the core's place on a rank where that does not load, for example because MoECCL is missing there. MPI serves
// all calls. This rank counts them and answers the other ranks' questions, as it would with MOECCL_SHIM_MPI=off.
#include "shim/mpi/below.h"
#include "shim/mpi/join.h"
#include "shim/mpi/progress.h"
#include "shim/mpi/table.h"

namespace moeccl::shim {

bool can_join() { return false; }
void join(MPI_Comm, Served&) {}
void leave(Served&) {}
void progress() {}
void end_progress() {}

namespace {
namespace entry {

#define ENTER(name, parameters, arguments)                                  \
  int name(const moecclMpiBelow* below, MOECCL_MPI_BARE parameters) {       \
    const auto note = [&] { return served_by_moeccl(comm), Outcome(); };    \
    return enter(#name, comm, note, [&] { return below->name arguments; }); \
  }
#define FINALIZE(name, parameters, arguments)                \
  int name(const moecclMpiBelow* below) {                    \
    return leave_mpi([&] { return below->name arguments; }); \
  }
#define MPI_FUNCTION ENTER
#define MPI_WATCHED FINALIZE
#include "shim/mpi/functions.def"
#undef MPI_FUNCTION
#undef FINALIZE
#undef ENTER

}  // namespace entry

}  // namespace
}  // namespace moeccl::shim

#include "shim/mpi/export_table.inc"
