// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm_link.h"

#include <cstring>

#include "src/driver/memory.h"

namespace moeccl::transport::shm {

ShmLink::ShmLink(ShmPeer peer) : peer_(std::move(peer)) {
  const Segment& s = *peer_.segment;
  peer_words_ = {&s.board(), {s.blocks(0) + peer_.own_rank, s.blocks(1) + peer_.own_rank}};
  view_.staging = view_.messages = s.staging();
  view_.heap = peer_.heap != nullptr ? peer_.heap->data() : nullptr;
  view_.heap_bytes = peer_.heap_bytes;
  view_.same_process = peer_.same_process;
  view_.outboxes = s.outbox(0);
  view_.signals = &s.signal(peer_.own_rank, 0);
  if (peer_.can_read) parts_.reads = this;
}

Status ShmLink::read(uint64_t address, void* dst, size_t bytes) {
  return driver::read_process(peer_.pid, peer_.stamp, address, dst, bytes);
}

Result<PutState> ShmLink::put(uint64_t offset, const void* src, size_t bytes) {
  std::memcpy(view_.staging + offset, src, bytes);
  return PutState::kDone;
}

Status ShmLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  SignalLine& line = view_.signals[sig];
  // Release: pairs with the acquire load of `word` where execution_steps.cc waits; everything this rank wrote before is
  // visible there.
  line.word.store(static_cast<uint64_t>(tag) << 32 | number, std::memory_order_release);
  return {};
}

Status ShmLink::check_peer() {
  const Status alive = peer_.process == nullptr ? Status() : peer_.process->check();
  if (alive.ok()) return {};
  return error(moecclRemoteError, "rank {} died ({})", peer_.peer_rank, alive.message());
}

}  // namespace moeccl::transport::shm
