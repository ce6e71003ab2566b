// SPDX-License-Identifier: Apache-2.0
// The re-placing combine over a MoeHost: the contract of moeccl/replace.h without its handles.
#pragma once

#include <memory>
#include <vector>

#include "moeccl/replace.h"
#include "moeccl/solve.h"
#include "src/comm/stream.h"
#include "src/moe/moe_layer.h"
#include "src/moe/replace_gain.h"
#include "src/routing/replace.h"

namespace moeccl::comm {

class MoeReplacement {
 public:
  // This call is collective. The layer must outlive the replacement.
  static Result<std::unique_ptr<MoeReplacement>> create(MoeLayer& layer, const moecclReplaceConfig_t* config);

  MoeLayer& layer() const { return layer_; }
  // This call is collective and blocks. The routing must outlive the step.
  Status begin(MoeRouting& routing, const int32_t* next, const int32_t* placement);
  Status rows(size_t* n_rows) const;
  Status residual(const void* x, const void* dispatched, void* in);
  Status combine(const void* in, void* out, Stream* stream);
  Status combine_backward(const MoeRouting::CombineGradients& g, Stream* stream);
  Status residual_backward(const void* grad_in, void* grad_dispatched, void* grad_x);
  Status info(moecclReplaceInfo_t* info);
  // Returns T * k: the number of this rank's choices in the step.
  size_t n_choices() const;

 private:
  // The first thing that a rank sends in begin(); the next rows of its samples and its choices follow.
  struct Hello {
    int32_t code = moecclSuccess;
    int32_t padding = 0;
    uint64_t hash = 0;  // of the given placement
    ReplaceGain::Times times;
  };
  MoeReplacement(MoeLayer& layer, const moecclReplaceConfig_t& config);
  uint64_t rows_of_sample() const;  // the most that a sample has in one operation
  // check() finds errors of one rank, which begin() then tells the others.
  Status check(const MoeRouting& routing, const int32_t* next, const int32_t* placement) const;
  Status begin_step(MoeRouting& routing, const int32_t* next, const int32_t* placement);
  // Begins without asking the other ranks: every sample stays.
  Status begin_at_home(MoeRouting& routing);
  bool skips(const Status& own);
  bool fits_at_home() const;
  Status exchange(const Status& own, const int32_t* next, const int32_t* placement);
  // Returns the next layer's rows of this rank's samples, in the columns of the counts.
  Result<std::vector<int32_t>> own_next(const int32_t* next) const;
  size_t columns(const MoeRouting& routing) const;  // of a sample's counts
  // Returns what a rank sends in begin() with this routing, and where the choices are in it.
  struct Sent {
    size_t choices_at = 0, bytes = 0;
  };
  Sent sent(const MoeRouting& routing) const;
  // Bounds the memory that a step takes besides its tables and choices.
  uint64_t solver_bytes(const MoeRouting& routing, uint32_t n_samples) const;
  Status take_next();
  Status take_choices();
  algo::CountRequest count_request() const;
  // Lets the background thread do its part of the step.
  void start(Status (MoeReplacement::*work)());
  // Waits for it. Returns its result.
  const Status& prepared();
  // The background thread's part: the placement, then its lists.
  Status solve_and_build();
  Status solve();
  moecclSampleProblem_t problem_of(const algo::SampleCounts& counts, std::vector<int32_t>& current);
  void price_links();
  Status run_solver(moecclSampleProblem_t problem, moecclSampleAnswer_t* chosen);
  Status build();
  Status build_at_home();
  void find_local_samples();
  void count_sent();
  // Returns true if every sample stays and there is no residual: the routing's own combine then does the work.
  bool combines_plainly() const { return facts_.keep && config_.residual == 0 && config_.mode == moecclReplaceSolve; }
  Status ready(const char* what);
  Status usable(const char* what) const;
  Status run(moecclOp_t op, bool weighted, const void* in, void* out, Stream* stream);
  using Moves = std::vector<algo::ResidualRows::Move>;
  Status move_rows(const Moves& moves, const void* from, void* to, bool add, bool on_device);

  MoeLayer& layer_;
  const uint32_t rank_, n_ranks_;
  moecclReplaceConfig_t config_;
  const plan::LevelTree tree_;  // a copy: the solver's thread may outlive the communicator
  algo::Residents residents_ = algo::Residents::kNone;
  MoeConfig moe_config_;  // the layer's, with residents if there is a residual
  std::vector<uint32_t> canonical_;
  std::vector<std::unique_ptr<MoeCandidate>> candidates_;  // like the layer's, for moe_config_
  std::vector<int32_t> node_;
  uint32_t n_nodes_ = 1;
  int32_t n_inner_ = 0;  // levels between nodes and ranks, and their groups, for the solver
  std::vector<int32_t> inner_group_;

  // The step.
  MoeRouting* routing_ = nullptr;
  uint64_t routing_version_ = 0;
  std::vector<uint64_t> tokens_of_;
  std::vector<double> inner_alpha_us_, inner_beta_us_;
  moecclSampleProblem_t links_{};  // only its figures of links
  algo::Samples samples_;
  algo::AllChoices choices_;
  std::vector<int32_t> next_;        // [samples][columns]
  std::vector<std::byte> gathered_;  // what the ranks sent in begin()
  size_t stride_ = 0, choices_at_ = 0;
  bool at_home_ = false;     // the step was begun without an exchange
  algo::ResidualRows rows_;  // the source of the lists
  // The caller's view of rows_: combine's rows, and where the residual goes.
  uint64_t n_rows_ = 0;
  std::vector<algo::ResidualRows::Move> of_rows_, of_tokens_;
  std::vector<int32_t> placement_, local_samples_;
  moecclReplaceInfo_t facts_{};
  uint64_t placement_hash_ = 0;
  uint64_t number_ = 0;  // MoeHost::next_number() of the last step
  algo::RoutingTables tables_;
  ReplaceGain gain_;
  ReplaceGain::Times times_;  // of the step, by this rank's clock
  double solve_us_ = 0, wait_us_ = -1, begin_us_ = 0;
  exec::Operation::Measured measured_, measured_backward_;
  Status prepared_;  // the result of the step's work, which calls may ask for again
  // Last, because its thread uses the other members.
  std::shared_ptr<HostStream> background_ = std::make_shared<HostStream>(/*waiters_run=*/false);
};

}  // namespace moeccl::comm
