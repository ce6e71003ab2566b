/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded: prints the timeout and the staging of each communicator that the MPI shim makes, and whether signals reach
 * the thread that makes it. With MOECCL_TEST_FAIL, none can be made on rank 1. With MOECCL_TEST_LATE, rank 1 makes each
 * so many microseconds late. With MOECCL_TEST_NO_THREAD, C++ can start no thread on rank 1. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <errno.h>
#include <moeccl/moeccl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_rank_1(void) {
  const char* number = getenv("OMPI_COMM_WORLD_RANK");
  if (number == NULL) number = getenv("PMI_RANK");
  return number != NULL && atoi(number) == 1;
}

/* MPI's own threads are those of C libraries. */
__attribute__((visibility("default"))) int pthread_create(pthread_t* thread, const pthread_attr_t* how,
                                                          void* (*body)(void*), void* argument) {
  Dl_info caller;
  if (getenv("MOECCL_TEST_NO_THREAD") != NULL && is_rank_1() && dladdr(__builtin_return_address(0), &caller) != 0 &&
      strstr(caller.dli_fname, "libstdc++") != NULL)
    return EAGAIN;
  int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = NULL;
  *(void**)&create = dlsym(RTLD_NEXT, "pthread_create");
  return create(thread, how, body, argument);
}

static const char* signals_here(void) {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  const int of_programs[] = {SIGALRM, SIGCHLD, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
  for (size_t i = 0; i < sizeof of_programs / sizeof *of_programs; ++i)
    if (!sigismember(&blocked, of_programs[i])) return "arrive";
  return "blocked";
}

__attribute__((visibility("default"))) moecclResult_t moecclCommInitRankConfig(moecclComm_t* comm, int n_ranks,
                                                                               moecclUniqueId id, int rank,
                                                                               const moecclConfig_t* config) {
  printf("timeout %d staging %zu\nsignals %s\n", (int)config->timeout_ms, config->staging_bytes, signals_here());
  if (getenv("MOECCL_TEST_FAIL") != NULL && rank == 1) return moecclSystemError;
  if (getenv("MOECCL_TEST_LATE") != NULL && rank == 1) usleep((useconds_t)atoi(getenv("MOECCL_TEST_LATE")));
  void* library = dlopen("libmoeccl.so.0", RTLD_LAZY | RTLD_NOLOAD);
  moecclResult_t (*make)(moecclComm_t*, int, moecclUniqueId, int, const moecclConfig_t*) = NULL;
  if (library != NULL) *(void**)&make = dlsym(library, "moecclCommInitRankConfig");
  return make != NULL ? make(comm, n_ranks, id, rank, config) : moecclInternalError;
}
