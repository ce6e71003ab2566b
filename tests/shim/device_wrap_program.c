/* SPDX-License-Identifier: Apache-2.0 */
/* Under tools/gpu/device_wrap.c, a program that wants five devices gets them from two. */
#include <stdio.h>

int cudaGetDeviceCount(int*);
int cudaSetDevice(int);
int cudaGetDevice(int*);
int cudaDeviceGetAttribute(int*, int, int);
int cudaDeviceCanAccessPeer(int*, int, int);
int cudaDeviceSynchronize(void);
int fake_current(void);

#define EXPECT(what)                                   \
  if (!(what)) {                                       \
    fprintf(stderr, "line %d: %s\n", __LINE__, #what); \
    return 1;                                          \
  }

int main(void) {
  int n = 0;
  EXPECT(cudaGetDeviceCount(&n) == 0 && n == 5);
  for (int d = 0; d < 5; ++d) {
    int now = -1;
    EXPECT(cudaSetDevice(d) == 0 && fake_current() == d % 2);
    EXPECT(cudaGetDevice(&now) == 0 && now == d);
    EXPECT(cudaDeviceGetAttribute(&now, 7, d) == 0 && now == 7);
  }
  int can = 0;
  EXPECT(cudaDeviceCanAccessPeer(&can, 0, 4) == 0 && can == 1);
  EXPECT(cudaDeviceCanAccessPeer(&can, 0, 3) == 0 && can == 1);
  EXPECT(cudaSetDevice(-1) != 0);
  EXPECT(cudaDeviceSynchronize() == 0);
  return 0;
}
