/* SPDX-License-Identifier: Apache-2.0 */
/* A user's program in C11, built from only the installed headers, library and pkg-config file. */
#include <moeccl/moeccl.h>
#include <stdio.h>

#define N_RANKS 2
#define COUNT 1000

int main(void) {
  int version = 0;
  if (moecclGetVersion(&version) != moecclSuccess || version != MOECCL_VERSION) {
    fprintf(stderr, "headers of %d with a library of %d\n", MOECCL_VERSION, version);
    return 1;
  }
  moecclComm_t comms[N_RANKS];
  moecclStream_t streams[N_RANKS];
  if (moecclCommInitAll(comms, N_RANKS, NULL) != moecclSuccess) {
    fprintf(stderr, "init: %s\n", moecclGetLastError(NULL));
    return 1;
  }
  static float data[N_RANKS][COUNT];
  for (int r = 0; r < N_RANKS; r++) {
    if (moecclStreamCreate(&streams[r]) != moecclSuccess) return 1;
    for (int i = 0; i < COUNT; i++) data[r][i] = (float)(i * (r + 1));
  }
  moecclGroupStart();
  for (int r = 0; r < N_RANKS; r++)
    moecclAllReduce(data[r], data[r], COUNT, moecclFloat32, moecclSum, comms[r], streams[r]);
  if (moecclGroupEnd() != moecclSuccess) {
    fprintf(stderr, "group: %s\n", moecclGetLastError(NULL));
    return 1;
  }
  for (int r = 0; r < N_RANKS; r++) {
    if (moecclStreamSynchronize(streams[r]) != moecclSuccess) {
      fprintf(stderr, "rank %d: %s\n", r, moecclGetLastError(comms[r]));
      return 1;
    }
    for (int i = 0; i < COUNT; i++) {
      if (data[r][i] != (float)(3 * i)) {
        fprintf(stderr, "rank %d element %d is %g\n", r, i, (double)data[r][i]);
        return 1;
      }
    }
  }
  for (int r = 0; r < N_RANKS; r++) {
    if (moecclStreamDestroy(streams[r]) != moecclSuccess || moecclCommDestroy(comms[r]) != moecclSuccess) return 1;
  }
  printf("MoECCL %d.%d.%d\n", MOECCL_VERSION_MAJOR, MOECCL_VERSION_MINOR, MOECCL_VERSION_PATCH);
  return 0;
}
