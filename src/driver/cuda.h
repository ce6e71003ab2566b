// CUDA through its driver library, opened at run time: nothing of CUDA is needed to build, link or load MoECCL. The
// declarations here are our own; their numbers are those of the driver's stable interface.
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

// The numbers that are used here.
enum Attribute : int {
  kMultiprocessors = 16,
  kUnifiedAddressing = 41,
  kComputeMajor = 75,
  kStreamMemOps64 = 122,
  // Contexts of this process share the device with other processes through the Multi-Process Service. CUDA 12.4.
  kMpsEnabled = 133
};
enum MemoryType : unsigned { kHostMemory = 1, kDeviceMemory = 2, kUnifiedMemory = 4 };
inline constexpr int kNotReady = 600, kAlreadyRegistered = 712, kPeerAlreadyEnabled = 704;

// The driver's functions by their own names. Each returns 0 or an error number.
struct Driver {
  int (*cuInit)(unsigned);
  int (*cuDriverGetVersion)(int*);
  int (*cuGetErrorString)(int, const char**);
  int (*cuDeviceGetCount)(int*);
  int (*cuDeviceGet)(int*, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDeviceGetName)(char*, int, int);
  int (*cuDeviceGetUuid_v2)(void*, int);
  int (*cuDevicePrimaryCtxRetain)(Context*, int);
  int (*cuCtxGetCurrent)(Context*);
  int (*cuCtxSetCurrent)(Context);
  int (*cuCtxGetDevice)(int*);
  int (*cuDeviceCanAccessPeer)(int*, int, int);
  int (*cuCtxEnablePeerAccess)(Context, unsigned);
  int (*cuMemAlloc_v2)(Pointer*, size_t);
  int (*cuMemFree_v2)(Pointer);
  int (*cuMemHostAlloc)(void**, size_t, unsigned);
  int (*cuMemFreeHost)(void*);
  int (*cuMemHostRegister_v2)(void*, size_t, unsigned);
  int (*cuMemHostUnregister)(void*);
  int (*cuMemHostGetDevicePointer_v2)(Pointer*, void*, unsigned);
  int (*cuPointerGetAttribute)(void*, int, Pointer);
  int (*cuMemcpyAsync)(Pointer, Pointer, size_t, Stream);
  int (*cuMemcpyHtoDAsync_v2)(Pointer, const void*, size_t, Stream);
  int (*cuMemcpyDtoHAsync_v2)(void*, Pointer, size_t, Stream);
  int (*cuMemsetD8Async)(Pointer, unsigned char, size_t, Stream);
  int (*cuStreamCreate)(Stream*, unsigned);
  int (*cuStreamDestroy_v2)(Stream);
  int (*cuStreamSynchronize)(Stream);
  int (*cuStreamQuery)(Stream);
  int (*cuStreamWaitEvent)(Stream, Event, unsigned);
  int (*cuStreamIsCapturing)(Stream, int*);
  int (*cuStreamWriteValue64_v2)(Stream, Pointer, uint64_t, unsigned);
  int (*cuStreamWaitValue64_v2)(Stream, Pointer, uint64_t, unsigned);
  int (*cuEventCreate)(Event*, unsigned);
  int (*cuEventDestroy_v2)(Event);
  int (*cuEventRecord)(Event, Stream);
  int (*cuEventQuery)(Event);
  int (*cuModuleLoadData)(Module*, const void*);
  int (*cuModuleUnload)(Module);
  int (*cuModuleGetFunction)(Function*, Module, const char*);
  int (*cuLaunchKernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                        void**);
  int (*cuIpcGetMemHandle)(IpcHandle*, Pointer);
  int (*cuIpcOpenMemHandle_v2)(Pointer*, IpcHandle, unsigned);
  int (*cuIpcCloseMemHandle)(Pointer);
};

// The driver, opened once for the process (MOECCL_CUDA_DRIVER or libcuda.so.1); or why there is none.
const Driver* driver();
const std::string& why_absent();
// Whether the driver is the tests' emulation, which brings its own kernels.
bool emulated();

// Success for 0; else a sentence with `what`, the driver's own words and the number.
Status check(int result, const std::string& what);

// The context that is current on this thread, or null; never starts CUDA by itself.
Context current_context();
// What a pointer is to the driver: 0 for ordinary host memory.
unsigned memory_type(const void* pointer);

// Makes a context current on this thread while it lives.
class Current {
 public:
  explicit Current(Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  Context before_ = nullptr;
  bool changed_ = false;
};

// Memory of the current context's device, zeroed; freed with its owner, whatever thread that is.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();
  static Result<Memory> device(Context context, size_t bytes);
  // Page-locked host memory that the device reads and writes at the same address.
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
