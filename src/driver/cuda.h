// SPDX-License-Identifier: Apache-2.0
// CUDA through its driver library, which is opened at run time, so that building, linking and loading MoECCL needs
// nothing from CUDA. The declarations here are our own; the numbers are those of the driver's stable interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "src/base/status.h"

namespace moeccl::driver::cuda {

using Context = struct OpaqueContext*;
using Stream = struct OpaqueStream*;
using Event = struct OpaqueEvent*;
using Module = struct OpaqueModule*;
using Function = struct OpaqueFunction*;
using Pointer = uint64_t;  // CUdeviceptr
struct IpcHandle {
  char bytes[64];
};

// Only the numbers that are used here.
enum Attribute : int {
  kMultiprocessors = 16,
  kStreamMemOps64 = 122,
  // The contexts of this process share the device with other processes through the Multi-Process Service. CUDA 12.4.
  kMpsEnabled = 133
};
enum MemoryType : unsigned { kHostMemory = 1, kDeviceMemory = 2, kUnifiedMemory = 4 };
inline constexpr int kNotReady = 600, kAlreadyRegistered = 712, kPeerAlreadyEnabled = 704;

// The driver's functions with their own names and parameter types. Each returns 0 or an error number.
#define MOECCL_CUDA_FUNCTIONS(F)                                                                                    \
  F(cuInit, unsigned)                                                                                               \
  F(cuDriverGetVersion, int*)                                                                                       \
  F(cuGetErrorString, int, const char**)                                                                            \
  F(cuDeviceGetCount, int*)                                                                                         \
  F(cuDeviceGet, int*, int)                                                                                         \
  F(cuDeviceGetAttribute, int*, int, int)                                                                           \
  F(cuDeviceGetName, char*, int, int)                                                                               \
  F(cuDeviceGetUuid_v2, void*, int)                                                                                 \
  F(cuDevicePrimaryCtxRetain, Context*, int)                                                                        \
  F(cuCtxGetCurrent, Context*)                                                                                      \
  F(cuCtxSetCurrent, Context)                                                                                       \
  F(cuCtxGetDevice, int*)                                                                                           \
  F(cuDeviceCanAccessPeer, int*, int, int)                                                                          \
  F(cuCtxEnablePeerAccess, Context, unsigned)                                                                       \
  F(cuMemAlloc_v2, Pointer*, size_t)                                                                                \
  F(cuMemFree_v2, Pointer)                                                                                          \
  F(cuMemHostAlloc, void**, size_t, unsigned)                                                                       \
  F(cuMemFreeHost, void*)                                                                                           \
  F(cuMemHostRegister_v2, void*, size_t, unsigned)                                                                  \
  F(cuMemHostUnregister, void*)                                                                                     \
  F(cuMemHostGetDevicePointer_v2, Pointer*, void*, unsigned)                                                        \
  F(cuPointerGetAttributes, unsigned, int*, void**, Pointer)                                                        \
  F(cuMemcpyAsync, Pointer, Pointer, size_t, Stream)                                                                \
  F(cuMemcpyHtoDAsync_v2, Pointer, const void*, size_t, Stream)                                                     \
  F(cuMemcpyDtoHAsync_v2, void*, Pointer, size_t, Stream)                                                           \
  F(cuMemsetD8Async, Pointer, unsigned char, size_t, Stream)                                                        \
  F(cuThreadExchangeStreamCaptureMode, int*)                                                                        \
  F(cuCtxGetStreamPriorityRange, int*, int*)                                                                        \
  F(cuStreamCreate, Stream*, unsigned)                                                                              \
  F(cuStreamCreateWithPriority, Stream*, unsigned, int)                                                             \
  F(cuStreamGetCtx, Stream, Context*)                                                                               \
  F(cuStreamDestroy_v2, Stream)                                                                                     \
  F(cuStreamSynchronize, Stream)                                                                                    \
  F(cuStreamQuery, Stream)                                                                                          \
  F(cuStreamWaitEvent, Stream, Event, unsigned)                                                                     \
  F(cuStreamIsCapturing, Stream, int*)                                                                              \
  F(cuStreamGetCaptureInfo_v2, Stream, int*, uint64_t*, void**, const void**, size_t*)                              \
  F(cuStreamWriteValue64_v2, Stream, Pointer, uint64_t, unsigned)                                                   \
  F(cuStreamWaitValue64_v2, Stream, Pointer, uint64_t, unsigned)                                                    \
  F(cuEventCreate, Event*, unsigned)                                                                                \
  F(cuEventDestroy_v2, Event)                                                                                       \
  F(cuEventRecord, Event, Stream)                                                                                   \
  F(cuEventRecordWithFlags, Event, Stream, unsigned)                                                                \
  F(cuEventQuery, Event)                                                                                            \
  F(cuModuleLoadDataEx, Module*, const void*, unsigned, int*, void**)                                               \
  F(cuModuleUnload, Module)                                                                                         \
  F(cuModuleGetFunction, Function*, Module, const char*)                                                            \
  F(cuFuncGetAttribute, int*, int, Function)                                                                        \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, Function, int, size_t)                                       \
  F(cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, \
    void**)                                                                                                         \
  F(cuIpcGetMemHandle, IpcHandle*, Pointer)                                                                         \
  F(cuIpcOpenMemHandle_v2, Pointer*, IpcHandle, unsigned)                                                           \
  F(cuIpcCloseMemHandle, Pointer)
