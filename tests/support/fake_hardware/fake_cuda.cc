// SPDX-License-Identifier: Apache-2.0
// Stands in for libcuda.so.1 as far as the probe asks: see script.h.
#include <cstdio>

#include "tests/support/fake_hardware/script.h"

namespace {
fake::Machine machine;
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
