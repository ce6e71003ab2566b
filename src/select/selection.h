// SPDX-License-Identifier: Apache-2.0
// Decides which plan runs: candidates, their prices, forced choices and the plan cache.
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
#include "src/plan/cost.h"
#include "src/plan/profile.h"
#include "src/select/trials.h"

namespace moeccl::comm {

struct Candidate {
  const algo::Algorithm* algorithm;
  Status applies;           // success, or why it does not apply
  double predicted_ns = 0;  // if it applies; a price among measured ones is on their scale
  double at_worst_ns = 0;   // the same, or what a quarter of its measurements exceeded
  bool measured = false;    // by calibration on this communicator's shape, rather than priced
};

// What a call asks for: everything that decides a plan and that all ranks know alike.
struct PlanKey {
  moecclOp_t op;
  uint32_t root;
  uint64_t count;
  uint32_t element_bytes;
  bool scaled;
  bool in_place = false;  // private to this rank: changes its program, but never the choice of the plan
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

// Everything known of a key: the plan chosen for it, the plans that are tried against it, and how long it last took.
struct PlanSlot {
  plan::Plan staged, reachable;  // programs of this rank; `reachable` runs if every rank's buffers can be reached
  plan::Plan rest;               // AllToAllv: for what is left after the first chunk
  exec::Choice choice, choice_if_reachable, choice_for_rest;
  bool asks_reach = false;
  uint64_t reach_from_bytes = 0;  // as Operation::reach_from_bytes
  bool has_rest = false;
  bool eager = false;
  uint64_t signature = 0;  // hash of these plans
  PlanKey key{};
  std::string forced;  // the forced algorithm at the time of the call, which later choices for it keep; "": none
  mutable exec::Operation::Measured measured;
  // Plans to try against each other, the choice first; empty: the choice stands. Their class is the same on all ranks.
  std::vector<Trials::Plan> tried;
  uint64_t trial_class = 0;
  // The same key with each of `tried`, as far as it has run. Used by the thread that runs operations.
  mutable std::vector<std::shared_ptr<PlanSlot>> variants;
  // For a plan that a placement makes, where it is tried: makes another of `tried` for this slot, or what the call runs
  // where that one does not fit it, which all ranks know alike. The result may refer to the slot, and the function must
  // not own the slot. `choice` need not be the first of `tried`.
  std::function<Result<std::shared_ptr<PlanSlot>>(const PlanSlot& slot, std::string_view name)> remake;
  uint64_t most_bytes = 0;                 // with `remake`: of any rank's larger buffer
  const plan::Binding* binding = nullptr;  // of a plan that moves rows; null: a count says everything
};

class Selector {
 public:
  // Only its ranks know the sizes of an AllToAllv, so it is priced for blocks of this size.
  static constexpr uint64_t kTypicalBlockBytes = 16 << 10;
  struct Setting {
    uint32_t rank = 0;
    plan::LevelTree tree;
    plan::Reach reach;        // of ordinary buffers
    bool heap_reach = false;  // all can view buffers of the symmetric heap: worth asking for large operations
    bool outboxes = false;    // all ranks can read the outboxes of all
    bool deterministic = false;
    uint64_t staging_bytes = 0;  // of one operation
    plan::Profile profile = {};
    bool coarse = false;  // see plan::Shape
  };
  explicit Selector(Setting setting) : at_(std::move(setting)) { show_profile(); }

  // Parses MOECCL_PLAN: "allreduce:ring,alltoall:2dh". An algorithm that can never apply only causes a warning, because
  // the variable is for all communicators of a process, which differ.
  Status force_from_text(const std::string& text);
  Status force(moecclOp_t op, const std::string& algorithm);  // "" or "auto": none
  // Returns moecclUnsupported with the reason if the operation can never run with this algorithm here, whatever the
  // size and the memory. For names that force() accepts.
  Status can_ever_run(moecclOp_t op, const std::string& algorithm) const;
  // Returns why a call of this shape does not run with the forced algorithm. Success: it does, or none is forced.
  Status obeys_force(const plan::Shape& shape) const;

