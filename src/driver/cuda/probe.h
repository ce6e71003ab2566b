// SPDX-License-Identifier: Apache-2.0
// Reads what the CUDA driver reports about the GPUs. cuInit leaves state that a forked child cannot use, so this is
// only for short-lived programs (moeccl doctor). Library initialization uses NVML instead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/status.h"

namespace moeccl::driver {

struct CudaGpu {
  std::string name, pci;
  uint64_t memory_bytes = 0;
  bool mps = false;              // this process shares the GPU through the Multi-Process Service
  std::vector<bool> reads_peer;  // [n_gpus]
};

struct CudaReport {
  std::vector<CudaGpu> gpus;
};

// `library` is a path to use instead of libcuda.so.1. Returns Unsupported when there is no such library, or no driver
// behind it.
Result<CudaReport> ask_cuda(const std::string& library = "");

}  // namespace moeccl::driver
