// SPDX-License-Identifier: Apache-2.0
// The device memory of a persistent kernel, which kernels of other ranks access.
#pragma once

#include "src/driver/cuda.h"
#include "src/driver/cuda/vmm.h"

namespace moeccl::exec {

class KernelMemory {
 public:
  // Allocates zeroed memory. If processes share it, it is an object that they open by a descriptor, so that it stays
  // until the last of them has closed it. Memory with an IPC handle, where the driver has no such objects, does not.
  static Result<KernelMemory> create(driver::cuda::Context context, size_t bytes, bool for_processes);
  std::byte* data() const { return object() != nullptr ? object_.data() : memory_.data(); }
  size_t bytes() const { return object() != nullptr ? object_.mapped_bytes() : memory_.bytes(); }
  // Returns what a descriptor gives to other processes, or null.
  const driver::cuda::VirtualMemory* object() const { return object_.data() != nullptr ? &object_ : nullptr; }

  // Thread ranks that know each other's memory. A kernel may still look at the memory of a rank that has gone (it waits
  // for that rank, and leaves when the host tells it to), so all of it is freed with the last rank.
  // head: the memory of their lowest rank.
  static void join(std::byte* own, std::byte* head);
  static void leave(KernelMemory memory);

 private:
  driver::cuda::Memory memory_;
  driver::cuda::VirtualMemory object_;
};

}  // namespace moeccl::exec
