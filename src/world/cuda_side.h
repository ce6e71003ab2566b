// SPDX-License-Identifier: Apache-2.0
// The part of a communicator for CUDA memory. Its links, staging, counters and plans are separate from those for host
// memory, so that operations on either kind keep their own order of staging halves and signals. It exists if every rank
// had a CUDA context when it joined.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/exec/cuda/peer_memory.h"
#include "src/exec/cuda/stream_engine.h"
#include "src/exec/fabric.h"
#include "src/exec/runner.h"
#include "src/select/selection.h"
#include "src/world/kernel_side.h"
#include "src/world/neighbours.h"
#include "transport/cuda_net/cuda_net.h"

namespace moeccl::comm {

class CudaSide {
 public:
  // Collective call. Returns null without an error if a rank has no context or its device cannot take part. *why then
  // names that rank and the reason; it is empty if no rank asked for CUDA.
  static Result<std::unique_ptr<CudaSide>> connect(bootstrap::Session& session, HostSession& host_session,
                                                   const Neighbours& n, std::string* why);
  ~CudaSide();

  exec::Fabric& fabric() { return fabric_; }
  exec::StreamEngine& engine() { return *engine_; }
  driver::cuda::Context context() const { return engine_->context(); }
  exec::Runner& runner() { return *runner_; }
  Selector& selector() { return *selector_; }
  size_t memory_bytes() const;
  // Says, for a person, how data reaches ranks that do not use this rank's device memory; the same on all ranks. Empty
  // if all do.
  const std::string& path() const { return path_; }
  // Returns the persistent kernel's part, or null if there is none.
  KernelSide* kernel_side() { return kernel_side_.get(); }

  // Makes a buffer accessible to kernels of this process's other ranks that use it directly from other devices. `what`
  // must be pointed(buffer).
  Status open_to_peers(const void* buffer, size_t bytes, const driver::cuda::Pointed& what) const;
  Status open_to_peers(const void* buffer, size_t bytes) const;

  // True if the last call used CUDA memory: a call without buffers uses the same kind as the call before it.
  bool used_last = false;
  bool stream_decides = false;  // the current call has a CUDA stream, whatever its pointers are

 private:
  class Connector;
  explicit CudaSide(const Neighbours& n);

  std::unique_ptr<exec::StreamEngine> engine_;
  std::vector<int> peer_devices_;  // of ranks that use this rank's buffers directly
  exec::PeerMemory staging_;       // empty if ranks can reach only each other's host memory
  // A rank of another process that has the staging open by a handle.
  struct Holder {
    std::shared_ptr<transport::shm::Segment> segment;
    std::shared_ptr<const driver::ProcessWatch> process;
  };
  std::vector<Holder> holders_;
  std::vector<std::shared_ptr<transport::shm::Segment>> segments_;
  exec::Fabric fabric_;
  std::unique_ptr<exec::Runner> runner_;
  transport::cuda_net::CudaNet* net_ = nullptr;  // the fabric's engine, if ranks are on several hosts
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<KernelSide> kernel_side_;
  std::string path_;
};

}  // namespace moeccl::comm
