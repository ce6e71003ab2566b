/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The symbols that a preloaded MPI program finds before its MPI library: a few collectives. This library needs only
 * libc and no MPI: in a program without MPI, nothing here is called. The first call loads the core. Where the core does
 * not load, the rank may not simply go on with MPI, because all ranks decide together which library serves: aside.cc
 * tells the others.
 */
#define _GNU_SOURCE /* dladdr, RTLD_DEFAULT */
#include <dlfcn.h>
#include <libgen.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "shim/mpi/table.h"

static moecclMpiTable broken; /* neither library loads: MPI_Finalize alone works */
static _Atomic(const moecclMpiTable*) loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Loads a library of the shim's own folder. */
static const moecclMpiTable* find_table(const char* name, char* why, size_t why_bytes) {
  Dl_info self;
  char path[4096];
  char* file = dladdr(&once, &self) != 0 && self.dli_fname != NULL ? realpath(self.dli_fname, NULL) : NULL;
  if (file == NULL || snprintf(path, sizeof path, "%s/%s", dirname(file), name) >= (int)sizeof path) {
    snprintf(why, why_bytes, "the shim's own path cannot be resolved");
    free(file);
    return NULL;
  }
  free(file);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == NULL ? NULL : dlsym(library, MOECCL_MPI_SYMBOL);
  if (symbol == NULL) {
    const char* said = dlerror();
    snprintf(why, why_bytes, "%s", said != NULL ? said : path);
    return NULL;
  }
  moecclMpiCore_t get;
  *(void**)&get = symbol; /* POSIX's way from an object pointer to a function pointer */
  return get();
}

static void load(void) {
  char why[4096] = "", too[4096] = "";
  const moecclMpiTable* table = find_table(MOECCL_MPI_CORE, why, sizeof why);
  if (table == NULL) {
    table = find_table(MOECCL_MPI_ASIDE, too, sizeof too);
    if (table != NULL)
      fprintf(stderr, "moeccl-mpi: steps aside, and this rank's communicators stay with MPI: %s\n", why);
  }
  if (table == NULL) {
    fprintf(stderr,
            "moeccl-mpi: cannot load on this host: %s; %s: install all its files in one folder on every host, or "
            "start the program without it\n",
            why, too);
    *(void**)&broken.Finalize = dlsym(RTLD_DEFAULT, "PMPI_Finalize");
    table = &broken;
  }
  atomic_store_explicit(&loaded, table, memory_order_release); /* acquired in table() */
}

static inline const moecclMpiTable* table(void) {
  const moecclMpiTable* t = atomic_load_explicit(&loaded, memory_order_acquire); /* released in load() */
  if (__builtin_expect(t != NULL, 1)) return t;
  pthread_once(&once, load);
  return atomic_load_explicit(&loaded, memory_order_acquire);
}

/* The other ranks would wait for ever for this one's answer. */
static _Noreturn void end_job(MPI_Comm comm) {
  int (*pmpi_abort)(MPI_Comm, int);
  *(void**)&pmpi_abort = dlsym(RTLD_DEFAULT, "PMPI_Abort");
  if (pmpi_abort != NULL) (void)pmpi_abort(comm, 1);
  abort();
}

#define ENTRY(name, parameters, arguments)                           \
  __attribute__((visibility("default"))) int MPI_##name parameters { \
    const moecclMpiTable* t = table();                               \
    if (__builtin_expect(t == &broken, 0)) end_job(comm);            \
    return t->name arguments;                                        \
  }
#define WATCHED(name, parameters, arguments) \
  __attribute__((visibility("default"))) int MPI_##name parameters { return table()->name arguments; }
#define MPI_FUNCTION ENTRY
#define MPI_WATCHED WATCHED
#include "shim/mpi/functions.def"
