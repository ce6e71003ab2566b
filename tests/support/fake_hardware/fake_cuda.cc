// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 as far as the probe asks: see script.h. It lacks most functions, as an old driver lacks
// some.
#include <cstdint>
#include <cstdio>

#include "tests/support/fake_hardware/script.h"

namespace {
fake::Machine machine;
uint64_t memory_base = 0, memory_bytes = 0;
}  // namespace

// The memory that the fake device has, as long as it has some.
FAKE_API void moeccl_fake_cuda_memory(const void* base, size_t bytes) {
  memory_base = reinterpret_cast<uint64_t>(base);
  memory_bytes = bytes;
}
FAKE_API int cuPointerGetAttribute(void* out, int attribute, uint64_t pointer) {
  constexpr int kMemoryType = 2, kInvalidValue = 1;
  constexpr unsigned kDevice = 2;
  if (attribute != kMemoryType || pointer - memory_base >= memory_bytes) return kInvalidValue;
  *static_cast<unsigned*>(out) = kDevice;
  return 0;
}

FAKE_API int cuInit(unsigned) {
  machine = fake::read_machine();
  return machine.failure("cuda_init");
}
FAKE_API int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
FAKE_API int cuDeviceGetCount(int* n) {
  *n = static_cast<int>(machine.gpus.size());
  return 0;
}
FAKE_API int cuDeviceGet(int* device, int i) {
  *device = i;
  return 0;
}
FAKE_API int cuDeviceGetName(char* text, int n, int device) {
  std::snprintf(text, static_cast<size_t>(n), "%s", machine.gpus[static_cast<size_t>(device)].name.c_str());
  return 0;
}
FAKE_API int cuDeviceGetPCIBusId(char* text, int n, int device) {
  std::snprintf(text, static_cast<size_t>(n), "%s", machine.gpus[static_cast<size_t>(device)].pci.c_str());
  return 0;
}
FAKE_API int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = machine.gpus[static_cast<size_t>(device)].gib << 30;
  return 0;
}
FAKE_API int cuDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int kMpsEnabled = 133;
  *value = attribute == kMpsEnabled ? 0 : 9;
  return 0;
}
FAKE_API int cuDeviceCanAccessPeer(int* can, int a, int b) {
  *can = machine.p2p.contains({static_cast<size_t>(a), static_cast<size_t>(b)});
  return 0;
}
FAKE_API int cuGetErrorName(int code, const char** name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
