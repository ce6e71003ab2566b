#include "transport/shm/shm_link.h"

#include <cstring>

#include "src/driver/memory.h"

namespace moeccl::transport::shm {

Status ShmLink::read(uint64_t address, void* dst, size_t bytes) {
  return driver::read_process(peer_.pid, peer_.stamp, address, dst, bytes);
}

Result<PutState> ShmLink::put(uint64_t offset, const void* src, size_t bytes) {
  std::memcpy(peer_.segment->staging() + offset, src, bytes);
  return PutState::kDone;
}

Status ShmLink::signal(uint32_t sig, uint32_t number, uint32_t tag) {
  SignalLine& line = peer_.segment->signal(peer_.own_rank, sig);
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
