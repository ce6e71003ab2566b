// SPDX-License-Identifier: Apache-2.0
// Re-placing combine over a MoeHost: the contract of moeccl/replace.h without its handles.
#pragma once

#include <memory>
#include <vector>

#include "moeccl/replace.h"
#include "moeccl/solve.h"
#include "src/moe/background.h"
#include "src/moe/moe_layer.h"
#include "src/routing/replace.h"

namespace moeccl::comm {

class MoeReplacement {
 public:
  // Collective. The layer outlives the replacement.
  static Result<std::unique_ptr<MoeReplacement>> create(MoeLayer& layer, const moecclReplaceConfig_t& config);

  MoeLayer& layer() const { return layer_; }
  // Collective, blocks. The routing outlives the step.
  Status begin(MoeRouting& routing, const int32_t* next, const int32_t* placement);
  Status rows(size_t* n_rows) const;
  Status residual(const void* x, const void* dispatched, void* in);
  Status combine(const void* in, void* out, moecclStream_t stream);
  Status combine_backward(const MoeRouting::CombineGradients& g, moecclStream_t stream);
  Status residual_backward(const void* grad_in, void* grad_dispatched, void* grad_x);
  Status info(moecclReplaceInfo_t* info);
  // T * k of this rank in the step.
  size_t n_choices() const;

 private:
  struct Hello;
  MoeReplacement(MoeLayer& layer, const moecclReplaceConfig_t& config);
  // What one rank has to say in begin(), and what the others said.
  Status check(const MoeRouting& routing, const int32_t* next, const int32_t* placement) const;
  Status exchange(const Status& own, const int32_t* next, const int32_t* placement);
  Status take_next(const std::byte* blobs, size_t stride, size_t offset);
  // The background thread's part: the placement, then the lists of it.
  Status solve_and_build();
  Status solve();
  Status run_solver(moecclSampleProblem_t problem, moecclSampleAnswer_t* chosen);
  Status build();
  Status ready(const char* what);
  Status usable(const char* what) const;
  Status run(moecclOp_t op, bool weighted, const void* in, void* out, moecclStream_t stream);
  Status move_rows(const std::vector<algo::ResidualRows::Move>& moves, const void* from, void* to, bool add);

  MoeLayer& layer_;
  moecclReplaceConfig_t config_;
  MoeConfig moe_config_;  // the layer's, with residents when the residual is inlined
  std::vector<uint32_t> canonical_;
  std::vector<std::unique_ptr<MoeCandidate>> candidates_;  // as the layer's, of moe_config_
  std::vector<int32_t> node_;
  uint32_t n_nodes_ = 1;

  // The step.
  MoeRouting* routing_ = nullptr;
  uint64_t routing_version_ = 0;
  std::vector<uint64_t> tokens_of_;
  algo::Samples samples_;
  algo::AllChoices choices_;
  std::vector<int32_t> next_;  // [samples][n_experts]
  algo::ResidualRows rows_;
  std::vector<int32_t> placement_, local_samples_;
  moecclReplaceInfo_t facts_{};
  uint64_t placement_hash_ = 0;
  uint64_t number_ = 0;  // MoeHost::next_number() of the last one
  algo::RoutingTables tables_;
  double solve_us_ = 0, wait_us_ = -1;
  exec::Operation::Measured measured_, measured_backward_;
  std::shared_ptr<Background> background_ = std::make_shared<Background>();  // last: its thread uses the others
};

}  // namespace moeccl::comm
