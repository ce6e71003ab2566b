// SPDX-License-Identifier: Apache-2.0
// Short work on the current context's device beside all streams of the program: on one stream of the library, for which
// nothing waits and which waits for nothing. It is made once for each context, because the driver may not return from
// the creation of a stream while many streams wait.
#pragma once

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

// Zeroes memory of the device, and waits.
Status zero(Pointer at, size_t bytes);

// Copies between CUDA memory and the host's, and waits. Memory that CUDA does not know is copied through page-locked
// memory: the driver holds a lock while it copies such memory, for which other threads' copies of this kind wait.
Status copy_aside(void* to, const void* from, size_t bytes, const std::string& what);

}  // namespace moeccl::driver::cuda