  Result<std::shared_ptr<PlanSlot>> get(const PlanKey& key);
  // Returns the plan of the last call if this call is alike, or null.
  const std::shared_ptr<PlanSlot>* again(const PlanKey& key) const {
    return last_ != nullptr && last_key_ == key ? &last_ : nullptr;
  }
  // Starts at 1, and changes when any call may get another plan than before.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // For the next operation, number `sequence`, of a slot whose plans are tried; see Trials::next().
  struct Next {
    const PlanSlot* slot = nullptr;  // the slot that runs instead, owned by the given one; null: the given one runs
    exec::Operation::Ran* ran = nullptr;  // where the operation reports how it went
  };
  Result<Next> next(const PlanSlot& slot, uint64_t sequence, exec::Ballot& ballot);
  Trials& trials() { return trials_; }
  // Returns the plan that a call of this key runs when nothing is tried, and how its trial stands; `report` is left
  // alone if there is no trial.
  Result<std::shared_ptr<PlanSlot>> runs_now(const PlanKey& key, Trials::Report* report);
  plan::Shape shape_of(const PlanKey& key, bool reachable) const;
  // Returns the size of the larger of a rank's user buffers.
  uint64_t larger_buffer_bytes(const PlanKey& key) const;
  std::vector<Candidate> candidates(const plan::Shape& shape) const;
  // Plans that a routing or a placement makes, priced like all others. A class of problems is priced once, until the
  // profile changes or a plan is forced; the first offer stands unless another gains more than prices err by.
  struct Offer {
    const char* name;
    std::function<double(const plan::Profile&)> price_ns;  // infinite: it cannot run
    uint32_t bits = 0;                                     // offers with the same number give the same bits; see Trials
  };
  // With more ranks, building and pricing all programs takes longer than a plan can gain: the first offer stands.
  static constexpr uint32_t kMostRanksOfOffers = 64;
  struct Compared {
    const char* cheapest;
    std::vector<Trials::Plan> tried;  // as PlanSlot::tried, whatever the size
    uint64_t trial_class = 0;
  };
  // Without `decides`, one rank alone asks: it gets what was decided for the class, or would be, and decides nothing.
  Compared compare(uint64_t problem_class, std::span<const Offer> offers, bool decides) const;
  // Plans of offers are tried from this size of a rank's larger buffer on. There is no upper limit: experts are large,
  // and layers move them at every step.
  static bool tries_offers(uint64_t bytes);
  // Returns how the trial of a class of offers stands.
  Trials::Report report(uint64_t trial_class) const { return trials_.report({trial_class, {}, 0, 0, false, false}); }
  // A plan of an offer, kept like the others; `problem` tells placements apart.
  struct Made {
    plan::Program program;  // of this rank
    plan::Chunking chunking;
    const char* algorithm;
    uint64_t hash;
  };
  Result<std::shared_ptr<PlanSlot>> only(const PlanKey& key, uint64_t problem,
                                         const std::function<Result<std::shared_ptr<PlanSlot>>()>& make);
  static std::shared_ptr<PlanSlot> slot_of(const PlanKey& key, Made made);
  // Returns what calibration measured for this plan, interpolated, or 0 if it measured nothing.
  double measured_ns(const algo::Algorithm& a, const plan::Shape& shape) const;
  // Builds one algorithm's plan, which must apply, outside the cache: exactly what get() would return if it chose this
  // one.
  std::shared_ptr<PlanSlot> build_named(const PlanKey& key, const algo::Algorithm& a, bool reachable) const;
  // Makes get() return `cached` for `key` until another plan is pinned or unpin(). For calibration, alike on all ranks.
  void pin(const PlanKey& key, std::shared_ptr<PlanSlot> cached);
  void unpin();
  // Must be called with the same profile on all ranks, between the same operations. Forgets all plans.
  void set_profile(const plan::Profile& profile);
  bool asks_reach() const { return at_.heap_reach; }
  const plan::LevelTree& tree() const { return at_.tree; }
  // Returns the profile as it is now. set_profile() makes another one.
  std::shared_ptr<const plan::Profile> profile() const;
  // For operations whose plan comes from a routing or a placement: logs why the forced algorithm gives way, once for
  // each class of problems.
  void warn_of_force(moecclOp_t op, uint64_t problem_class, const std::string& sentence) const;
  // Returns the forced algorithm; empty: none.
  const std::string& forced(moecclOp_t op) const { return forced_[op]; }

