// Which plan runs: candidates, their prices, forced choices and the plan cache.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/exec/operation.h"
#include "src/plan/cost.h"
#include "src/plan/profile.h"

namespace moeccl::comm {

struct Candidate {
  const algo::Algorithm* algorithm;
  Status applies;           // why not, when it does not
  double predicted_ns = 0;  // when it applies
  bool measured = false;    // by calibration on this communicator's shape, not priced
};

// What a call asks for; everything that decides a plan and that all ranks know alike.
struct PlanKey {
  moecclOp_t op;
  uint32_t root;
  uint64_t count;
  uint32_t element_bytes;
  bool scaled;
  bool in_place = false;  // private to this rank: changes its program, never which plan is chosen
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

struct CachedPlan {
  plan::Plan staged, reachable;  // programs of this rank; `reachable` is used when every rank's buffers can be reached
  plan::Plan rest;               // AllToAllv: for what is left after the first chunk
  exec::Choice choice, choice_if_reachable, choice_for_rest;
  bool asks_reach = false;
  bool has_rest = false;
  bool eager = false;
  uint64_t signature = 0;  // hash of both
  exec::Operation::Measured measured;
};

class Selector {
 public:
  Selector(uint32_t rank, plan::LevelTree tree, plan::Reach reach, bool heap_reach, bool outboxes, bool deterministic,
           uint64_t staging_bytes, const plan::Profile& profile);

  // MOECCL_PLAN: "allreduce:ring,alltoall:2dh".
  Status force_from_text(const std::string& text);
  Status force(moecclOp_t op, const std::string& algorithm);  // "" or "auto": none

  Result<std::shared_ptr<CachedPlan>> get(const PlanKey& key);
  // The plan of the last call, when this one is alike; else null.
  const std::shared_ptr<CachedPlan>* again(const PlanKey& key) const {
    return last_ != nullptr && last_key_ == key ? &last_ : nullptr;
  }
  plan::Shape shape_of(const PlanKey& key, bool reachable) const;
  std::vector<Candidate> candidates(const plan::Shape& shape) const;
  // What calibration measured for this plan, interpolated; 0 when it did not.
  double measured_ns(const algo::Algorithm& a, const plan::Shape& shape) const;
  // One algorithm's plan, which applies, outside the cache.
  std::shared_ptr<CachedPlan> build_named(const PlanKey& key, const algo::Algorithm& a, bool reachable) const;
  // The same on all ranks, between the same operations. Forgets all plans.
  void set_profile(const plan::Profile& profile);
  bool asks_reach() const { return heap_reach_; }
  const plan::LevelTree& tree() const { return tree_; }
  const plan::Profile& profile() const { return profile_; }
  // The forced algorithm for MoE operations; empty: none.
  const std::string& forced(moecclOp_t op) const { return forced_[op]; }

 private:
  Result<const algo::Algorithm*> choose(const plan::Shape& shape);
  Result<std::shared_ptr<CachedPlan>> build(const PlanKey& key);

  uint32_t rank_;
  plan::LevelTree tree_;
  plan::Reach reach_;
  bool heap_reach_;  // buffers of the symmetric heap can be viewed by all: worth asking for large operations
  bool outboxes_;    // of all ranks can be read by all
  bool deterministic_;
  uint64_t staging_bytes_;
  plan::Profile profile_;
  bool has_plan_fits_ = false;  // the profile's plans were measured on this topology and number of ranks
  std::string forced_[MOECCL_NUM_OPS];

  PlanKey last_key_{};
  std::shared_ptr<CachedPlan> last_;
  std::unordered_map<uint64_t, std::pair<PlanKey, std::shared_ptr<CachedPlan>>> plans_;
  std::unordered_map<uint64_t, const algo::Algorithm*> choices_;  // by shape class
};

// The operation of a name as in MOECCL_PLAN; false when there is none.
bool parse_op(const std::string& name, moecclOp_t* op);

}  // namespace moeccl::comm
