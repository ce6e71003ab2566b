// SPDX-License-Identifier: Apache-2.0
// How devices are connected.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "src/base/status.h"

namespace moeccl::driver::cuda {

using Uuid = std::array<char, 16>;

// Returns true if this process sees all of the devices and NVLink, or something as fast, joins `device` to every other
// device among them. Such links have native atomics for loads and stores, which no PCIe path has. Returns false if
// there is no other device.
bool joined_by_nvlink(int device, std::span<const Uuid> others);
// Returns the device's memory in bytes, or 0 if the driver does not report it.
uint64_t device_bytes(int device);

}  // namespace moeccl::driver::cuda
