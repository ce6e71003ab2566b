// SPDX-License-Identifier: Apache-2.0
// Device memory that other processes open through a file descriptor (cuMemCreate and cuMemMap). IPC handles of
// cuMemAlloc memory work only between processes that see each other's process numbers. A descriptor has no such limit,
// so this memory is shared in the same way as all other memory of a host's ranks.
#pragma once

#include <span>

#include "src/base/fd.h"
#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

class VirtualMemory {
 public:
  VirtualMemory() = default;
  VirtualMemory(VirtualMemory&& other) noexcept { *this = std::move(other); }
  VirtualMemory& operator=(VirtualMemory&& other) noexcept;
  // May run on any thread. The memory is unmapped as soon as no operation is in flight (cuda/idle.h): whether this
  // waits for the device, as cuMemFree does, is not known. Other processes that have the memory open keep it.
  ~VirtualMemory();

  // Allocates zeroed memory. Returns Unsupported if the driver or the device has no such memory.
  static Result<VirtualMemory> create(Context context, size_t bytes);
  // Opens memory of another process. `mapped_bytes` is the mapped_bytes() of the original object.
  static Result<VirtualMemory> open(Context context, const Fd& fd, size_t mapped_bytes);
  // Returns a new descriptor for another process.
  Result<Fd> share() const;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  size_t mapped_bytes() const { return mapped_; }  // a multiple of the device's granularity

 private:
  Status map(int device);

  Context context_ = nullptr;
  uint64_t handle_ = 0;
  bool has_handle_ = false, is_mapped_ = false;
  Pointer address_ = 0;
  size_t mapped_ = 0;
};

// Gives the current context's device access to such memory of this process that was created for another device.
Status allow_access(const void* data, size_t mapped_bytes);
// Lets kernels of the given devices use a caller's buffer of this process. Peer access covers memory of cuMemAlloc, but
// memory of a pool or of cuMemMap has its own list of devices. `what` must be pointed(buffer).
Status allow_peers(const void* buffer, size_t bytes, const Pointed& what, std::span<const int> devices);

}  // namespace moeccl::driver::cuda
