/* SPDX-License-Identifier: Apache-2.0 */
/* How the exported MPI functions (entry.c) reach the core, which is loaded by the first of their calls, or what steps
 * aside in its place. */
#ifndef MOECCL_SHIM_MPI_TABLE_H_
#define MOECCL_SHIM_MPI_TABLE_H_

#include <mpi.h>

#define MOECCL_MPI_MEMBER(name, parameters, arguments) int(*name) parameters;
#define MPI_FUNCTION MOECCL_MPI_MEMBER
typedef struct {
#include "shim/mpi/functions.def"
} moecclMpiTable;
#undef MPI_FUNCTION
#undef MOECCL_MPI_MEMBER

#define MOECCL_MPI_CORE "libmoeccl-mpi-core.so"
#define MOECCL_MPI_ASIDE "libmoeccl-mpi-aside.so"
#define MOECCL_MPI_SYMBOL "moecclMpiCore" /* of both */
typedef const moecclMpiTable* (*moecclMpiCore_t)(void);

#endif /* MOECCL_SHIM_MPI_TABLE_H_ */
