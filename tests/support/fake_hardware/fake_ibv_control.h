// SPDX-License-Identifier: Apache-2.0
// The controls that a test has over the fake libibverbs, beyond the machine that script.h describes: how its network
// behaves, what fails, and which objects still exist. The library exports fake_ibv_control() and fake_ibv_counts(). Its
// queue pairs connect threads of one process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fake {

struct IbvControl {
  // 0: posted data arrives before post_send returns. Otherwise a thread delivers it at most this many microseconds
  // later.
  void (*set_delay_us)(int most);
  // Pieces of 4 KiB of the pending writes arrive in any order. Completions come in order, as on a reliable queue pair.
  // Needs a delay.
  void (*set_unordered)(bool);
  // The next request that is posted on this queue pair (0: on any) completes with this status, and the queue pair
  // breaks.
  void (*fail_next)(uint32_t qp_num, int status, uint32_t vendor);
  // Requests complete neither with success nor with an error, as on rdma_rxe, for which 7 retries are endless.
  void (*set_silent)(bool);
  // All ports are down, as far as ibv_query_port says. No event tells of it.
  void (*set_down)(bool);
  // Raises an event of the device: ibv_abi::AsyncEvent::event_type.
  void (*raise)(const char* device, int event, int port);
  // No peer may use the existing regions any more, as if they had been invalidated.
  void (*invalidate_keys)();
  // From now on, registrations fail with this error number; 0: they work.
  void (*refuse_regions)(int error);
  // Sets the most inline data of a queue pair. Requests for more are refused.
  void (*set_inline)(uint32_t bytes);
  // Memory of the emulated CUDA driver: sets whether registrations work by dma-buf (else: EOPNOTSUPP) and by address,
  // as with nvidia-peermem (else: EFAULT).
  void (*set_device_memory)(bool dmabuf, bool peermem);
  // Data written to device memory stays on the bus until the same NIC reads from that memory, or until flush_device().
  // Its completion, and words that the NIC writes to host memory, come before that.
  void (*set_late_device)(bool);
  void (*flush_device)();
};
struct IbvCounts {
  int contexts, domains, queues, pairs, regions;
  int device_regions;                          // of these, in memory of the emulated CUDA driver
  uint64_t device_bytes_in, device_bytes_out;  // written to that memory, and read from it to be sent
  uint64_t late;                               // writes that waited for a flush
  size_t pinned_bytes;
  uint64_t requests, completions, bytes;
  uint32_t most_under_way;  // requests on one queue pair
  uint32_t overruns;        // of queues: requests that a device would have refused or lost
};

}  // namespace fake
