/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded: prints the timeout and the staging of each communicator that the MPI shim makes. With MOECCL_TEST_FAIL,
 * none can be made on rank 1. With MOECCL_TEST_LATE, rank 1 makes each so many microseconds late. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <moeccl/moeccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

__attribute__((visibility("default"))) moecclResult_t moecclCommInitRankConfig(moecclComm_t* comm, int n_ranks,
                                                                               moecclUniqueId id, int rank,
                                                                               const moecclConfig_t* config) {
  printf("timeout %d staging %zu\n", (int)config->timeout_ms, config->staging_bytes);
  if (getenv("MOECCL_TEST_FAIL") != NULL && rank == 1) return moecclSystemError;
  if (getenv("MOECCL_TEST_LATE") != NULL && rank == 1) usleep((useconds_t)atoi(getenv("MOECCL_TEST_LATE")));
  void* library = dlopen("libmoeccl.so.0", RTLD_LAZY | RTLD_NOLOAD);
  moecclResult_t (*make)(moecclComm_t*, int, moecclUniqueId, int, const moecclConfig_t*) = NULL;
  if (library != NULL) *(void**)&make = dlsym(library, "moecclCommInitRankConfig");
  return make != NULL ? make(comm, n_ranks, id, rank, config) : moecclInternalError;
}
