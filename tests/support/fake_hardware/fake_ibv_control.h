// SPDX-License-Identifier: Apache-2.0
// What a test may ask of the fake libibverbs beyond the machine that script.h describes: how its network behaves, what
// fails, and what is still there. Found in the library by name: fake_ibv_control() and fake_ibv_counts(). Its queue
// pairs connect threads of one process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake {

struct IbvControl {
  // 0: what is posted arrives before post_send returns. Else a thread delivers it so many microseconds later at most.
  void (*set_delay_us)(int most);
  // Pieces of 4 KiB of the writes that wait arrive in any order; completions come in order, as those of a reliable
  // queue pair do. Needs a delay.
  void (*set_unordered)(bool);
  // The next request that is posted on this queue pair (0: on any) completes so, and the queue pair breaks.
  void (*fail_next)(uint32_t qp_num, int status, uint32_t vendor);
  // An event of the device: ibv_abi::AsyncEvent::event_type.
  void (*raise)(const char* device, int event, int port);
  // No peer may use regions that exist any more: as if they had been invalidated.
  void (*invalidate_keys)();
  // From now on registrations fail with this error number; 0: they work.
  void (*refuse_regions)(int error);
  // Inline data that queue pairs have at most; larger wishes are refused.
  void (*set_inline)(uint32_t bytes);
  // Memory of the emulated CUDA driver: whether registrations by dma-buf work (else: EOPNOTSUPP), and by address, as
  // nvidia-peermem does it (else: EFAULT).
  void (*set_device_memory)(bool dmabuf, bool peermem);
  // What is written there stays on the bus until the same NIC reads from there, or flush_device(): its completion, and
  // words that it writes to host memory, come first.
  void (*set_late_device)(bool);
  void (*flush_device)();
};
struct IbvCounts {
  int contexts, domains, queues, pairs, regions;
  int device_regions;                          // of them: memory of the emulated CUDA driver
  uint64_t device_bytes_in, device_bytes_out;  // written there, and read from there to be sent
  uint64_t late;                               // writes that waited for a flush
  size_t pinned_bytes;
  uint64_t requests, completions, bytes;
  uint32_t most_under_way;  // requests on one queue pair
  uint32_t overruns;        // of queues: what a device would have refused or lost
};

}  // namespace fake
