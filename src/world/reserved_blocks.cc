// SPDX-License-Identifier: Apache-2.0
#include "src/world/reserved_blocks.h"

#include <algorithm>

#include "src/driver/fork_page.h"

namespace moeccl::comm {

ReservedBlocks& ReservedBlocks::get() {
  static constinit driver::PerProcess<ReservedBlocks> all;
  return all.get();
}

uint32_t ReservedBlocks::take(const Wish& wish) {
  const std::lock_guard lock(mutex_);
  Device& device = devices_[wish.uuid];
  device.processes = std::max(device.processes, wish.processes);
  const uint32_t capacity = wish.capacity / device.processes;
  const uint32_t free = capacity - std::min(capacity, device.used);
  Share& share = device.shares[wish.communicator];
  if (share.takers == 0) {
    share.takers = wish.ranks;
    share.blocks = std::max(kLeast, free / (wish.ranks * wish.communicators));
  }
  const uint32_t blocks = std::min({share.blocks, wish.want, free});
  if (--share.takers == 0) device.shares.erase(wish.communicator);
  if (blocks < kLeast) return 0;
  device.used += blocks;
  return blocks;
}

void ReservedBlocks::give_back(const std::string& uuid, uint32_t blocks) {
  const std::lock_guard lock(mutex_);
  devices_[uuid].used -= blocks;
}

}  // namespace moeccl::comm
