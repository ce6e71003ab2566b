// SPDX-License-Identifier: Apache-2.0
// The ranks that hold experts in addition to their owners (HybridEP), and the gather that brings the experts there: the
// contract of moeccl/hybrid.h without its handles.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moeccl/hybrid.h"
#include "moeccl/solve.h"
#include "src/algo/experts/expert_gather.h"
#include "src/algo/experts/expert_return.h"
#include "src/comm/communicator.h"
#include "src/moe/experts/expert_choice.h"

namespace moeccl::comm {

inline constexpr uint64_t kMostExpertBytes = uint64_t{1} << 40;

class Hybrid {
 public:
  // This call is collective. The communicator must outlive the result.
  static Result<std::unique_ptr<Hybrid>> create(Communicator& comm, const moecclHybridConfig_t* config);

  // Communicates with no other rank; every rank must construct the same.
  Hybrid(Communicator& comm, algo::Placement homes, std::shared_ptr<const algo::Domains> domains);

  // Success when `comm` has the same ranks on the same topology.
  Status same_ranks(const Communicator& comm) const;
  const std::shared_ptr<const algo::Domains>& domains() const { return domains_; }
  uint64_t hash() const;  // of the homes and the domains
  const algo::Placement& homes() const { return homes_; }
  const std::vector<int32_t>& expert_rank() const { return expert_rank_; }
  const std::vector<int32_t>& own() const { return own_; }
  const std::vector<int32_t>& held() const { return held_; }

  // Fills `op`, which keeps its plan alive.
  Status prepare_gather(const void* own, void* held, uint64_t expert_bytes, exec::Operation& op);
  Status prepare_reduce(const void* held, void* own, uint64_t count, moecclDataType_t type, exec::Operation& op);
  // Checks the buffers of a gather or reduce.
  Status check_buffers(const void* own, const void* held, uint64_t expert_bytes) const;
  Status info(moecclHybridInfo_t* info) const;
  Result<std::string> explain(uint64_t expert_bytes) const;
  // The gathers and reduces of open groups.
  GroupHolds& group_holds() { return group_holds_; }

 private:
  algo::ExpertExchange exchange_of(uint64_t count, uint32_t element_bytes, bool cuda) const;
  // Exchange is algo::ExpertGather or ExpertReturn.
  template <class Exchange>
  std::vector<Way> ways(moecclOp_t kind, algo::ExpertExchange call) const;
  // decides: as in Selector::compare().
  template <class Exchange>
  WayOrder order(moecclOp_t kind, const algo::ExpertExchange& call, bool cuda, bool decides) const;
  template <class Exchange>
  Result<Exchange> make(algo::ExpertExchange call, const char* name) const;
  // Returns why the forced way does not run the call. Success: it does, or none is forced.
  template <class Exchange>
  Status obeys_force(moecclOp_t kind, const algo::ExpertExchange& call, bool cuda) const;
  // `last` receives the plan.
  template <class Exchange>
  Status prepare(std::shared_ptr<PlanSlot>& last, moecclOp_t kind, const void* in, void* out, uint64_t count,
                 moecclDataType_t type, exec::Operation& op);
  template <class Exchange>
  Result<std::string> explain_plan(moecclOp_t kind, uint64_t count, uint32_t element_bytes, double measured_ns) const;
  double measured_ns(const std::shared_ptr<PlanSlot>& last) const;

  Communicator& comm_;
  algo::Placement homes_;
  std::shared_ptr<const algo::Domains> domains_;
  std::vector<int32_t> expert_rank_, own_, held_;
  moecclDomainAnswer_t answer_{};  // of the model; all zero if the config has no figures
  uint32_t gather_links_ = 0, token_links_ = 0;
  GroupHolds group_holds_;
  mutable std::mutex mutex_;  // guards both plans, because times are read while calls are made
  std::shared_ptr<PlanSlot> gathered_, returned_;
  uint32_t most_holders_ = 0;  // of an expert
  uint64_t most_held_ = 0;     // experts of a rank
};

}  // namespace moeccl::comm
