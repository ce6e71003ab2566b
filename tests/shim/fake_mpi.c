/* SPDX-License-Identifier: Apache-2.0 */
/* An MPI of one rank, as far as mpi_plugin.c uses it. MOECCL_TEST_MPI is its name. Its handles point to anything,
 * so MPI's own header does not fit. */
#include <stdio.h>
#include <stdlib.h>

#define SHOWN __attribute__((visibility("default")))

SHOWN char ompi_mpi_comm_world[512], ompi_mpi_int[512], ompi_mpi_op_sum[512]; /* Open MPI's handles */

SHOWN int PMPI_Get_library_version(char* text, int* length) {
  *length = sprintf(text, "%s", getenv("MOECCL_TEST_MPI"));
  return 0;
}
SHOWN int MPI_Init(int* argc, char*** argv) {
  (void)argc, (void)argv;
  return 0;
}
SHOWN int MPI_Finalize(void) { return 0; }
SHOWN int PMPI_Comm_rank(void* comm, int* rank) {
  (void)comm;
  *rank = 0;
  return 0;
}
SHOWN int MPI_Comm_rank(void* comm, int* rank) { return PMPI_Comm_rank(comm, rank); }
SHOWN int MPI_Comm_size(void* comm, int* n) {
  (void)comm;
  *n = 1;
  return 0;
}
SHOWN int PMPI_Allreduce(const void* send, void* recv, int count, void* type, void* op, void* comm) {
  (void)count, (void)type, (void)op, (void)comm;
  *(int*)recv = *(const int*)send;
  return 0;
}
SHOWN int MPI_Allreduce(const void* send, void* recv, int count, void* type, void* op, void* comm) {
  return PMPI_Allreduce(send, recv, count, type, op, comm);
}
