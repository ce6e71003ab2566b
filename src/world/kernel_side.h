// SPDX-License-Identifier: Apache-2.0
// Whether, and how, a communicator's standard collectives on CUDA memory run as one persistent kernel a rank
// (exec/cuda/persistent_kernel.h). Its kernels spin on each other's flags, so all must be resident together: ranks that
// share a device are threads of one process, or of processes that share it through the Multi-Process Service (without
// it they take turns), and their blocks are reserved on the device for as long as the communicator lives.
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

class KernelSide {
 public:
  // A rank's device, as all ranks know it.
  struct Seat {
    int32_t device = 0;
    std::string uuid;
    bool mps = false;  // shared through the Multi-Process Service
  };
  struct Question {
    bootstrap::Session& session;
    const Neighbours& neighbours;
    exec::StreamEngine& engine;
    exec::Fabric& fabric;
    std::vector<Seat> seats = {};  // [n_ranks]
    bool all_reach_all = false;    // device memory of every rank is reached by every rank
    uint64_t staging_bytes = 0;    // the same on all ranks
    plan::Profile profile = {};
  };
  // Collective. Null, with the reason in *why, when some rank cannot.
  static Result<std::unique_ptr<KernelSide>> connect(const Question& question, std::string* why);
  ~KernelSide();

  exec::PersistentKernel& kernel() { return *kernel_; }
  exec::Runner& runner() { return *runner_; }
  Selector& selector() { return *selector_; }
  // Whether an operation of this size per rank runs here; larger ones take the copy engine's way. Alike on all ranks.
  bool takes(uint64_t bytes) const { return bytes <= most_bytes_; }

 private:
  KernelSide() = default;
  std::string uuid_;  // where blocks are reserved; empty: nowhere
  uint32_t reserved_ = 0;
  uint64_t most_bytes_ = 0;
  std::vector<transport::cuda_ipc::Opened> opened_;
  std::unique_ptr<exec::PersistentKernel> kernel_;
  std::unique_ptr<exec::Runner> runner_;
  std::unique_ptr<Selector> selector_;
};

}  // namespace moeccl::comm
