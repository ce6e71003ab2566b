/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver that only has one device and can allocate on it: a machine whose memory this MoECCL cannot serve. The
 * host may not touch the memory, and crashes when it does. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
enum { kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidContext = 201, kPage = 4096 };

static int initialized;
static _Thread_local void* current;
static _Alignas(8) char device_context;
static uintptr_t first, last; /* the newest allocation */

EXPORT int cuInit(unsigned flags) { return flags == 0 ? (initialized = 1, kSuccess) : kInvalidValue; }
EXPORT int cuDeviceGetCount(int* n) { return *n = 1, kSuccess; }
EXPORT int cuCtxGetDevice(int* device) { return *device = 0, current != NULL ? kSuccess : kInvalidContext; }
EXPORT int cuCtxGetCurrent(void** context) { return *context = current, initialized ? kSuccess : kNotInitialized; }
EXPORT int cuCtxSetCurrent(void* context) { return current = context, kSuccess; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = &device_context, device == 0 ? kSuccess : kInvalidValue;
}
EXPORT int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  (void)bytes; /* one page is enough for the tests */
  void* p = mmap(NULL, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return kInvalidValue;
  first = (uintptr_t)p;
  last = first + kPage;
  *address = first;
  return kSuccess;
}
EXPORT int cuMemFree_v2(uint64_t address) {
  return munmap((void*)(uintptr_t)address, kPage) == 0 ? kSuccess : kInvalidValue;
}
EXPORT int cuPointerGetAttribute(void* out, int attribute, uint64_t address) {
  if (address < first || address >= last) return kInvalidValue;
  *(unsigned*)out = attribute == 2 ? 2 : 0; /* memory of a device, not managed */
  return kSuccess;
}
EXPORT int cuStreamCreate(void** stream, unsigned flags) { return (void)flags, *stream = &device_context, kSuccess; }
EXPORT int cuStreamDestroy_v2(void* stream) { return stream == &device_context ? kSuccess : kInvalidValue; }
/* As the real driver, these read what a handle points to, and crash when that is nothing. */
static int read_stream(const volatile char* stream) {
  if ((uintptr_t)stream > 2) (void)*stream;
  return kSuccess;
}
EXPORT int cuStreamSynchronize(void* stream) { return read_stream(stream); }
EXPORT int cuEventRecord(void* event, void* stream) { return (void)event, read_stream(stream); }
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return (void)to, (void)from, (void)bytes, (void)stream, kInvalidValue;
}
