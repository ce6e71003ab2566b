// SPDX-License-Identifier: Apache-2.0
// Sample placement on a thread of its own, with a deadline (NetMoE Algorithm 1, line 9). moeccl/solve.h states the
// contract.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "moeccl/solve.h"
#include "src/base/status.h"
#include "src/comm/stream.h"

namespace moeccl::comm {

class BackgroundSolver {
 public:
  BackgroundSolver() = default;
  ~BackgroundSolver();
  BackgroundSolver(const BackgroundSolver&) = delete;
  BackgroundSolver& operator=(const BackgroundSolver&) = delete;

  // Takes a checked problem, and copies its arrays. It replaces a problem that still waits for the thread.
  void submit(const moecclSampleProblem_t& problem);
  Status fetch(double deadline_us, int32_t* placement, moecclSampleAnswer_t* answer, moecclAnswerSource_t* source);
  int32_t n_samples();  // of the last problem

 private:
  struct OwnedProblem;
  void solve();  // the waiting problem, if there is one; on the thread

  std::mutex mutex_;
  std::condition_variable done_;
  std::shared_ptr<const OwnedProblem> latest_, pending_;
  uint64_t submitted_ = 0, handled_ = 0, solved_ = 0;  // numbers of problems; a solve may fail
  std::vector<int32_t> last_;
  moecclSampleAnswer_t last_answer_{};
  Status failure_;
  // Memory of the solver, for the thread only. It is not cleared, because much of it is never touched.
  std::unique_ptr<std::byte[]> memory_;
  size_t memory_bytes_ = 0;
  HostStream thread_{/*waiters_run=*/false};  // last, because it uses all of the above
};

}  // namespace moeccl::comm
