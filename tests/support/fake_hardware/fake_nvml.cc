// SPDX-License-Identifier: Apache-2.0
// Stands in for libnvidia-ml.so.1: see script.h.
#include <cctype>
#include <cstdio>
#include <cstring>

#include "tests/support/fake_hardware/script.h"

namespace {

fake::Machine* machine = nullptr;

constexpr int kUninitialized = 1, kInvalidArgument = 2, kNotSupported = 3;

struct PciInfo {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_sub_system_id;
  char bus_id[32];
};
struct Memory {
  unsigned long long total, free, used;
};

size_t index_of(void* device) { return reinterpret_cast<size_t>(device) - 1; }
const fake::Gpu& gpu(void* device) { return machine->gpus[index_of(device)]; }

// Writes the address as NVML does: eight digits of domain, capitals.
void fill(PciInfo* info, const std::string& pci) {
  std::memset(info, 0, sizeof(*info));
  std::snprintf(info->bus_id, sizeof(info->bus_id), "0000%s", pci.c_str());
  for (char& c : info->bus_id) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
}

}  // namespace

FAKE_API int nvmlInit_v2() {
  delete machine;
  machine = new fake::Machine(fake::read_machine());
  const int failure = machine->failure("nvml_init");
  if (failure != 0) {  // a failed init is not followed by a shutdown
    delete machine;
    machine = nullptr;
  }
  return failure;
}
FAKE_API int nvmlShutdown() {
  delete machine;
  machine = nullptr;
  return 0;
}
FAKE_API const char* nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
FAKE_API int nvmlDeviceGetCount_v2(unsigned* n) {
  if (machine == nullptr) return kUninitialized;
  *n = static_cast<unsigned>(machine->gpus.size());
  return machine->failure("nvml_count");
}
FAKE_API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) {
  if (i >= machine->gpus.size()) return kInvalidArgument;
  *device = reinterpret_cast<void*>(static_cast<size_t>(i) + 1);
  return 0;
}
FAKE_API int nvmlDeviceGetName(void* device, char* text, unsigned n) {
  std::snprintf(text, n, "%s", gpu(device).name.c_str());
  return 0;
}
FAKE_API int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) {
  fill(info, gpu(device).pci);
  return 0;
}
FAKE_API int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = gpu(device).gib << 30;
  return 0;
}
FAKE_API int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = gpu(device).compute_major;
  *minor = 0;
  return 0;
}
FAKE_API int nvmlDeviceGetMaxPcieLinkGeneration(void* device, unsigned* value) {
  *value = gpu(device).generation;
  return 0;
}
FAKE_API int nvmlDeviceGetMaxPcieLinkWidth(void* device, unsigned* value) {
  *value = gpu(device).lanes;
  return 0;
}
FAKE_API int nvmlDeviceGetNvLinkState(void* device, unsigned link, int* state) {
  if (gpu(device).links.empty()) return kNotSupported;
  *state = link < gpu(device).links.size();
  return 0;
}
FAKE_API int nvmlDeviceGetNvLinkVersion(void* device, unsigned link, unsigned* version) {
  if (link >= gpu(device).links.size()) return kInvalidArgument;
  *version = gpu(device).links[link].version;
  return 0;
}
FAKE_API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, PciInfo* info) {
  if (link >= gpu(device).links.size()) return kInvalidArgument;
  fill(info, gpu(device).links[link].pci);
  return 0;
}
FAKE_API int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, int* type) {
  if (link >= gpu(device).links.size()) return kInvalidArgument;
  *type = gpu(device).links[link].type;
  return 0;
}
FAKE_API int nvmlDeviceGetP2PStatus(void* a, void* b, int, int* status) {
  *status = machine->p2p.contains({index_of(a), index_of(b)}) ? 0 : 1;
  return 0;
}
