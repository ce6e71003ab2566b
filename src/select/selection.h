// SPDX-License-Identifier: Apache-2.0
// Which plan runs: candidates, their prices, forced choices and the plan cache.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "src/algo/algorithm.h"
#include "src/exec/fabric.h"
#include "src/exec/operation.h"
#include "src/plan/correct.h"
#include "src/plan/cost.h"
#include "src/plan/profile.h"
#include "src/select/trials.h"

namespace moeccl::comm {

struct Candidate {
  const algo::Algorithm* algorithm;
  Status applies;           // why not, when it does not
  double predicted_ns = 0;  // when it applies; a price among measured ones stands on their scale
  double at_worst_ns = 0;   // the same, or what a quarter of its measurements exceeded
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

// What is known of a key: the plan that is chosen for it, the plans that are tried against it, and what it last took.
struct PlanSlot {
  plan::Plan staged, reachable;  // programs of this rank; `reachable` is used when every rank's buffers can be reached
  plan::Plan rest;               // AllToAllv: for what is left after the first chunk
  exec::Choice choice, choice_if_reachable, choice_for_rest;
  bool asks_reach = false;
  bool has_rest = false;
  bool eager = false;
  uint64_t signature = 0;  // hash of both
  uint32_t epoch = 0;      // Selector::epoch() when it was chosen; 0: forced or pinned
  PlanKey key{};
  mutable exec::Operation::Measured measured;
  // Plans to be tried against each other, the choice first; empty: the choice stands. Their class is the same on all
  // ranks.
  std::vector<const char*> tried;
  uint64_t trial_class = 0;
  // The same key with each of `tried`, as far as it has run; for the thread that runs operations.
  mutable std::vector<std::shared_ptr<PlanSlot>> variants;
};

class Selector {
 public:
  struct Setting {
    uint32_t rank = 0;
    plan::LevelTree tree;
    plan::Reach reach;        // of ordinary buffers
    bool heap_reach = false;  // buffers of the symmetric heap can be viewed by all: worth asking for large operations
    bool outboxes = false;    // of all ranks can be read by all
    bool deterministic = false;
    uint64_t staging_bytes = 0;  // of one operation
    plan::Profile profile = {};
  };
  explicit Selector(Setting setting) : at_(std::move(setting)) {}

  // MOECCL_PLAN: "allreduce:ring,alltoall:2dh". One that can never apply is only warned of: the variable is for all
  // communicators of a process, which differ.
  Status force_from_text(const std::string& text);
  Status force(moecclOp_t op, const std::string& algorithm);  // "" or "auto": none
  // moecclUnsupported with the reason, when the operation never runs by this algorithm here, whatever the size and the
  // memory. For names that force() accepts.
  Status can_ever_run(moecclOp_t op, const std::string& algorithm) const;
  // Why a call of this shape does not run by the forced algorithm; success: it does, or none is forced.
  Status obeys_force(const plan::Shape& shape) const;

  Result<std::shared_ptr<PlanSlot>> get(const PlanKey& key);
  // The plan of the last call, when this one is alike; else null.
  const std::shared_ptr<PlanSlot>* again(const PlanKey& key) const {
    return last_ != nullptr && last_key_ == key && last_epoch_ == epoch() ? &last_ : nullptr;
  }
  // What an operation took, the same words on all ranks at the same place in the order of operations: may correct the
  // profile, then epoch() is another one and earlier choices are made again. From the thread that runs operations.
  void observe(const exec::Timing& timing);
  uint32_t epoch() const { return epoch_.load(std::memory_order_acquire); }
  // From 1 on; another one when any call may get another plan than before.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // get() at the time of an operation's run, beside calls on the caller's thread.
  Result<std::shared_ptr<PlanSlot>> choose_again(const PlanKey& key);
  // For the next operation of a slot whose plans are tried, number `sequence`: see Trials::next().
  struct Next {
    const PlanSlot* slot = nullptr;       // that runs instead, owned by the given one; null: the given one runs
    exec::Operation::Ran* ran = nullptr;  // where the operation says how it went
  };
  Result<Next> next(const PlanSlot& slot, uint64_t sequence, exec::Ballot& ballot);
  Trials& trials() { return trials_; }
  // The plan that a call of this key runs when nothing is tried, and how its trial stands; `report` stays as it is when
  // there is none.
  Result<std::shared_ptr<PlanSlot>> runs_now(const PlanKey& key, Trials::Report* report);
  plan::Shape shape_of(const PlanKey& key, bool reachable) const;
  // Of a rank's user buffers.
  uint64_t larger_buffer_bytes(const PlanKey& key) const;
  std::vector<Candidate> candidates(const plan::Shape& shape) const;
  // Plans that a routing or a placement makes, priced as all others. A class of problems is priced once, until the
  // profile is another one or a plan is forced; the first offer stands unless another gains more than prices err by.
  struct Offer {
    const char* name;
    std::function<plan::Plan()> build_all;
  };
  const char* cheapest(uint64_t problem_class, std::span<const Offer> offers) const;
  // One that has no rivals, kept as the others are; `problem` tells routings or placements apart.
  struct Made {
    plan::Program program;  // of this rank
    plan::Chunking chunking;
    const char* algorithm;
    uint64_t hash;
  };
  Result<std::shared_ptr<PlanSlot>> only(const PlanKey& key, uint64_t problem,
                                         const std::function<Result<Made>()>& make);
  // What calibration measured for this plan, interpolated; 0 when it did not.
  double measured_ns(const algo::Algorithm& a, const plan::Shape& shape) const;
  // One algorithm's plan, which applies, outside the cache: exactly what get() would give if it chose this one.
  std::shared_ptr<PlanSlot> build_named(const PlanKey& key, const algo::Algorithm& a, bool reachable) const;
  // get() gives `cached` for `key` until another plan is pinned or unpin(). For calibration, alike on all ranks.
  void pin(const PlanKey& key, std::shared_ptr<PlanSlot> cached);
  void unpin();
  // The same on all ranks, between the same operations. Forgets all plans.
  void set_profile(const plan::Profile& profile);
  bool asks_reach() const { return at_.heap_reach; }
  const plan::LevelTree& tree() const { return at_.tree; }
  const plan::Profile& profile() const { return at_.profile; }
  // The forced algorithm for MoE operations; empty: none.
  const std::string& forced(moecclOp_t op) const { return forced_[op]; }

