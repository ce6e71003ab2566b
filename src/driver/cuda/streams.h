// SPDX-License-Identifier: Apache-2.0
// Streams, events and what a stream does with memory. All calls are for the current context.
#pragma once

#include <memory>
#include <string>

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

// Owners of streams and events. A stream's end waits for its work. Any thread; the context that was current when the
// object was made is current then.
struct End {
  Context context = nullptr;
  void operator()(Stream stream) const;
  void operator()(Event event) const;
};
using StreamOwner = std::unique_ptr<OpaqueStream, End>;
using EventOwner = std::unique_ptr<OpaqueEvent, End>;
// Makes an event without timing.
Result<EventOwner> make_event();
// Makes a stream that does not wait for the default stream.
Result<StreamOwner> make_stream();
// Makes such a stream of the highest priority, which does not share a hardware channel with a program's ordinary
// streams.
Result<StreamOwner> make_first_stream();
// Waits for the stream's work.
Status synchronize(Stream stream, const std::string& what);
// Copies on a stream between any two places that the driver knows.
Status copy(void* to, const void* from, size_t bytes, Stream stream, const std::string& what);
// Fills device memory with a byte on a stream.
Status fill(void* at, unsigned char value, size_t bytes, Stream stream, const std::string& what);

}  // namespace moeccl::driver::cuda
