// SPDX-License-Identifier: Apache-2.0
// The blocks of persistent kernels that each device of this process holds at once.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "kernels/cuda/walk_args.h"

namespace moeccl::comm {

// Thread-safe.
class ReservedBlocks {
 public:
  // Enough for every program to start: a block for each lane, and one for data from the network.
  static constexpr uint32_t kLeast = moeccl::cuda::kWalkMostLanes + 1;

  struct Wish {
    std::string uuid;            // of the device
    uint64_t communicator = 0;   // its key
    uint32_t ranks = 1;          // of the communicator, on the device and in this process; each takes once
    uint32_t capacity = 0;       // of the device
    uint32_t want = 0;           // the most blocks for one rank
    uint32_t communicators = 1;  // that the free blocks would serve alike
    uint32_t processes = 1;      // that use the device, each with its own account; the largest ever passed counts
  };

  static ReservedBlocks& get();

  // Reserves between kLeast and `want` blocks and returns their number, or 0 if too few are free. All ranks of a
  // communicator get as many as the first, because the slowest one determines the time.
  uint32_t take(const Wish& wish);
  void give_back(const std::string& uuid, uint32_t blocks);

 private:
  struct Share {
    uint32_t blocks = 0, takers = 0;  // ranks that have not taken theirs
  };
  struct Device {
    uint32_t used = 0, processes = 1;
    std::map<uint64_t, Share> shares;  // of communicators whose ranks are taking blocks
  };
  std::mutex mutex_;
  std::map<std::string, Device> devices_;
};

}  // namespace moeccl::comm