 private:
  // Another plan must be this much faster than flat, and by more than its own times scatter.
  static constexpr double kFlatBias = 0.93;
  // Smaller operations than this would feel the cost of asking which plan comes next.
  static constexpr uint64_t kTryFromBytes = 8 << 10;
  struct Chosen {
    const algo::Algorithm* best;
    std::vector<Trials::Plan> rivals;  // in the order in which they come into question
  };
  struct Best {
    const algo::Algorithm* algorithm = nullptr;
    double ns = 0;  // by which it is the best
  };
  // Requires the lock, like the other functions here.
  Result<Chosen> choose(const plan::Shape& shape, std::string_view forced);
  Compared price_all(std::span<const Offer> offers) const;
  Result<Best> best_of(std::span<const Candidate> all, const plan::Shape& shape) const;
  std::vector<Trials::Plan> rivals_of(const Best& best, std::span<const Candidate> all, const plan::Shape& shape) const;
  // Returns the shape for which the choice of all shapes of a class is made.
  plan::Shape typical_of_class(plan::Shape shape) const;
  std::vector<Candidate> priced(const plan::Shape& shape, double block_bytes = kTypicalBlockBytes) const;
  Status obeys(const plan::Shape& shape) const;
  // Returns what get() would return for a slot's key if it chose `algorithm`, or null if that does not apply.
  Result<std::shared_ptr<PlanSlot>> variant(const PlanSlot& slot, std::string_view algorithm);
  Trials::Class trial_class(const PlanSlot& slot) const;
  // `instead` replaces the choice for buffers that peers cannot reach.
  Result<std::shared_ptr<PlanSlot>> build(const PlanKey& key, const std::string& forced,
                                          const algo::Algorithm* instead = nullptr);
  // Builds a plan of the key. The returned choice refers to it.
  exec::Choice build_one(const PlanKey& key, plan::Shape shape, const algo::Algorithm& a, plan::Plan& built) const;
  void add_trial(PlanSlot& cached, const Chosen& chosen, uint64_t bytes) const;
  // Returns the curve that calibration measured for this plan, or null.
  const plan::PlanFit* fit_of(const algo::Algorithm& a, const plan::Shape& shape) const;
  bool eager_for(const PlanKey& key, const char* algorithm, std::string_view forced) const;
  // Returns whether an operation of this shape runs entirely eagerly with this plan. Never for AllToAllv, whose size is
  // unknown.
  bool is_eager(const plan::Shape& shape, const algo::Algorithm& a) const;
  // What is left of an AllToAllv after its first chunk goes directly if that is faster.
  bool wants_direct_rest(const PlanSlot& cached, const PlanKey& key, const algo::Algorithm& direct) const;
  void add_direct_rest(PlanSlot& cached, const PlanKey& key, const algo::Algorithm& direct) const;
  Status applies_to(const plan::Shape& shape, const std::string& algorithm) const;
  // Warns once for each class of shapes for which the forced algorithm gives way.
  void warn_of_force(const PlanSlot& cached);
  void show_profile();
  void forget_choices();
  void forget_last();
  Result<std::shared_ptr<PlanSlot>> find_or_build(const PlanKey& key);
  void keep(uint64_t hash, const std::shared_ptr<PlanSlot>& made);

  Setting at_;
  uint64_t profile_hash_ = 0;
  bool has_plan_fits_ = false;  // the profile's plans were measured on this topology and number of ranks
  std::string forced_[MOECCL_NUM_OPS];
  mutable std::unordered_set<uint64_t> warned_;  // classes of shapes and of problems, since the last force()

  // Choices are made on the caller's thread; the thread that runs operations makes the plans of trials.
  mutable std::mutex mutex_;
  // Inside mutex_, because makers of plans ask for the profile.
  mutable std::mutex shown_mutex_;
  std::shared_ptr<const plan::Profile> shown_;  // a copy of at_.profile
  std::atomic<uint64_t> version_{1};

  PlanKey last_key_{}, pinned_key_{};
  std::shared_ptr<PlanSlot> pinned_;
  std::shared_ptr<PlanSlot> last_;
  std::unordered_map<uint64_t, std::shared_ptr<PlanSlot>> slots_;
  Trials trials_;
  std::unordered_map<uint64_t, Chosen> choices_;             // by shape class
  mutable std::unordered_map<uint64_t, Compared> compared_;  // by problem class
};

}  // namespace moeccl::comm
