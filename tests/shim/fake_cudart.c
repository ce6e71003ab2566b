/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA runtime with two devices, for tools/gpu/device_wrap.c. */
#define EXPORT __attribute__((visibility("default")))
static _Thread_local int current;
EXPORT int cudaGetDeviceCount(int* n) { return *n = 2, 0; }
EXPORT int cudaSetDevice(int device) {
  if (device < 0 || device > 1) return 101;
  return current = device, 0;
}
EXPORT int cudaGetDevice(int* device) { return *device = current, 0; }
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return *value = attribute, device > 1 ? 101 : 0;
}
EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = device != peer, device > 1 || peer > 1 ? 101 : 0;
}
EXPORT int cudaDeviceSynchronize(void) { return 999; }
EXPORT int cudaStreamSynchronize(void* stream) { return stream == 0 ? 0 : 400; }
EXPORT int fake_current(void) { return current; }
