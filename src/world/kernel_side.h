// SPDX-License-Identifier: Apache-2.0
// Decides whether, and how, a communicator's standard collectives on CUDA memory run as one persistent kernel per rank
// (exec/cuda/persistent_kernel.h). These kernels spin on each other's flags, so all must be resident together. Ranks
// that share a device must therefore be threads of one process, or of processes that share the device through the
// Multi-Process Service (without it, they take turns). Their blocks are reserved on the device for as long as the
// communicator lives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/runner.h"
#include "src/select/selection.h"
#include "src/world/neighbours.h"
#include "transport/cuda_ipc/cuda_link.h"

namespace moeccl::comm {

// A rank's staging on the device, in two halves, where NVLink joins the ranks' devices and each has enough memory.
inline constexpr uint64_t kStagingOverNvlink = uint64_t{64} << 20;

class KernelSide {
 public:
  // A rank's device, as known to all ranks.
  struct Seat {
    int32_t device = 0;
    std::string uuid;
    bool mps = false;  // the device is shared through the Multi-Process Service
  };
  struct Question {
    bootstrap::Session& session;
    HostSession& host_session;
    const Neighbours& neighbours;
    exec::StreamEngine& engine;
    exec::Fabric& fabric;
    std::vector<Seat> seats = {};  // [n_ranks]
    std::string unreached = {};    // a rank that does not reach the device memory of all ranks of its host, and why
    uint64_t staging_bytes = 0;    // the same on all ranks
  };
  // Collective call. Returns null, with the reason in *why, if some rank cannot take part.
  static Result<std::unique_ptr<KernelSide>> connect(const Question& question, std::string* why);
  ~KernelSide();

  exec::PersistentKernel& kernel() { return *kernel_; }
  exec::Runner& runner() { return *runner_; }
  Selector& selector() { return *selector_; }
  // Returns true if an operation of this size per rank runs here; larger ones use the copy engine. The same on all
  // ranks.
  bool takes(uint64_t bytes) const { return bytes <= most_bytes_; }

 private:
  KernelSide() = default;
  std::string uuid_;  // the device where blocks are reserved; empty if none are
  uint32_t reserved_ = 0;
  uint64_t most_bytes_ = 0;
  std::vector<transport::cuda_ipc::Opened> opened_;
  std::unique_ptr<exec::PersistentKernel> kernel_;
  std::unique_ptr<exec::Runner> runner_;
  std::unique_ptr<Selector> selector_;
};

}  // namespace moeccl::comm
