// SPDX-License-Identifier: Apache-2.0
// NVIDIA GPUs through NVML, which is opened on demand. Only reads and touches no CUDA context, so it is safe before
// fork().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/status.h"

namespace moeccl::driver {

struct NvmlLink {
  enum class Remote : uint8_t { kGpu, kCpu, kSwitch, kUnknown };
  Remote remote = Remote::kUnknown;
  std::string remote_pci;   // as NVML writes it, "00000000:3B:00.0"; "" if not reported
  double bytes_per_ns = 0;  // of one link in each direction, from its version; 0 if unknown
};

struct NvmlGpu {
  uint32_t index = 0;
  std::string name, pci;
  uint64_t memory_bytes = 0;
  int compute_major = 0, compute_minor = 0;
  uint32_t pcie_generation = 0, pcie_lanes = 0;  // the maximum that slot and GPU support together
  std::vector<NvmlLink> links;                   // active NVLinks, one entry each
  std::vector<bool> reads_peer;                  // [n_gpus]: true if this GPU can read that GPU's memory
};

struct NvmlReport {
  std::vector<NvmlGpu> gpus;
};

// `library` is a path to use instead of libnvidia-ml.so.1. Returns Unsupported when there is no such library, or no
// driver behind it.
Result<NvmlReport> ask_nvml(const std::string& library = "");

}  // namespace moeccl::driver
