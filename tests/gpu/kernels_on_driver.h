// SPDX-License-Identifier: Apache-2.0
// Launches by the driver for the kernels' contract test, in place of the emulation's. All memory of the test, its stack
// too, is page-locked, so that a device reaches it at the same addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moeccl::on_driver {

// Waits for the kernel. Ends the program when the driver fails: a context does not survive that.
void launch(const std::string& kernel, const void* args, size_t bytes, uint32_t blocks, uint32_t threads);

}  // namespace moeccl::on_driver
