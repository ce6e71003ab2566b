// SPDX-License-Identifier: Apache-2.0
// Memory of the rank's GPU that its NICs access directly: peers' puts land there, and this rank's puts are read from
// there. The driver exports it to the NICs as a dma-buf, or the kernel module nvidia-peermem finds it by its addresses.
//
// A NIC's completion, and its write to host memory, say nothing about what it wrote into the GPU before: that may still
// be on the bus. A flush makes sure that it has arrived. It is a call of the GPU's driver, or a read by the same NIC,
// which follows its writes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/driver/cuda/rdma.h"
#include "transport/verbs/queue_pair.h"
#include "transport/verbs/regions.h"

namespace moeccl::transport::verbs {

inline constexpr uint32_t kFlushDepth = 4;  // requests of a flush; completions that a rail has room for besides links

class DeviceRegions {
 public:
  // Unsupported says why neither way works. The calling thread's CUDA context does not matter.
  static Result<std::unique_ptr<DeviceRegions>> make(std::span<const std::unique_ptr<Rail>> rails,
                                                     const DeviceMemory& memory);

  const char* way() const { return dmabuf_ ? "dma-buf" : "nvidia-peermem"; }
  uint64_t landing() const { return reinterpret_cast<uint64_t>(memory_.landing.data()); }
  uint64_t landing_bytes() const { return memory_.landing.size(); }
  // Returns one key for each piece of kDevicePiece.
  std::vector<uint32_t> landing_keys(size_t rail) const;
  // Returns the region from which NICs read `p`, and how many of *bytes it holds; null: this is not memory for puts.
  const Region* source(const void* p, size_t* bytes) const;

  // Connects a queue pair of each rail with itself, where a flush needs one. Their ids count up from first_id.
  Status connect_flush(const Env& settings, uint8_t timeout_code, uint32_t first_id);
  // One flush: begin_flush(), completed() until nothing is missing, and end_flush() for the result, all in one thread.
  Status begin_flush();
  bool flushing() const { return missing_ > 0; }
  void completed(const driver::ibv_abi::Completion& c);
  Status end_flush();

 private:
  DeviceRegions(std::span<const std::unique_ptr<Rail>> rails, const DeviceMemory& memory)
      : rails_(rails), memory_(memory) {}
  Status add(std::span<std::byte> range, unsigned access, std::vector<std::unique_ptr<Region>>* out);

  std::span<const std::unique_ptr<Rail>> rails_;
  DeviceMemory memory_;
  driver::cuda::RemoteWrites writes_ = driver::cuda::RemoteWrites::kRead;
  bool dmabuf_ = false;
  std::vector<std::unique_ptr<Region>> landing_, source_;
  uint64_t word_ = 0;  // where flushes read to
  std::unique_ptr<Region> word_region_;
  std::vector<std::unique_ptr<QueuePair>> flush_;  // by rail
  uint32_t first_id_ = 0, missing_ = 0;
  Status failure_;  // of the first failed flush; stays
};

}  // namespace moeccl::transport::verbs
