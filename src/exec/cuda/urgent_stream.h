// SPDX-License-Identifier: Apache-2.0
// The stream of this library's own work, which must not stand behind a caller's stream that waits for it.
#pragma once

#include "src/driver/cuda.h"

namespace moeccl::exec {

// A stream of the context's highest priority. Unsupported when the device lets it wait behind streams of ordinary
// priority, which is tried once for each context of the process.
Result<driver::cuda::Stream> create_urgent_stream(driver::cuda::Context context);

}  // namespace moeccl::exec
