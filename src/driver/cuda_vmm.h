// SPDX-License-Identifier: Apache-2.0
// Device memory that other processes open through a file descriptor (cuMemCreate and cuMemMap). Unlike memory of
// cuMemAlloc, whose IPC handles work only for processes that see each other's numbers, it goes wherever a descriptor
// goes, as all other memory that ranks of a host share.
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
  ~VirtualMemory();  // on any thread; who else has it open keeps it

  // Zeroed. Unsupported where the driver or the device has no such memory.
  static Result<VirtualMemory> create(Context context, size_t bytes);
  // What another process made; mapped_bytes: of that object.
  static Result<VirtualMemory> open(Context context, const Fd& fd, size_t mapped_bytes);
  // A new descriptor, for another process.
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

// Lets the current context's device use such memory of this process that was made for another device.
Status allow_access(const void* data, size_t mapped_bytes);
// Lets kernels of the given devices use a caller's buffer of this process as they use memory of cuMemAlloc, which peer
// access covers: memory of a pool or of cuMemMap has its own list of devices. what: pointed(buffer).
Status allow_peers(const void* buffer, size_t bytes, const Pointed& what, std::span<const int> devices);

}  // namespace moeccl::driver::cuda
