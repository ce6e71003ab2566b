/* SPDX-License-Identifier: Apache-2.0 */
/* How the exported MPI functions (entry.c) reach the core, which is loaded by the first of their calls, or what steps
 * aside in its place. */
#ifndef MOECCL_SHIM_MPI_TABLE_H_
#define MOECCL_SHIM_MPI_TABLE_H_

#include <mpi.h>

/* Where calls go that the shim does not serve: to a tool's functions that come after the shim's, or to MPI's. */
#define MPI_FUNCTION(name, parameters, arguments) int(*name) parameters;
typedef struct {
#include "shim/mpi/functions.def"
} moecclMpiBelow;

#define MOECCL_MPI_BARE(...) __VA_ARGS__ /* a list without its brackets */
#define MPI_FUNCTION(name, parameters, arguments) int (*name)(const moecclMpiBelow* below, MOECCL_MPI_BARE parameters);
typedef struct {
#include "shim/mpi/functions.def"
  void (*progress)(void); /* lets MPI work; for a thread that waits within one of the functions */
} moecclMpiTable;

#define MOECCL_MPI_CORE "libmoeccl-mpi-core.so"
#define MOECCL_MPI_ASIDE "libmoeccl-mpi-aside.so"
/* The function of both. Its number changes with the table and the arguments, so that files of two versions do not mix.
 */
#define MOECCL_MPI_SYMBOL "moecclMpiCore3"
/* Takes what comes after the functions named PMPI_, which must live on, for the shim's own calls, and the program's
 * PMPI_Comm_rank. Returns null where the program's MPI is not the library's own. */
typedef const moecclMpiTable* (*moecclMpiCore_t)(const moecclMpiBelow* after_pmpi, const void* comm_rank);

#endif /* MOECCL_SHIM_MPI_TABLE_H_ */
