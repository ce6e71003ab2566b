// SPDX-License-Identifier: Apache-2.0
// Chooses the plan of a call on replicated experts among the ways that the operation has, and builds it.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/algo/experts/gradient_reduce.h"
#include "src/algo/replica_move.h"
#include "src/algo/replica_reduce.h"
#include "src/comm/communicator.h"
#include "src/moe/experts/expert_choice.h"

namespace moeccl::comm {

// A call whose arguments have passed the checks.
struct CheckedCall {
  moecclOp_t op = moecclOpExpertAllReduce;
  uint64_t count = 0;
  uint32_t element_bytes = 1;
  bool average = false;
  algo::ReplicaPlacement placement;
};

// Where a call runs: the selector and the staging for its buffers' kind of memory.
struct Side {
  const Selector& selector;
  uint64_t staging_bytes;
  bool cuda;
  plan::Reach reach(bool reachable) const { return selector.shape_of(PlanKey{}, reachable).reach; }
};

// Calls that move rows: CollectGradients, PlaceWeights, ReduceGradients.
using ExpertRows = std::variant<algo::ReplicaMove, algo::GradientReduce>;

class ExpertPlans {
 public:
  // All three must outlive this object.
  ExpertPlans(const Communicator& comm, const Side& side, const CheckedCall& call)
      : comm_(comm), side_(side), call_(call) {}

  // Returns the ways that apply. Without `decides`, the answer changes no later one. reachable: assumes that every
  // rank's buffers turn out to be reachable.
  WayOrder order(bool reachable, bool decides) const;
  // Returns why not even the way that needs least applies, if none does.
  Status none_applies() const { return ways(false).back().applies; }
  // For a call that moves rows.
  Result<ExpertRows> make_rows(const std::string& way) const {
    return make_rows(way, {call_.count, call_.element_bytes, side_.staging_bytes});
  }
  // Returns why the forced way does not run the call. Success: it does, or none is forced. A single rank copies,
  // whatever the name.
  Status obeys_force() const;
  // Proves the plan, which has been chosen, where MOECCL_CHECK_PLANS asks for it.
  Status check_reduce(algo::ReduceKind kind, bool reachable) const;
  Status check_rows(const std::string& name) const;

  static algo::ReduceKind kind_of(std::string_view name);
  plan::Shape reduce_shape(bool reachable) const {
    return algo::replica_shape(call_.placement, call_.count, call_.element_bytes, side_.reach(reachable),
                               side_.staging_bytes);
  }
  Result<WaysPage> page(const WayOrder& order) const;

 private:
  // The ways of the operation, the one that runs unless another gains in price first.
  std::vector<Way> ways(bool reachable) const;
  std::vector<Way> reduce_ways(bool reachable) const;
  std::vector<Way> row_ways() const;
  Status runs(algo::ReduceKind kind, const plan::Shape& shape) const;
  uint32_t bits(uint32_t number) const;
  uint64_t most_bytes() const;  // of a rank's largest buffer
  Result<ExpertRows> make_rows(const std::string& way, const algo::RowSize& size) const;

  const Communicator& comm_;
  const Side& side_;
  const CheckedCall& call_;
};

}  // namespace moeccl::comm
