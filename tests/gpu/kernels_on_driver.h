// SPDX-License-Identifier: Apache-2.0
// Launches kernels through the driver for their contract test, in place of the emulation's launches. All memory of the
// test, including its stack, is page-locked, so that a device accesses it at the same addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moeccl::on_driver {

// Waits for the kernel. Ends the program when the driver fails, because a context does not survive that.
void launch(const std::string& kernel, const void* args, size_t bytes, uint32_t blocks, uint32_t threads);

}  // namespace moeccl::on_driver
