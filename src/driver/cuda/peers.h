// SPDX-License-Identifier: Apache-2.0
// How devices are connected.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

using Uuid = std::array<char, 16>;

// Returns true if NVLink, or something as fast, joins `device` to every other device among them. Such links have native
// atomics for loads and stores, which no PCIe path has. `hidden` answers for the device others[i] where this process
// does not see it (CUDA_VISIBLE_DEVICES). Returns false if there is no other device.
bool joined_by_nvlink(int device, std::span<const Uuid> others, const std::function<bool(size_t i)>& hidden);
// Returns the device's memory in bytes, or 0 if the driver does not report it.
uint64_t device_bytes(int device);
// Returns the PCI address of the context's device as the driver writes it, or "".
std::string pci_address(Context context);

}  // namespace moeccl::driver::cuda
