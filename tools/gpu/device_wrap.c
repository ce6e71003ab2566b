/* SPDX-License-Identifier: Apache-2.0 */
/* For tests on a machine with fewer devices than a program wants: preloaded before the CUDA runtime, it shows
 * MOECCL_WRAP_DEVICES devices (8) and wraps their numbers around those that exist. Several ranks of a program then
 * share a device, which MoECCL serves and NCCL refuses. It reaches programs that link the CUDA runtime dynamically. To
 * build it: cc -shared -fPIC -o device_wrap.so tools/gpu/device_wrap.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

typedef int (*DeviceCall)(int*);
typedef int (*SetCall)(int);
typedef int (*PropertiesCall)(void*, int);
typedef int (*AttributeCall)(int*, int, int);
typedef int (*BusCall)(char*, int, int);
typedef int (*StreamCall)(void*);
typedef int (*PeerCall)(int*, int, int);

static _Thread_local int chosen = -1; /* the number that the program gave */

static int exist(void) {
  int n = 0;
  DeviceCall count = (DeviceCall)dlsym(RTLD_NEXT, "cudaGetDeviceCount");
  return count != NULL && count(&n) == 0 && n > 0 ? n : 1;
}
static int shown(void) {
  const char* text = getenv("MOECCL_WRAP_DEVICES");
  const int n = text != NULL ? atoi(text) : 8;
  return n > 0 ? n : 8;
}
static int wrapped(int device) { return device < 0 ? device : device % exist(); }

EXPORT int cudaGetDeviceCount(int* n) {
  DeviceCall real = (DeviceCall)dlsym(RTLD_NEXT, "cudaGetDeviceCount");
  const int result = real(n);
  if (result == 0 && *n > 0 && *n < shown()) *n = shown();
  return result;
}
EXPORT int cudaSetDevice(int device) {
  const int result = ((SetCall)dlsym(RTLD_NEXT, "cudaSetDevice"))(wrapped(device));
  if (result == 0) chosen = device;
  return result;
}
EXPORT int cudaGetDevice(int* device) {
  const int result = ((DeviceCall)dlsym(RTLD_NEXT, "cudaGetDevice"))(device);
  if (result == 0 && chosen >= 0 && wrapped(chosen) == *device) *device = chosen;
  return result;
}
EXPORT int cudaGetDeviceProperties(void* properties, int device) {
  return ((PropertiesCall)dlsym(RTLD_NEXT, "cudaGetDeviceProperties"))(properties, wrapped(device));
}
EXPORT int cudaGetDeviceProperties_v2(void* properties, int device) {
  return ((PropertiesCall)dlsym(RTLD_NEXT, "cudaGetDeviceProperties_v2"))(properties, wrapped(device));
}
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  return ((AttributeCall)dlsym(RTLD_NEXT, "cudaDeviceGetAttribute"))(value, attribute, wrapped(device));
}
EXPORT int cudaDeviceGetPCIBusId(char* id, int bytes, int device) {
  return ((BusCall)dlsym(RTLD_NEXT, "cudaDeviceGetPCIBusId"))(id, bytes, wrapped(device));
}
/* A device of its own would not wait here for the streams of other ranks, which may wait for this one: only for the
 * default stream, on which programs like nccl-tests prepare and check their data. */
EXPORT int cudaDeviceSynchronize(void) { return ((StreamCall)dlsym(RTLD_NEXT, "cudaStreamSynchronize"))(NULL); }
EXPORT int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (wrapped(device) == wrapped(peer)) return *can = 1, 0;
  return ((PeerCall)dlsym(RTLD_NEXT, "cudaDeviceCanAccessPeer"))(can, wrapped(device), wrapped(peer));
}
