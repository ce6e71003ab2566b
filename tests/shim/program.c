/* SPDX-License-Identifier: Apache-2.0 */
/* A small NCCL program as a user would write it: `program RANKS TIMES` sums 1..RANKS in one process, TIMES times, each
 * time over new communicators. */
#include <stdio.h>
#include <stdlib.h>

#ifdef MOECCL_REAL_NCCL
#include <nccl.h>
#else
#include "shim/nccl/abi.h"
#endif

#define CHECK(call)                                                                               \
  do {                                                                                            \
    ncclResult_t result = (call);                                                                 \
    if (result != ncclSuccess) {                                                                  \
      fprintf(stderr, "%s: %s, %s\n", #call, ncclGetErrorString(result), ncclGetLastError(NULL)); \
      return 1;                                                                                   \
    }                                                                                             \
  } while (0)

int main(int argc, char** argv) {
  const int n = argc > 1 ? atoi(argv[1]) : 2, times = argc > 2 ? atoi(argv[2]) : 1;
  if (n < 1 || n > 64) return 2;
  for (int t = 0; t < times; ++t) {
    ncclComm_t comms[64];
    float in[64], out[64] = {0};
    CHECK(ncclCommInitAll(comms, n, NULL));
    CHECK(ncclGroupStart());
    for (int r = 0; r < n; ++r) {
      in[r] = (float)(r + 1);
      CHECK(ncclAllReduce(&in[r], &out[r], 1, ncclFloat32, ncclSum, comms[r], NULL));
    }
    CHECK(ncclGroupEnd());
    for (int r = 1; r < n; ++r) {
      if (out[r] != out[0]) return 3;
    }
    printf("sum %g\n", (double)out[0]);
    for (int r = 0; r < n; ++r) CHECK(ncclCommDestroy(comms[r]));
  }
  return 0;
}
