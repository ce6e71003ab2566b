/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded: gives the program's MPI library the name of another one. */
#include <mpi.h>
#include <stdio.h>

__attribute__((visibility("default"))) int PMPI_Get_library_version(char* text, int* length) {
#ifdef OPEN_MPI
  *length = sprintf(text, "MPICH Version:\t4.2.0\nMPICH Release date: today");
#else
  *length = sprintf(text, "Open MPI v4.1.4, package: today");
#endif
  return MPI_SUCCESS;
}
