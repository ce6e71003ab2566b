// SPDX-License-Identifier: Apache-2.0
#include "src/driver/nvml.h"

#include <cstring>

#include "src/driver/dynamic_library.h"

namespace moeccl::driver {

namespace {

// The parts of NVML's ABI that are read here (nvml.h, version 11 and later).
struct Device;
struct PciInfo {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_sub_system_id;
  char bus_id[32];
};
struct Memory {
  unsigned long long total, free, used;
};
constexpr int kSuccess = 0, kEnabled = 1, kP2pRead = 0, kP2pOk = 0;
constexpr unsigned kMaxLinks = 36, kMaxGpus = 256;

struct Functions {
  int (*init)();
  int (*shutdown)();
  const char* (*error_string)(int);
  int (*count)(unsigned*);
  int (*handle)(unsigned, Device**);
  int (*name)(Device*, char*, unsigned);
  int (*pci)(Device*, PciInfo*);
  int (*memory)(Device*, Memory*);
  int (*capability)(Device*, int*, int*);
  int (*pcie_generation)(Device*, unsigned*);
  int (*pcie_width)(Device*, unsigned*);
  // Old drivers may lack these.
  int (*link_state)(Device*, unsigned, int*);
  int (*link_version)(Device*, unsigned, unsigned*);
  int (*link_remote_pci)(Device*, unsigned, PciInfo*);
  int (*link_remote_type)(Device*, unsigned, int*);
  int (*p2p)(Device*, Device*, int, int*);

  Status load(const DynamicLibrary& l) {
    l.maybe("nvmlDeviceGetMemoryInfo", &memory, "nvmlDeviceGetCudaComputeCapability", &capability,
            "nvmlDeviceGetMaxPcieLinkGeneration", &pcie_generation, "nvmlDeviceGetMaxPcieLinkWidth", &pcie_width,
            "nvmlDeviceGetNvLinkState", &link_state, "nvmlDeviceGetNvLinkVersion", &link_version,
            "nvmlDeviceGetNvLinkRemotePciInfo_v2", &link_remote_pci, "nvmlDeviceGetNvLinkRemoteDeviceType",
            &link_remote_type, "nvmlDeviceGetP2PStatus", &p2p);
    return l.resolve("nvmlInit_v2", &init, "nvmlShutdown", &shutdown, "nvmlErrorString", &error_string,
                     "nvmlDeviceGetCount_v2", &count, "nvmlDeviceGetHandleByIndex_v2", &handle, "nvmlDeviceGetName",
                     &name, "nvmlDeviceGetPciInfo_v3", &pci);
  }
};

template <size_t n>
std::string bounded(const char (&text)[n]) {
  return std::string(text, strnlen(text, n));
}

// GB/s of a link in each direction: NVLink 1 (P100) 20, NVLink 2 to 4 (V100, A100, H100) 25, NVLink 5 (B200) 50.
// `version` is one of nvml.h's NVML_NVLINK_VERSION_*: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0 and 5.0 are 1 to 7. Some drivers say
// 7 of an H100.
double link_rate(unsigned version, int compute_major) {
  constexpr unsigned k1_0 = 1, k5_0 = 7;
  constexpr int kBlackwell = 10;
  if (version < k1_0 || version > k5_0) return 0;
  return version == k1_0 ? 20 : version == k5_0 && compute_major >= kBlackwell ? 50 : 25;
}

void ask_links(const Functions& f, Device* device, NvmlGpu* gpu) {
  for (unsigned l = 0; f.link_state != nullptr && l < kMaxLinks; ++l) {
    int state = 0;
    if (f.link_state(device, l, &state) != kSuccess || state != kEnabled) continue;
    NvmlLink link;
    unsigned version = 0;
    if (f.link_version != nullptr && f.link_version(device, l, &version) == kSuccess)
      link.bytes_per_ns = link_rate(version, gpu->compute_major);
    PciInfo remote;
    std::memset(&remote, 0, sizeof(remote));
    if (f.link_remote_pci != nullptr && f.link_remote_pci(device, l, &remote) == kSuccess)
      link.remote_pci = bounded(remote.bus_id);
    int type = 255;
    if (f.link_remote_type == nullptr || f.link_remote_type(device, l, &type) != kSuccess) type = 255;
    link.remote = type == 0   ? NvmlLink::Remote::kGpu
                  : type == 1 ? NvmlLink::Remote::kCpu
                  : type == 2 ? NvmlLink::Remote::kSwitch
                              : NvmlLink::Remote::kUnknown;
    gpu->links.push_back(link);
  }
}

NvmlGpu ask_gpu(const Functions& f, Device* device, unsigned index) {
  NvmlGpu gpu;
  gpu.index = index;
  char text[96] = {};
  if (f.name(device, text, sizeof(text)) == kSuccess) gpu.name = bounded(text);
  PciInfo pci;
  std::memset(&pci, 0, sizeof(pci));
  if (f.pci(device, &pci) == kSuccess) gpu.pci = bounded(pci.bus_id);
  Memory memory = {};
  if (f.memory != nullptr && f.memory(device, &memory) == kSuccess) gpu.memory_bytes = memory.total;
  if (f.capability != nullptr) (void)f.capability(device, &gpu.compute_major, &gpu.compute_minor);
  unsigned value = 0;
  if (f.pcie_generation != nullptr && f.pcie_generation(device, &value) == kSuccess) gpu.pcie_generation = value;
  if (f.pcie_width != nullptr && f.pcie_width(device, &value) == kSuccess) gpu.pcie_lanes = value;
  ask_links(f, device, &gpu);
  return gpu;
}

Result<NvmlReport> ask_all(const Functions& f) {
  NvmlReport report;
  unsigned n = 0;
  if (const int rc = f.count(&n); rc != kSuccess)
    return error(moecclUnsupported, "NVML counts no GPUs: {}", f.error_string(rc));
  std::vector<Device*> handles;
  for (unsigned i = 0; i < n && i < kMaxGpus; ++i) {
    Device* device = nullptr;
    if (f.handle(i, &device) != kSuccess) continue;  // a GPU that fell off the bus
    handles.push_back(device);
    report.gpus.push_back(ask_gpu(f, device, i));
  }
  for (size_t a = 0; a < handles.size(); ++a) {
    report.gpus[a].reads_peer.assign(handles.size(), false);
    for (size_t b = 0; b < handles.size(); ++b) {
      int status = -1;
      report.gpus[a].reads_peer[b] =
          a == b ||
          (f.p2p != nullptr && f.p2p(handles[a], handles[b], kP2pRead, &status) == kSuccess && status == kP2pOk);
    }
  }
  return report;
}

}  // namespace

Result<NvmlReport> ask_nvml(const std::string& library) {
  MOECCL_ASSIGN_OR_RETURN(DynamicLibrary opened, DynamicLibrary::open(library, {"libnvidia-ml.so.1"}));
  Functions f = {};
  MOECCL_TRY(f.load(opened));
  if (const int rc = f.init(); rc != kSuccess)
    return error(moecclUnsupported, "nvmlInit fails: {}; does nvidia-smi work here?", f.error_string(rc));
  Result<NvmlReport> report = ask_all(f);
  f.shutdown();
  return report;
}

}  // namespace moeccl::driver
