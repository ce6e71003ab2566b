/* SPDX-License-Identifier: Apache-2.0 */
/* For gdb_flight_test.py: two thread ranks. Both sum twice; then rank 0 sums once more, and rank 1 does not. */
#include <moeccl/moeccl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

#define COUNT 1234

static moecclComm_t comms[2];

static void* sum(void* which) {
  const int rank = *(const int*)which;
  float data[COUNT] = {0};
  for (int i = 0; i < (rank == 0 ? 3 : 2); i++)
    if (moecclAllReduce(data, data, COUNT, moecclFloat32, moecclSum, comms[rank], NULL) != moecclSuccess)
      fprintf(stderr, "rank %d: %s\n", rank, moecclGetLastError(comms[rank]));
  return NULL;
}

int main(void) {
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  if (moecclCommInitAll(comms, 2, NULL) != moecclSuccess) {
    fprintf(stderr, "init: %s\n", moecclGetLastError(NULL));
    return 1;
  }
  const int ranks[2] = {0, 1};
  pthread_t threads[2];
  for (int r = 0; r < 2; r++) pthread_create(&threads[r], NULL, sum, (void*)&ranks[r]);
  pthread_join(threads[1], NULL);
  puts("rank 1 is done");
  fflush(stdout);
  pause();
  return 0;
}
