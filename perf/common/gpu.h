// SPDX-License-Identifier: Apache-2.0
// What the benchmarks need of a GPU, by the CUDA driver opened at run time: MOECCL_CUDA_DRIVER, or libcuda.so.1. Every
// function but likely() ends the program with a sentence when there is no device.
#ifndef PERF_COMMON_GPU_H_
#define PERF_COMMON_GPU_H_

#include <cstddef>

namespace perf::gpu {

// Whether this machine seems to have a device. Starts nothing, so that processes may still be forked.
bool likely();
// Makes the rank's device current on this thread: ranks take devices in turn.
void use(int rank);
void* allocate(size_t bytes);
void release(void* data);
// On the default stream; they wait.
void upload(void* to, const void* from, size_t bytes);
void download(void* to, const void* from, size_t bytes);
void clear(void* data, size_t bytes);
void* make_stream();
void end_stream(void* stream);
void synchronize(void* stream);
// What is put on the stream in between becomes a graph instead, which launch_graph() puts on the stream.
void begin_capture(void* stream);
void* end_capture(void* stream);
void launch_graph(void* graph, void* stream);
void end_graph(void* graph);

}  // namespace perf::gpu

#endif  // PERF_COMMON_GPU_H_
