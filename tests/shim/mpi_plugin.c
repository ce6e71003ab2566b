/* SPDX-License-Identifier: Apache-2.0 */
/* What a program opens that is itself not linked to MPI, as Python opens modules. */
#include <mpi.h>
#include <stdio.h>

__attribute__((visibility("default"))) int begin(void) { return MPI_Init(NULL, NULL); }

__attribute__((visibility("default"))) int run(void) {
  int rank = 0, n = 0, bad = 0, one = 1, sum = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  for (int call = 0; call < 12; ++call) {
    sum = 0;
    bad += MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD) != MPI_SUCCESS || sum != n;
  }
  if (bad == 0) printf("rank %d of %d: all right\n", rank, n);
  fflush(stdout);
  return MPI_Finalize() != MPI_SUCCESS || bad != 0;
}
