// SPDX-License-Identifier: Apache-2.0
// The stream for this library's own work, and how many callers' streams may wait for that work on the device.
#pragma once

#include <string>

#include "src/driver/cuda/streams.h"

namespace moeccl::exec {

// Returns the number of hardware queues of a device (CUDA_DEVICE_MAX_CONNECTIONS: 8, at most 32). With more streams
// than this, two may share a queue, where one that waits holds up what comes behind it.
uint32_t hardware_queues();
// Returns the remedy, for messages about work that does not get on.
std::string held_up();

// Creates a stream of the context's highest priority.
Result<driver::cuda::StreamOwner> create_urgent_stream(driver::cuda::Context context);

// Returns how many streams of the context may wait on the device at the same time while an urgent stream still gets on.
// A stream that waits occupies a hardware queue, whatever its priority. The result may be 0; SIZE_MAX means that no
// limit was found. It is measured once for each context of the process, when its first urgent stream is created; before
// that it is 0.
size_t streams_that_may_wait(driver::cuda::Context context);

// Notes that several ranks of this process work on the context, and returns whether it was noted. Where all queues have
// work, one rank's part of an operation comes behind other work, perhaps behind another rank's stream that waits for
// that operation.
void share_context(driver::cuda::Context context);
bool is_shared(driver::cuda::Context context);

}  // namespace moeccl::exec
