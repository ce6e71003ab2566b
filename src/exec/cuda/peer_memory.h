// SPDX-License-Identifier: Apache-2.0
// Device memory of a rank that streams and kernels of other ranks access: the staging of operations that run step by
// step, and the memory of a persistent kernel.
#pragma once

#include <memory>

#include "src/driver/cuda.h"
#include "src/driver/cuda/vmm.h"

namespace moeccl::exec {

class PeerMemory {
 public:
  struct Bytes {
    size_t plain = 0;   // of memory of cuMemAlloc
    size_t object = 0;  // of an object that processes open by a descriptor; 0: no other process opens it
  };
  PeerMemory() = default;
  // Allocates zeroed memory. If processes share it, it is an object, which stays until the last of them has closed it.
  // Where the driver has no such objects, it is plain memory with an IPC handle, which goes with its owner.
  static Result<PeerMemory> create(driver::cuda::Context context, const Bytes& bytes);
  std::byte* data() const;
  size_t bytes() const;  // of an object: mapped_bytes()
  // Returns what a descriptor gives to other processes, or null.
  const driver::cuda::VirtualMemory* object() const;

  // Called by each of the thread ranks that know each other's memory, before any of them uses it. From then on, all of
  // it is freed with the last rank's: a rank may come to an operation long after another one has left, and a kernel may
  // still look at the memory of a rank that has gone (it waits for that rank, and leaves when the host tells it to).
  // Each rank first waits for its own streams' work. head: the memory of their lowest rank.
  void join(std::byte* head);

 private:
  struct Owned {
    driver::cuda::Memory memory;
    driver::cuda::VirtualMemory object;
  };
  struct Circle;
  // Owned together with the circle, and by it alone once this rank has gone.
  std::shared_ptr<const Owned> own_;
  std::shared_ptr<Circle> circle_;  // owned by its members
};

}  // namespace moeccl::exec
