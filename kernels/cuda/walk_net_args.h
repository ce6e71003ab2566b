// SPDX-License-Identifier: Apache-2.0
// What the persistent kernel and its rank's proxy (exec/cuda/kernel_proxy.h) share when some ranks are on other hosts.
// All of it except the state is page-locked host memory.
//
// Outgoing: a lane's blocks copy the data of a put into a cell of the lane's queue and issue a command. The proxy takes
// commands in order and sends them over the network.
// Incoming: the network writes into `staging`, and the proxy announces what has arrived. The kernel's last lane copies
// it to the same place of the staging on the device and then stores the peer's flags, where the other lanes wait for
// them as they do for those of peers on the same host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moeccl::cuda {

inline constexpr uint32_t kNetCells = 16;      // of each queue
inline constexpr uint32_t kNetCommands = 64;   // of each queue
inline constexpr uint32_t kNetArrivals = 256;  // that wait for the kernel
inline constexpr uint32_t kNetRound = 64;      // arrivals that the kernel takes at once

// kPut: `bytes` of cell `cell` go to `offset` of the peer's staging. kSignal: `number` and `tag` on `sig`. kEnter, to
// all: a WalkEntry in the cell, followed by the WalkSplits of all ranks if `bytes` is not 0. kDone, to all: operation
// `offset` has ended here.
enum class NetCommand : uint32_t { kPut, kSignal, kEnter, kDone };
struct WalkCommand {
  uint32_t kind, peer;
  uint64_t offset;
  uint32_t bytes, cell, sig, number, tag, padding;
};
struct WalkQueue {
  alignas(64) uint64_t head;  // commands issued: released by the kernel, acquired by the proxy
  alignas(64) uint64_t tail;  // commands carried out: released by the proxy, acquired by the kernel
  uint64_t freed;             // cells that may be reused: ordered like tail
  alignas(64) WalkCommand commands[kNetCommands];
};

// With bytes > 0, that many bytes are at `value` of the staging and belong at the same place on the device. Otherwise,
// word number `word` of the header's done and word arrays gets `value`.
struct WalkArrival {
  uint64_t value;
  uint32_t bytes, word;
};
struct WalkArrivals {
  alignas(64) uint64_t head;  // released by the proxy, acquired by the kernel
  alignas(64) uint64_t tail;  // released by the kernel, acquired by the proxy
  alignas(64) WalkArrival ring[kNetArrivals];
};

// In device memory, initially zero; operations leave it for the next one.
template <uint32_t kQueues>
struct WalkNetCounts {
  uint64_t given[kQueues], used[kQueues];  // commands and cells of each queue
  uint64_t taken;                          // arrivals
  uint64_t until;                          // of this round
  uint32_t round, finished, over;          // between the blocks of the last lane
};

}  // namespace moeccl::cuda
