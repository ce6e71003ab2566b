// SPDX-License-Identifier: Apache-2.0
// Windows that MoECCL serves (core_windows.cc).
#pragma once

#include "shim/nccl/abi.h"

namespace moeccl::shim {

// Returns whether `window` is a live one of this communicator; if so, *number is its number under Rma.
bool find_window(ncclWindow_t window, ncclComm_t comm, uint32_t* number);
// Returns whether `window` is a live one of any communicator.
bool is_our_window(ncclWindow_t window);
// Forgets the windows of a communicator that ends.
void drop_windows(ncclComm_t comm);

}  // namespace moeccl::shim
