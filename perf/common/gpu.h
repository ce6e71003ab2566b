// SPDX-License-Identifier: Apache-2.0
// The GPU functions that the benchmarks need, through the CUDA driver opened at run time: MOECCL_CUDA_DRIVER or
// libcuda.so.1. Every function except likely() ends the program with a sentence when there is no device.
#ifndef PERF_COMMON_GPU_H_
#define PERF_COMMON_GPU_H_

#include <cstddef>

namespace perf::gpu {

// Returns whether this machine seems to have a device. Starts nothing, so that processes may still be forked.
bool likely();
// Makes the rank's device current on this thread. Ranks take devices in turn.
void use(int rank);
void* allocate(size_t bytes);
void release(void* data);
// These run on the default stream and wait for the end.
void upload(void* to, const void* from, size_t bytes);
void download(void* to, const void* from, size_t bytes);
void clear(void* data, size_t bytes);
void* make_stream();
void end_stream(void* stream);
void synchronize(void* stream);
// Work that is put on the stream between the two calls becomes a graph instead, which launch_graph() puts on the
// stream.
void begin_capture(void* stream);
void* end_capture(void* stream);
void launch_graph(void* graph, void* stream);
void end_graph(void* graph);

}  // namespace perf::gpu

#endif  // PERF_COMMON_GPU_H_
