/* SPDX-License-Identifier: Apache-2.0 */
/* Sums a small array over all processes. Start it with a launcher, for example
 *   mpirun -n 4 examples/allreduce        or        torchrun --nproc-per-node 4 --no-python examples/allreduce */
#include <moeccl/moeccl.h>
#include <stdio.h>

int main(void) {
  moecclComm_t comm = NULL;
  int rank = 0, n_ranks = 0;
  float mine[4], sum[4];
  if (moecclCommInitEnv(&comm, NULL) != moecclSuccess) goto failed;
  if (moecclCommUserRank(comm, &rank) != moecclSuccess || moecclCommCount(comm, &n_ranks) != moecclSuccess) goto failed;
  for (int i = 0; i < 4; i++) mine[i] = (float)(rank + i);
  if (moecclAllReduce(mine, sum, 4, moecclFloat32, moecclSum, comm, NULL) != moecclSuccess) goto failed;
  printf("rank %d of %d: %g %g %g %g\n", rank, n_ranks, sum[0], sum[1], sum[2], sum[3]);
  return moecclCommDestroy(comm) == moecclSuccess ? 0 : 1;
failed:
  fprintf(stderr, "rank %d: %s\n", rank, moecclGetLastError(comm));
  return 1;
}
