// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/join.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace moeccl::shim {
namespace {

void announce(const Served& served, MPI_Comm comm) {
  static std::once_flag once;
  if (comm != MPI_COMM_WORLD || served.rank != 0 || quiet()) return;
  std::call_once(once, [&] {
    int v = 0;
    (void)moecclGetVersion(&v);
    std::fprintf(
        stderr,
        "moeccl-mpi: MoECCL %d.%d.%d has taken over Allreduce, Reduce, Reduce_scatter_block, Bcast, Allgather, "
        "Alltoall and Alltoallv (%d ranks); MOECCL_SHIM_MPI=off leaves them to MPI, MOECCL_SHIM_QUIET=1 hides "
        "this line\n",
        v / 10000, v / 100 % 100, v % 100, served.n_ranks);
  });
}

// MPI sets no limit to waiting, so MoECCL does only where the user asks for one.
moecclConfig_t patient() {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  if (std::getenv("MOECCL_TIMEOUT_MS") == nullptr) config.timeout_ms = INT32_MAX;
  return config;
}

// Returns the reason why not, or nothing. In a group of the calling thread's, MoECCL would only queue the call, so
// another thread makes it.
std::string init(Served& served, const moecclUniqueId& id) {
  const moecclConfig_t config = patient();
  std::string why;
  try {
    std::thread([&] {
      if (moecclCommInitRankConfig(&served.comm, served.n_ranks, id, served.rank, &config) != moecclSuccess)
        why = moecclGetLastError(nullptr);
    }).join();
  } catch (const std::exception& e) {
    why = std::string("no thread can be started: ") + e.what();
  }
  return why;
}

}  // namespace

bool can_join() { return true; }

void join(MPI_Comm comm, Served& served) {
  moecclUniqueId id = {};
  const bool good = served.rank != 0 || moecclGetUniqueId(&id) == moecclSuccess;
  if (!good) std::fprintf(stderr, "moeccl-mpi: leaves a communicator to MPI: %s\n", moecclGetLastError(nullptr));
  if (!all_agree(comm, good)) return;
  PMPI_Bcast(&id, sizeof id, MPI_BYTE, 0, comm);
  const std::string why = init(served, id);
  if (!why.empty()) std::fprintf(stderr, "moeccl-mpi: leaves a communicator to MPI: %s\n", why.c_str());
  if (all_agree(comm, why.empty())) {
    announce(served, comm);
    return;
  }
  if (served.comm != nullptr) leave(served);
}

void leave(Served& served) { (void)moecclCommDestroy(std::exchange(served.comm, nullptr)); }

}  // namespace moeccl::shim
