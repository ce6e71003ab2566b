// SPDX-License-Identifier: Apache-2.0
// How devices are joined.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "src/base/status.h"

namespace moeccl::driver::cuda {

using Uuid = std::array<char, 16>;

// Whether this process sees all of the devices, and NVLink, or what is as fast, joins `device` to each of them that is
// another one: between them loads and stores have native atomics, which no PCIe path has. False where there is no
// other.
bool joined_by_nvlink(int device, std::span<const Uuid> others);
// 0: the driver does not say.
uint64_t device_bytes(int device);

}  // namespace moeccl::driver::cuda
