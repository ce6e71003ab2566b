/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The symbols that a preloaded MPI program finds before its MPI library: a few collectives. This library needs only
 * libc and no MPI: in a program without MPI, nothing here is called. The first call loads the core. Where the core does
 * not load, the rank may not simply go on with MPI, because all ranks decide together which library serves: aside.cc
 * tells the others.
 *
 * The PMPI_ names are here too. Fortran's functions call these, and so does a tool that comes before the shim.
 */
#define _GNU_SOURCE /* dladdr, dl_iterate_phdr, RTLD_NEXT */
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shim/beside.h"
#include "shim/mpi/table.h"

static moecclMpiBelow after_mpi, after_pmpi; /* what the loader finds after this library */
static _Atomic(const moecclMpiTable*) loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void* mpi = RTLD_DEFAULT; /* the program's MPI library, where to look for its functions */

/* Empty tables: for a rank where no library loads, and for a program of another MPI than the shim was built for. All
 * calls are left to that one. Its handles are passed on as they came, if this MPI's types are wide enough for them. */
static const moecclMpiTable broken, apart;
static int handles_fit = 1;

/* The other ranks would wait for ever for this one's answer. */
static _Noreturn void end_job(const char* function, MPI_Comm comm) {
  fprintf(stderr, "moeccl-mpi: %s cannot be passed on to the program's MPI, so the job ends\n", function);
  int (*pmpi_abort)(MPI_Comm, int);
  *(void**)&pmpi_abort = dlsym(mpi, "PMPI_Abort");
  if (pmpi_abort != NULL && handles_fit) (void)pmpi_abort(comm, 1);
  abort();
}

static const char* file_of(const void* address) {
  Dl_info info;
  return dladdr(address, &info) != 0 && info.dli_fname != NULL ? info.dli_fname : "";
}

/* Returns the library that has this address; for the program itself, the global scope. */
static void* library_of(const void* address) {
  const char* file = file_of(address);
  void* library = *file != '\0' ? dlopen(file, RTLD_LAZY | RTLD_NOLOAD) : NULL;
  return library != NULL ? library : RTLD_DEFAULT;
}

/* The files of this process's libraries, one after another. */
static char files[1 << 18], *files_end = files;
static int add_file(struct dl_phdr_info* info, size_t info_bytes, void* unused) {
  (void)info_bytes, (void)unused;
  const size_t bytes = strlen(info->dlpi_name) + 1;
  if (bytes > sizeof files - (size_t)(files_end - files)) return 1;
  memcpy(files_end, info->dlpi_name, bytes);
  files_end += bytes;
  return 0;
}

/* Returns the PMPI_Comm_rank of the program's MPI: the one in the global scope, or where a library that was opened
 * locally brought MPI, such as a module of Python's, that of the MPI in use. */
static const void* find_mpi(void) {
  void* found = dlsym(RTLD_DEFAULT, "PMPI_Comm_rank");
  int in_use = 0, (*initialized)(int*);
  if (found == NULL) dl_iterate_phdr(add_file, NULL);
  for (const char* file = files; file < files_end && !in_use; file += strlen(file) + 1) {
    void* library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) continue;
    *(void**)&initialized = dlsym(library, "PMPI_Initialized");
    if (initialized != NULL) (void)initialized(&in_use);
    if (found == NULL || in_use) found = dlsym(library, "PMPI_Comm_rank"); /* not in use: by MPI's sessions, perhaps */
    dlclose(library);
  }
  return found;
}

/* Finds what comes after the shim, or where MPI is not in the global scope, MPI's own. */
static void find_below(const void* comm_rank) {
  mpi = library_of(comm_rank);
#define MPI_FUNCTION(name, parameters, arguments)                                                            \
  *(void**)&after_mpi.name = dlsym(RTLD_NEXT, "MPI_" #name);                                                 \
  *(void**)&after_pmpi.name = dlsym(RTLD_NEXT, "PMPI_" #name);                                               \
  if (after_pmpi.name == NULL && mpi != RTLD_DEFAULT) *(void**)&after_pmpi.name = dlsym(mpi, "PMPI_" #name); \
  if (after_mpi.name == NULL) after_mpi.name = after_pmpi.name;
#include "shim/mpi/functions.def"
}

/* Returns whether the program's MPI is of another kind than the one that the shim was built for. */
static int is_other_kind(const char* version) {
#ifdef OPEN_MPI
  return *version != '\0' && strstr(version, "Open MPI") == NULL;
#else
  handles_fit = strstr(version, "Open MPI") == NULL;
  return !handles_fit;
#endif
}

/* Loads a library of the shim's own folder. */
static const moecclMpiTable* find_table(const char* name, const void* comm_rank, char* why, size_t why_bytes) {
  void* symbol = symbol_beside(&once, name, MOECCL_MPI_SYMBOL, why, why_bytes);
  if (symbol == NULL) return NULL;
  moecclMpiCore_t get;
  *(void**)&get = symbol; /* POSIX's way from an object pointer to a function pointer */
  const moecclMpiTable* table = get(&after_pmpi, comm_rank);
  return table != NULL ? table : &apart;
}

static void load(void) {
  const void* comm_rank = find_mpi();
  find_below(comm_rank);
  static char version[16384]; /* more than any MPI_MAX_LIBRARY_VERSION_STRING */
  int n = 0, (*get_version)(char*, int*);
  *(void**)&get_version = dlsym(mpi, "PMPI_Get_library_version");
  if (get_version != NULL) (void)get_version(version, &n);
  char why[4096] = "", too[4096] = "";
  const moecclMpiTable* table = is_other_kind(version) ? &apart : NULL;
  if (table == NULL) table = find_table(MOECCL_MPI_CORE, comm_rank, why, sizeof why);
  if (table == NULL) {
    table = find_table(MOECCL_MPI_ASIDE, comm_rank, too, sizeof too);
    if (table != NULL && table != &apart)
      fprintf(stderr, "moeccl-mpi: steps aside, and this rank's communicators stay with MPI: %s\n", why);
  }
  if (table == NULL) {
    fprintf(stderr,
            "moeccl-mpi: cannot load on this host: %s; %s: install all its files in one folder on every host, or "
            "start the program without it\n",
            why, too);
    table = &broken;
  }
  if (table == &apart) {
#ifdef OPEN_MPI
    const char* built_for = "Open MPI";
#else
    const char* built_for = "MPICH's interface";
#endif
    fprintf(
        stderr,
        "moeccl-mpi: %s: the shim was built for another MPI library (%s), and the program's is \"%.*s\" (%s): build "
        "MoECCL with that MPI's mpicc, or start the program without the shim\n",
        handles_fit ? "leaves all calls to MPI" : "ends the program", built_for, (int)strcspn(version, ",\n"), version,
        file_of(comm_rank));
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

#define ENTRY(function, below, name, parameters, arguments)                                      \
  __attribute__((visibility("default"))) int function parameters {                               \
    const moecclMpiTable* t = table();                                                           \
    if (__builtin_expect(t->name != NULL, 1)) return t->name(&below, MOECCL_MPI_BARE arguments); \
    if (t == &broken || !handles_fit || below.name == NULL) end_job(#function, comm);            \
    return below.name arguments;                                                                 \
  }
#define MPI_FUNCTION(name, parameters, arguments)           \
  ENTRY(MPI_##name, after_mpi, name, parameters, arguments) \
  ENTRY(PMPI_##name, after_pmpi, name, parameters, arguments)
#include "shim/mpi/functions.def"
