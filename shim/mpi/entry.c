/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The symbols that a preloaded MPI program finds before its MPI library: a few collectives. This library needs only
 * libc and no MPI: in a program without MPI, nothing here is called. The first call loads the core. Where the core does
 * not load, the rank may not simply go on with MPI, because all ranks decide together which library serves: aside.cc
 * tells the others.
 *
 * The PMPI_ names are here too. Fortran's functions call these, and so does a tool that comes before the shim.
 */
#define _GNU_SOURCE /* dladdr, RTLD_NEXT */
#include <dlfcn.h>
#include <libgen.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim/mpi/table.h"

static moecclMpiBelow after_mpi, after_pmpi; /* what the loader finds after this library */
static _Atomic(const moecclMpiTable*) loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The other ranks would wait for ever for this one's answer. */
static _Noreturn void end_job(MPI_Comm comm) {
  int (*pmpi_abort)(MPI_Comm, int);
  *(void**)&pmpi_abort = dlsym(RTLD_DEFAULT, "PMPI_Abort");
  if (pmpi_abort != NULL) (void)pmpi_abort(comm, 1);
  abort();
}

static int finalize(const moecclMpiBelow* below) { return below->Finalize != NULL ? below->Finalize() : MPI_ERR_OTHER; }
/* For a rank where neither library loads: MPI_Finalize alone works. */
static const moecclMpiTable broken = {.Finalize = finalize};

/* For a program of another MPI than the shim was built for: everything is left to it. Its handles are passed on as they
 * came, which the type of this MPI's must be wide enough for. */
static const int handles_fit = sizeof(MPI_Datatype) >= sizeof(void*);
#define APART(name, parameters, arguments)                                           \
  static int name##_apart(const moecclMpiBelow* below, MOECCL_MPI_BARE parameters) { \
    if (below->name == NULL || !handles_fit) abort();                                \
    return below->name arguments;                                                    \
  }
#define NOTHING(name, parameters, arguments)
#define MPI_FUNCTION APART
#define MPI_WATCHED NOTHING
#include "shim/mpi/functions.def"
#undef MPI_FUNCTION
#undef NOTHING
#undef APART
static const moecclMpiTable apart = {
#define MEMBER(name, parameters, arguments) .name = name##_apart,
#define LAST(name, parameters, arguments) .name = finalize,
#define MPI_FUNCTION MEMBER
#define MPI_WATCHED LAST
#include "shim/mpi/functions.def"
#undef MPI_FUNCTION
#undef LAST
#undef MEMBER
};

/* Returns whether the program's MPI is the kind that the shim was built for, and says so if not. */
static int is_our_mpi(void) {
#ifdef OPEN_MPI
  const char* const built_for = "Open MPI";
  const int for_open_mpi = 1;
#else
  const char* const built_for = "an MPI of MPICH's interface";
  const int for_open_mpi = 0;
#endif
  static char text[16384]; /* more than any MPI_MAX_LIBRARY_VERSION_STRING */
  int n = 0, (*version)(char*, int*);
  *(void**)&version = dlsym(RTLD_DEFAULT, "PMPI_Get_library_version");
  if (version == NULL || version(text, &n) != 0) return 1; /* out of sight, in a library that was opened locally */
  if ((strstr(text, "Open MPI") != NULL) == for_open_mpi) return 1;
  fprintf(stderr,
          "moeccl-mpi: %s: the shim was built for %s, and the program's MPI is \"%.*s\": build MoECCL with that MPI's "
          "mpicc, or start the program without the shim\n",
          handles_fit ? "leaves all calls to MPI" : "ends the program", built_for, (int)strcspn(text, ",\n"), text);
  return 0;
}

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
  return get(&after_mpi, &after_pmpi);
}

static void load(void) {
#define FIND(name, parameters, arguments)                    \
  *(void**)&after_mpi.name = dlsym(RTLD_NEXT, "MPI_" #name); \
  *(void**)&after_pmpi.name = dlsym(RTLD_NEXT, "PMPI_" #name);
#define MPI_FUNCTION FIND
#include "shim/mpi/functions.def"
#undef MPI_FUNCTION
#undef FIND
  if (!is_our_mpi()) {
    atomic_store_explicit(&loaded, &apart, memory_order_release); /* acquired in table() */
    return;
  }
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

/* For MoECCL, which looks for this name, while a thread waits within one of the functions (src/api/collectives.cc). */
__attribute__((visibility("default"))) void moecclMpiProgress(void) { table()->progress(); }

#define ENTRY_TO(function, below, name, parameters, arguments)     \
  __attribute__((visibility("default"))) int function parameters { \
    const moecclMpiTable* t = table();                             \
    if (__builtin_expect(t == &broken, 0)) end_job(comm);          \
    return t->name(&below, MOECCL_MPI_BARE arguments);             \
  }
#define ENTRY(name, parameters, arguments)                     \
  ENTRY_TO(MPI_##name, after_mpi, name, parameters, arguments) \
  ENTRY_TO(PMPI_##name, after_pmpi, name, parameters, arguments)
#define WATCHED(name, parameters, arguments)                                                             \
  __attribute__((visibility("default"))) int MPI_##name parameters { return table()->name(&after_mpi); } \
  __attribute__((visibility("default"))) int PMPI_##name parameters { return table()->name(&after_pmpi); }
#define MPI_FUNCTION ENTRY
#define MPI_WATCHED WATCHED
#include "shim/mpi/functions.def"