struct Driver {
#define MOECCL_CUDA_FUNCTION(name, ...) int (*name)(__VA_ARGS__);
  MOECCL_CUDA_FUNCTIONS(MOECCL_CUDA_FUNCTION)
#undef MOECCL_CUDA_FUNCTION
};

// Returns the driver, which is opened once per process (MOECCL_CUDA_DRIVER or libcuda.so.1), or null if there is none;
// why_absent() then gives the reason.
const Driver* driver();
// Returns the address of a function that only some drivers have, or null.
void* driver_symbol(const char* name);
const std::string& why_absent();
// Returns true if the driver is the tests' emulation, which brings its own kernels.
bool emulated();

// Returns success for 0. Otherwise the failure contains `what`, the driver's own text and the number.
Status check(int result, const std::string& what);

// Returns whether this process has loaded the driver (or MOECCL_CUDA_DRIVER names one), even one that driver() does not
// use. Never loads it by itself.
bool loaded();
// Returns the context that is current on this thread, or null. Never starts CUDA by itself.
Context current_context();
// Returns a number that no other context of this process has had: one that was reset keeps its address. Drivers before
// CUDA 12.0 have none, which gives 0.
uint64_t number_of(Context context);
// The driver's attributes of an address, read in one call.
struct Pointed {
  uint64_t type = 0;  // a MemoryType, or 0 for ordinary host memory
  // True if peer access covers the address. Otherwise it belongs to a pool, or to a mapping by cuMemMap that has its
  // own list of devices.
  bool for_peers = false;
  void* pool = nullptr;
  Pointer mapping = 0;
  size_t mapping_bytes = 0;
  bool on_device() const { return type >= kDeviceMemory; }
};
// Where the driver lacks functions that driver() needs, only the type is known.
Pointed pointed(const void* pointer);

// Makes a context current on this thread while it lives. Allocations and queries by the library in this time are not
// part of a graph that some thread captures, and must not end the capture (CU_STREAM_CAPTURE_MODE_RELAXED).
class Current {
 public:
  explicit Current(Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Context before_ = nullptr;
  bool changed_ = false;
  int capture_mode_ = 2;  // relaxed; after the exchange, the thread's own mode
};

// Zeroed memory of the context's device. When its owner has gone, on any thread, it is freed as soon as no operation is
// in flight on the context (cuda/idle.h).
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();
  static Result<Memory> device(Context context, size_t bytes);
  // Allocates page-locked host memory that the device reads and writes at the same address.
  static Result<Memory> pinned(Context context, size_t bytes);
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Context context_ = nullptr;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  bool pinned_ = false;
};

}  // namespace moeccl::driver::cuda
