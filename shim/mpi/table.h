/* SPDX-License-Identifier: Apache-2.0 */
/* How the exported MPI functions (entry.c) reach the core, which is loaded by the first of their calls, or what steps
 * aside in its place. */
#ifndef MOECCL_SHIM_MPI_TABLE_H_
#define MOECCL_SHIM_MPI_TABLE_H_

#include <mpi.h>

/* Where calls go that the shim does not serve: to a tool's functions that come after the shim's, or to MPI's. */
#define MOECCL_MPI_MEMBER(name, parameters, arguments) int(*name) parameters;
#define MPI_FUNCTION MOECCL_MPI_MEMBER
typedef struct {
#include "shim/mpi/functions.def"
} moecclMpiBelow;
#undef MPI_FUNCTION
#undef MOECCL_MPI_MEMBER

#define MOECCL_MPI_BARE(...) __VA_ARGS__ /* a list without its brackets */
#define MOECCL_MPI_MEMBER(name, parameters, arguments) \
  int (*name)(const moecclMpiBelow* below, MOECCL_MPI_BARE parameters);
#define MOECCL_MPI_WATCHED(name, parameters, arguments) int (*name)(const moecclMpiBelow* below);
#define MPI_FUNCTION MOECCL_MPI_MEMBER
#define MPI_WATCHED MOECCL_MPI_WATCHED
typedef struct {
#include "shim/mpi/functions.def"
  void (*progress)(void); /* lets MPI work; for a thread that waits within one of the functions */
} moecclMpiTable;
#undef MPI_FUNCTION
#undef MOECCL_MPI_WATCHED
#undef MOECCL_MPI_MEMBER

#define MOECCL_MPI_CORE "libmoeccl-mpi-core.so"
#define MOECCL_MPI_ASIDE "libmoeccl-mpi-aside.so"
/* The function of both. Its number changes with the table and the arguments, so that files of two versions do not mix.
 */
#define MOECCL_MPI_SYMBOL "moecclMpiCore2"
/* Takes what comes after the functions named MPI_ and PMPI_, which must live on. Fills what is missing from MPI itself.
 */
typedef const moecclMpiTable* (*moecclMpiCore_t)(moecclMpiBelow* after_mpi, moecclMpiBelow* after_pmpi);

#endif /* MOECCL_SHIM_MPI_TABLE_H_ */
