// SPDX-License-Identifier: Apache-2.0
// A link between ranks whose buffers are CUDA memory. The peer's staging is either device memory (used directly by
// threads of one process, and opened through a file descriptor or an IPC handle between processes) or host memory that
// both devices can access. Signals are stores that this rank's stream makes once all its earlier work is done. Words
// and message headers stay in the shared segment.
#pragma once

#include <memory>

#include "src/driver/cuda.h"
#include "src/driver/cuda/vmm.h"
#include "transport/transport.h"

namespace moeccl::transport::cuda_ipc {

// A peer's device memory, kept open for the lifetime of this object.
class Opened {
 public:
  Opened() = default;
  Opened(Opened&& other) noexcept { *this = std::move(other); }
  Opened& operator=(Opened&& other) noexcept;
  ~Opened();
  static Result<Opened> open(driver::cuda::Context context, const driver::cuda::IpcHandle& handle);
  static Opened of(driver::cuda::VirtualMemory memory);
  std::byte* data() const { return data_ != nullptr ? data_ : virtual_.data(); }

 private:
  driver::cuda::Context context_ = nullptr;
  std::byte* data_ = nullptr;            // opened by handle
  driver::cuda::VirtualMemory virtual_;  // opened by descriptor
};
Result<driver::cuda::IpcHandle> export_memory(driver::cuda::Context context, const std::byte* data);

struct CudaPeer {
  driver::cuda::Stream stream = nullptr;  // this rank's
  std::byte* staging = nullptr;           // the peer's staging at an address that the device can access
  Opened opened;                          // keeps the staging open
  bool direct = false;                    // the peer is a thread of this process: its buffer addresses are valid here
};

class CudaLink final : public Link {
 public:
  CudaLink(std::unique_ptr<Link> words, CudaPeer peer);

  const char* name() const override { return peer_.direct ? "cuda thread" : "cuda"; }
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) override;
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  Status check_peer() override { return words_->check_peer(); }

 private:
  std::unique_ptr<Link> words_;  // the shared segment's link
  CudaPeer peer_;
};

}  // namespace moeccl::transport::cuda_ipc
