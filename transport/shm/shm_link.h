// SPDX-License-Identifier: Apache-2.0
// Links between ranks of one host: threads of one process, or processes.
#pragma once

#include <memory>

#include "src/driver/memory.h"
#include "src/driver/process.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace moeccl::transport::shm {

struct ShmPeer {
  uint32_t own_rank = 0, peer_rank = 0;
  std::shared_ptr<Segment> segment;  // the peer's; shared because the thread ranks of a process use one mapping
  // The peer's symmetric heap, mapped here; shared by the links of all communicators with the peer's process. Null for
  // our own process.
  std::shared_ptr<driver::Mapping> heap;
  size_t heap_bytes = 0;
  bool same_process = false;
  int pid = 0;  // the peer's process
  driver::ProcessStamp stamp;
  std::shared_ptr<const driver::ProcessWatch> process;  // null for our own process
  bool can_read = false;                                // process_vm_readv was tried and works
};

class ShmLink final : public Link, private Reads {
 public:
  explicit ShmLink(ShmPeer peer);

  const char* name() const override { return peer_.same_process ? "thread" : "shm"; }
  Result<PutState> put(uint64_t offset, const void* src, size_t bytes) override;
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  Status check_peer() override;

 private:
  Status read(uint64_t address, void* dst, size_t bytes) override;

  ShmPeer peer_;
};

}  // namespace moeccl::transport::shm