 private:
  struct Chosen {
    const algo::Algorithm* best;
    std::vector<const char*> close;  // others whose predictions lie close, cheapest first
  };
  // With the lock, as the others here.
  Result<Chosen> choose(const plan::Shape& shape);
  // Of an AllToAllv only its ranks know the sizes: it is priced for blocks of this size.
  static constexpr double kTypicalBlockBytes = 16 << 10;
  std::vector<Candidate> priced(const plan::Shape& shape, double block_bytes = kTypicalBlockBytes) const;
  Status obeys(const plan::Shape& shape) const;
  // What get() would give for a slot's key if it chose `algorithm`; null where that does not apply.
  Result<std::shared_ptr<PlanSlot>> variant(const PlanSlot& slot, std::string_view algorithm);
  Trials::Class trial_class(const PlanSlot& slot) const;
  // `instead`: of the choice, for buffers that peers cannot reach.
  Result<std::shared_ptr<PlanSlot>> build(const PlanKey& key, const algo::Algorithm* instead = nullptr);
  void add_trial(PlanSlot& cached, const Chosen& chosen, uint64_t bytes) const;
  // The curve that calibration measured for this plan; null: none.
  const plan::PlanFit* fit_of(const algo::Algorithm& a, const plan::Shape& shape) const;
  bool eager_for(const PlanKey& key, const char* algorithm) const;
  // Whether all of an operation of this shape runs eagerly by this plan: not AllToAllv, whose size nobody knows.
  bool is_eager(const plan::Shape& shape, const algo::Algorithm& a) const;
  // What is left of an AllToAllv after its first chunk goes directly where that is faster.
  bool wants_direct_rest(const PlanSlot& cached, const PlanKey& key, const algo::Algorithm& direct) const;
  void add_direct_rest(PlanSlot& cached, const PlanKey& key, const algo::Algorithm& direct) const;
  // Says so once for each class of shapes when the forced algorithm gives way.
  void warn_of_force(const PlanSlot& cached);
  void forget_choices();
  void forget_last();
  Result<std::shared_ptr<PlanSlot>> find_or_build(const PlanKey& key);
  void keep(uint64_t hash, const std::shared_ptr<PlanSlot>& made);

  Setting at_;
  uint64_t profile_hash_ = 0;
  bool has_plan_fits_ = false;  // the profile's plans were measured on this topology and number of ranks
  std::string forced_[MOECCL_NUM_OPS];
  std::unordered_set<uint64_t> warned_;  // classes of shapes, since the last force()

  // Choices are made on the caller's thread, and again on the one that runs operations.
  mutable std::mutex mutex_;
  std::atomic<uint32_t> epoch_{1};
  std::atomic<uint64_t> version_{1};
  uint32_t last_epoch_ = 0, plans_epoch_ = 1;
  plan::Corrector corrector_;

  PlanKey last_key_{}, pinned_key_{};
  std::shared_ptr<PlanSlot> pinned_;
  std::shared_ptr<PlanSlot> last_;
  std::unordered_map<uint64_t, std::shared_ptr<PlanSlot>> slots_;
  Trials trials_;
  std::unordered_map<uint64_t, Chosen> choices_;                // by shape class
  mutable std::unordered_map<uint64_t, const char*> cheapest_;  // by problem class
};

}  // namespace moeccl::comm
