// SPDX-License-Identifier: Apache-2.0
// Send and Recv between ranks of a host as launches beside the persistent kernel's (kernels/cuda/messages.cuh): the
// area of a rank's device memory that they use, and what a launch is told.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cuda/messages_args.h"
#include "src/driver/cuda.h"
#include "src/exec/message.h"

namespace moeccl::exec {

class KernelMessages {
 public:
  // here: the ranks on this host, including this one. message_bytes: MOECCL_CUDA_MESSAGE_BYTES, the same on all ranks.
  KernelMessages(const Fabric& fabric, std::vector<uint32_t> here, uint64_t message_bytes)
      : fabric_(fabric), here_(std::move(here)), slot_bytes_(slot_bytes(message_bytes)) {}
  // Half of what a pair of ranks has for one direction is `message_bytes`.
  static uint64_t slot_bytes(uint64_t message_bytes) {
    return std::max<uint64_t>(
        256, 2 * message_bytes / (moeccl::cuda::kMessageWays * moeccl::cuda::kMessageBuffers) / 256 * 256);
  }
  static size_t area_bytes(size_t n_here, uint64_t message_bytes) {
    return message_bytes == 0 ? 0 : moeccl::cuda::message_area_bytes(n_here, slot_bytes(message_bytes));
  }
  // Allocates what groups of some thousand messages need: later, an allocation may wait for a kernel of another rank.
  Status prepare(driver::cuda::Context context);
  // areas: [n_ranks], as this device reaches them; null for ranks of other hosts.
  std::vector<moeccl::cuda::MessagePair> pairs(std::span<std::byte* const> areas) const;
  bool reaches(uint32_t peer) const;
  size_t memory_bytes() const;  // page-locked

  // Fills what differs between groups. Messages to this rank itself must pair up. Returns the blocks that can share the
  // work. A list that does not fit into the arguments is kept until the launch `number` has ended; 0: for ever.
  Result<uint32_t> fill(std::span<const Message> messages, driver::cuda::Context context, uint64_t number,
                        uint64_t n_ended, moeccl::cuda::MessagesArgs& a);

 private:
  struct List {
    driver::cuda::Memory memory;
    uint64_t number = 0;    // of the launch that uses it
    bool captured = false;  // a graph uses it
  };
  Result<const moeccl::cuda::MessageBuffer*> keep(std::span<const moeccl::cuda::MessageBuffer> messages,
                                                  driver::cuda::Context context, uint64_t number, uint64_t n_ended);

  const Fabric& fabric_;
  std::vector<uint32_t> here_;
  uint64_t slot_bytes_;
  std::vector<List> lists_;
};

}  // namespace moeccl::exec
