/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The symbols that a preloaded MPI program finds before its MPI library: a few collectives. This library needs only
 * libc and no MPI: in a program without MPI, nothing here is called. The first call loads the core. Without the core,
 * or when loading fails, calls go to the PMPI_ functions of the program's own MPI.
 */
#define _GNU_SOURCE /* dladdr, RTLD_DEFAULT */
#include <dlfcn.h>
#include <libgen.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "shim/mpi/table.h"

static moecclMpiTable direct; /* the PMPI_ functions */
static _Atomic(const moecclMpiTable*) loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const moecclMpiTable* find_core(char* why, size_t why_bytes) {
  Dl_info self;
  char path[4096];
  char* file = dladdr(&once, &self) != 0 && self.dli_fname != NULL ? realpath(self.dli_fname, NULL) : NULL;
  if (file == NULL || snprintf(path, sizeof path, "%s/%s", dirname(file), MOECCL_MPI_CORE) >= (int)sizeof path) {
    snprintf(why, why_bytes, "the shim's own path cannot be resolved");
    free(file);
    return NULL;
  }
  free(file);
  void* core = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol = core == NULL ? NULL : dlsym(core, MOECCL_MPI_CORE_SYMBOL);
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
#define DIRECT(name, parameters, arguments) *(void**)&direct.name = dlsym(RTLD_DEFAULT, "PMPI_" #name);
#define MPI_FUNCTION DIRECT
#include "shim/mpi/functions.def"
#undef MPI_FUNCTION
  char why[4096] = "";
  const moecclMpiTable* table = find_core(why, sizeof why);
  if (table == NULL) {
    fprintf(stderr, "moeccl-mpi: steps aside: %s\n", why);
    table = &direct;
  }
  atomic_store_explicit(&loaded, table, memory_order_release); /* acquired in table() */
}

static inline const moecclMpiTable* table(void) {
  const moecclMpiTable* t = atomic_load_explicit(&loaded, memory_order_acquire); /* released in load() */
  if (__builtin_expect(t != NULL, 1)) return t;
  pthread_once(&once, load);
  return atomic_load_explicit(&loaded, memory_order_acquire);
}

#define ENTRY(name, parameters, arguments) \
  __attribute__((visibility("default"))) int MPI_##name parameters { return table()->name arguments; }
#define MPI_FUNCTION ENTRY
#include "shim/mpi/functions.def"
