// The little that the shim must know of CUDA: whether there are devices, which one is current, what a pointer names.
// Through the driver library, if it is there; the shim needs no CUDA to build or run.
#pragma once

#include <cstddef>

namespace moeccl::shim::device {

// Whether CUDA's driver is here and has a device for this process. The first call may initialise the driver.
bool present();
// The ordinal of the calling thread's current device; -1 when there is none.
int current();
// Makes the device current for the calling thread. False when it cannot; ordinal < 0 is nothing to do.
bool use(int ordinal);
// Whether the host cannot read `pointer`: memory of a device that is not managed.
bool owns(const void* pointer);
// Copies bytes of device memory to the host, after what is on the stream before. False on failure.
bool read(void* to, const void* from, size_t bytes, void* stream);

}  // namespace moeccl::shim::device
