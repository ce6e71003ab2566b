// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/probe.h"

#include <cstring>

#include "src/driver/dynamic_library.h"

namespace moeccl::driver {

namespace {

// CUdevice_attribute of cuda.h.
constexpr int kMpsEnabled = 133;
constexpr int kMaxGpus = 256;

struct Functions {
  int (*init)(unsigned);
  int (*count)(int*);
  int (*get)(int*, int);
  int (*name)(char*, int, int);
  int (*pci)(char*, int, int);
  int (*memory)(size_t*, int);
  int (*attribute)(int*, int, int);
  int (*can_access)(int*, int, int);
  int (*error_name)(int, const char**);

  Status load(const DynamicLibrary& l) {
    return l.resolve("cuInit", &init, "cuDeviceGetCount", &count, "cuDeviceGet", &get, "cuDeviceGetName", &name,
                     "cuDeviceGetPCIBusId", &pci, "cuDeviceTotalMem_v2", &memory, "cuDeviceGetAttribute", &attribute,
                     "cuDeviceCanAccessPeer", &can_access, "cuGetErrorName", &error_name);
  }
  std::string error_text(int rc) const {
    const char* text = nullptr;
    return error_name(rc, &text) == 0 && text != nullptr ? text : format("error {}", rc);
  }
};

}  // namespace

Result<CudaReport> ask_cuda(const std::string& library) {
  MOECCL_ASSIGN_OR_RETURN(DynamicLibrary opened, DynamicLibrary::open(library, {"libcuda.so.1"}));
  Functions f = {};
  const Status loaded = f.load(opened);
  if (library.empty()) opened.keep();  // the driver starts threads
  MOECCL_TRY(loaded);
  if (const int rc = f.init(0); rc != 0) return error(moecclUnsupported, "cuInit fails: {}", f.error_text(rc));
  CudaReport report;
  int n = 0;
  if (const int rc = f.count(&n); rc != 0)
    return error(moecclUnsupported, "cuDeviceGetCount fails: {}", f.error_text(rc));
  std::vector<int> devices;
  for (int i = 0; i < n && i < kMaxGpus; ++i) {
    int device = 0;
    if (f.get(&device, i) != 0) continue;
    CudaGpu gpu;
    char text[256] = {};
    if (f.name(text, sizeof(text) - 1, device) == 0) gpu.name = text;
    std::memset(text, 0, sizeof(text));
    if (f.pci(text, sizeof(text) - 1, device) == 0) gpu.pci = text;
    size_t bytes = 0;
    if (f.memory(&bytes, device) == 0) gpu.memory_bytes = bytes;
    int mps = 0;  // unknown to drivers before CUDA 12.4
    gpu.mps = f.attribute(&mps, kMpsEnabled, device) == 0 && mps != 0;
    devices.push_back(device);
    report.gpus.push_back(gpu);
  }
  for (size_t a = 0; a < devices.size(); ++a)
    for (size_t b = 0; b < devices.size(); ++b) {
      int can = 0;
      report.gpus[a].reads_peer.push_back(a == b || (f.can_access(&can, devices[a], devices[b]) == 0 && can != 0));
    }
  return report;
}

}  // namespace moeccl::driver
