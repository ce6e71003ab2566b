// SPDX-License-Identifier: Apache-2.0
// The stream for this library's own work, which must not queue behind a caller's stream that waits for it.
#pragma once

#include "src/driver/cuda.h"

namespace moeccl::exec {

// Creates a stream of the context's highest priority. Fails with Unsupported if the device lets it wait behind streams
// of ordinary priority, which is tested once for each context of the process.
Result<driver::cuda::Stream> create_urgent_stream(driver::cuda::Context context);

}  // namespace moeccl::exec
