// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/progress.h"

#include <mpi.h>

#include <mutex>

namespace moeccl::shim {
namespace {

// A request of this rank alone that nothing completes before the end. MPI works whenever one is tested in vain. (MPICH
// does not while it probes a communicator of one rank.)
struct Pending {
  std::mutex mutex;  // MPI forbids two threads to test one request
  MPI_Request request = MPI_REQUEST_NULL;
  bool ended = false;
};
Pending& pending() {
  static auto* const p = new Pending;  // never destroyed: a thread may end after MPI
  return *p;
}

int about(void*, MPI_Status* status) {
  PMPI_Status_set_elements(status, MPI_BYTE, 0);
  PMPI_Status_set_cancelled(status, 0);
  return MPI_SUCCESS;
}
int let_go(void*) { return MPI_SUCCESS; }
int cancel(void*, int) { return MPI_SUCCESS; }

}  // namespace

void progress() {
  Pending& p = pending();
  const std::unique_lock lock(p.mutex, std::try_to_lock);
  if (!lock.owns_lock() || p.ended) return;  // another thread is doing it
  if (p.request == MPI_REQUEST_NULL && PMPI_Grequest_start(about, let_go, cancel, nullptr, &p.request) != MPI_SUCCESS) {
    p.request = MPI_REQUEST_NULL;
    return;
  }
  int done = 0;
  (void)PMPI_Test(&p.request, &done, MPI_STATUS_IGNORE);
}

void end_progress() {
  Pending& p = pending();
  const std::lock_guard lock(p.mutex);
  p.ended = true;
  if (p.request == MPI_REQUEST_NULL) return;
  PMPI_Grequest_complete(p.request);
  PMPI_Wait(&p.request, MPI_STATUS_IGNORE);
}

}  // namespace moeccl::shim
