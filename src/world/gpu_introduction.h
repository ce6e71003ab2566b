// SPDX-License-Identifier: Apache-2.0
// What a rank says about its GPU when the ranks of a communicator meet. Rank 0 sends the words of all ranks to all
// ranks, so they are short.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/status.h"
#include "src/driver/cuda/peers.h"
#include "src/world/device_staging.h"

namespace moeccl::comm {

// What may change until all memory is mapped; sent again then.
struct GpuAnswer {
  bool able = false;            // only ever changes to false
  bool reaches = false;         // the memory of all ranks of its host
  uint64_t kernel_staging = 0;  // of the persistent kernel; all ranks use the least
  std::string why;              // it is not able, or does not reach; may hold a driver's log. Cut to kMaxWhy bytes
  static constexpr size_t kMaxWhy = 448;

  std::vector<std::byte> encode() const;
  static Result<GpuAnswer> decode(std::span<const std::byte> bytes, uint32_t rank);
  static void fields(auto& io, auto& self);  // base/wire.h
};

struct GpuIntroduction {
  bool asked = false;  // the rank has a context; without one, nothing else is sent
  bool mps = false;    // the device is shared through the Multi-Process Service
  StagingOffer staging;
  driver::cuda::Uuid uuid{};
  std::string pci;  // the device's address, as the driver writes it
  GpuAnswer answer;

  std::vector<std::byte> encode() const;
  static Result<GpuIntroduction> decode(std::span<const std::byte> bytes, uint32_t rank);
  static void fields(auto& io, auto& self);  // base/wire.h
};

}  // namespace moeccl::comm
