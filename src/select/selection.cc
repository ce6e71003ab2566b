// SPDX-License-Identifier: Apache-2.0
#include "src/select/selection.h"

#include <algorithm>
#include <bit>

#include "src/algo/builder.h"
#include "src/algo/tuning.h"
#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/exec/eager.h"
#include "src/plan/long_line.h"
#include "src/routing/routing_paths.h"
#include "src/select/pipeline_chunks.h"

namespace moeccl::comm {
namespace {

constexpr size_t kMostPlans = 1024, kMostChoices = 4096;
// After its first chunk, an AllToAllv uses the algorithm that is faster for blocks of this size.
constexpr double kLargeBlockBytes = 1 << 20;

// A plan is tried in operations from kTryFromBytes of a rank's larger buffer up to this size. A program may run so few
// larger ones that it would feel the trial.
constexpr uint64_t kTryToBytes = 4 << 20;
// Layers call TensorAllToAll twice a step with messages of all tokens. On a fast link its plans differ only in what a
// copy costs beside a link's bytes, which no price knows.
constexpr uint64_t kTryTensorToBytes = 64 << 20;

uint64_t key_hash(const PlanKey& k) {
  uint64_t h = hash_combine(static_cast<uint64_t>(k.op), k.root);
  h = hash_combine(h, k.count);
  return hash_combine(h, k.element_bytes * 4u + (k.scaled ? 1u : 0u) + (k.in_place ? 2u : 0u));
}

PlanKey key_of(const plan::Shape& s) {
  return {s.op, s.root, s.count, static_cast<uint32_t>(s.element_bytes), s.scaled};
}

// Sizes that share their two leading bits are of one class. Returns the least of them.
uint64_t least_of_class(uint64_t bytes) {
  const auto width = static_cast<uint64_t>(std::bit_width(bytes));
  return width < 2 ? bytes : bytes >> (width - 2) << (width - 2);
}

uint64_t class_hash(const plan::Shape& s) {
  uint64_t h = hash_combine(static_cast<uint64_t>(s.op), least_of_class(s.count * s.element_bytes));
  h = hash_combine(h, (s.deterministic ? 1u : 0u) | (s.scaled ? 2u : 0u) | (s.reach.views ? 4u : 0u) |
                          (s.reach.reads ? 8u : 0u) | (s.reach.staging ? 16u : 0u));
  return hash_combine(h, s.root == 0 ? 0 : 1);
}

}  // namespace

void Selector::warn_of_force(const PlanSlot& cached) {
  const plan::Shape shape = shape_of(cached.key, false);
  const Status follows = obeys(shape);
  if (follows.ok() || !warned_.insert(class_hash(shape)).second) return;
  const std::string& forced = forced_[shape.op];
  const bool in_heap = cached.asks_reach && forced == cached.choice_if_reachable.algorithm;
  log(at_.rank == 0 ? LogLevel::kWarn : LogLevel::kInfo,
      "{} is forced for {} but does not apply to {} elements of {} bytes: {}; {} runs instead{}", forced,
      exec::op_name(shape.op), shape.count, shape.element_bytes, follows.message(), cached.choice.algorithm,
      in_heap ? format(", and {} where all buffers come from moecclMemAlloc", forced) : "");
}

void Selector::forget_choices() {
  slots_.clear();
  choices_.clear();
  compared_.clear();
  forget_last();
}

void Selector::forget_last() {
  last_ = nullptr;
  version_.fetch_add(1, std::memory_order_release);
}

uint64_t Selector::larger_buffer_bytes(const PlanKey& key) const {
  const uint32_t n = at_.tree.n_ranks;
  const uint32_t blocks = key.op == moecclOpTensorAllToAll
                              ? at_.tree.n_tensor_groups()
                              : std::max(plan::in_blocks(key.op, n), plan::out_blocks(key.op, n));
  return key.count * key.element_bytes * blocks;
}

plan::Shape Selector::shape_of(const PlanKey& key, bool reachable) const {
  plan::Shape s;
  s.op = key.op;
  s.n_ranks = at_.tree.n_ranks;
  s.root = key.root;
  s.count = key.count;
  s.element_bytes = key.element_bytes;
  s.deterministic = at_.deterministic;
  s.scaled = key.scaled;
  s.reach = at_.reach;
  if (reachable) s.reach.views = s.reach.reads = true;
  s.coarse = at_.coarse;
  s.staging_bytes = at_.staging_bytes;
  if (!s.reach.staging) s.long_line = plan::long_line(at_.tree, at_.profile);
  if (key.op == moecclOpTensorAllToAll)
    s.pipeline_chunks = pipeline_chunks(at_.tree, at_.profile, key.count * key.element_bytes);
  return s;
}

bool Selector::is_eager(const plan::Shape& shape, const algo::Algorithm& a) const {
  return shape.op != moecclOpAllToAllv && eager_for(key_of(shape), a.name, {});
}

bool Selector::eager_for(const PlanKey& key, const char* algorithm, std::string_view forced) const {
  if (!at_.outboxes) return false;
  // A forced AllToAllv must run with that plan alone.
  if (key.op == moecclOpAllToAllv && !forced.empty()) return false;
  return exec::runs_eagerly(key.op, algorithm, at_.tree.n_ranks, key.count * key.element_bytes);
}

exec::Choice Selector::build_one(const PlanKey& key, plan::Shape shape, const algo::Algorithm& a,
                                 plan::Plan& built) const {
  shape.in_place = key.in_place;
  built = algo::build_for(a, shape, at_.tree, at_.rank);
  return {&built.programs.back(), built.chunking, a.name, built.hash, hash_combine(built.hash, key.in_place ? 2 : 1)};
}

std::shared_ptr<PlanSlot> Selector::build_named(const PlanKey& key, const algo::Algorithm& a, bool reachable) const {
  auto made = std::make_shared<PlanSlot>();
  const plan::Shape ordinary = shape_of(key, false);
  if (reachable && !a.applies(ordinary, at_.tree).ok()) {
    // As in get(): the question is asked, and the answer is yes if all buffers are in the heap.
    for (const algo::Algorithm& other : algo::algorithms()) {
      if (other.op != key.op || !other.applies(ordinary, at_.tree).ok()) continue;
      made->choice = build_one(key, ordinary, other, made->staged);
      break;
    }
    made->choice_if_reachable = build_one(key, shape_of(key, true), a, made->reachable);
    made->asks_reach = true;
    made->signature = hash_combine(made->choice.plan_hash, made->choice_if_reachable.plan_hash);
    return made;
  }
  made->choice = build_one(key, ordinary, a, made->staged);
  made->eager = eager_for(key, a.name, forced_[key.op]);
  made->signature = made->choice.plan_hash;
  return made;
}

void Selector::pin(const PlanKey& key, std::shared_ptr<PlanSlot> cached) {
  const std::lock_guard lock(mutex_);
  pinned_key_ = key;
  pinned_ = std::move(cached);
  forget_last();
}

void Selector::unpin() { pin({}, nullptr); }

std::shared_ptr<const plan::Profile> Selector::profile() const {
  const std::lock_guard lock(shown_mutex_);
  return shown_;
}

void Selector::show_profile() {
  auto copy = std::make_shared<const plan::Profile>(at_.profile);
  const std::lock_guard lock(shown_mutex_);
  shown_ = std::move(copy);
}

void Selector::set_profile(const plan::Profile& profile) {
  const std::lock_guard lock(mutex_);
  const uint32_t cores = at_.profile.cores;
  const int host_level = at_.profile.host_level;
  at_.profile = profile;
  profile_hash_ = profile.hash();
  at_.profile.cores = cores;  // this communicator's own
  if (at_.profile.host_level < 0) at_.profile.host_level = host_level;
  at_.profile.forget_links_within_hosts(at_.tree);
  show_profile();
  has_plan_fits_ =
      !at_.profile.plans.empty() && at_.profile.n_ranks == at_.tree.n_ranks && at_.profile.tree_hash == at_.tree.hash();
  forget_choices();
}

// Any rank may ask for any plan at any time (moecclPlanQuery), so a choice must not depend on which shape of its class
// came first.
plan::Shape Selector::typical_of_class(plan::Shape shape) const {
  shape.root = std::min(shape.root, 1u);
  if (has_plan_fits_) return shape;
  const uint64_t least = least_of_class(shape.count * shape.element_bytes);
  shape.count = (least + shape.element_bytes - 1) / shape.element_bytes;
  if (shape.op == moecclOpTensorAllToAll)
    shape.pipeline_chunks = pipeline_chunks(at_.tree, at_.profile, shape.count * shape.element_bytes);
  return shape;
}

Result<Selector::Best> Selector::best_of(std::span<const Candidate> all, const plan::Shape& shape) const {
  Best best;
  std::string reasons;
  const bool small = larger_buffer_bytes(key_of(shape)) <= kTryFromBytes;
  for (const Candidate& c : all) {
    if (!c.applies.ok()) {
      reasons += format(" {}: {};", c.algorithm->name, c.applies.message());
      continue;
    }
    // Never slower than flat: another plan must gain more than its measurements scatter. Among the others too, a plan
    // that is fast only at times, such as one that reads what another core has just written, is not preferred.
    const bool flat = c.measured && std::string_view(plan::kFlatName) == c.algorithm->name;
    // Up to the size from which plans are tried, an eager operation does a part of what flat does, wherever the cores
    // are.
    const bool less_than_flat = c.measured && small && is_eager(shape, *c.algorithm);
    const double ns = flat || less_than_flat ? kFlatBias * c.predicted_ns : c.at_worst_ns;
    if (best.algorithm == nullptr || ns < best.ns) best = {c.algorithm, ns};
  }
  if (best.algorithm != nullptr) return best;
  return error(moecclUnsupported, "no algorithm can run {} on this topology:{}", exec::op_name(shape.op), reasons);
}

Result<Selector::Chosen> Selector::choose(const plan::Shape& shape, std::string_view forced) {
  if (!forced.empty()) {
    const algo::Algorithm* a = algo::find(shape.op, forced);
    if (a->applies(shape, at_.tree).ok()) return Chosen{a, {}};
  }
  uint64_t h = hash_combine(class_hash(shape), shape.element_bytes);
  for (const algo::Algorithm& a : algo::algorithms())
    if (a.op == shape.op)
      h = hash_combine(h, (a.applies(shape, at_.tree).ok() ? 1u : 0u) | (is_eager(shape, a) ? 2u : 0u));
  // A measured choice costs little, and is made for the exact size.
  if (has_plan_fits_) h = hash_combine(h, shape.count);
  if (const auto it = choices_.find(h); it != choices_.end()) return it->second;
  std::vector<Candidate> all = priced(typical_of_class(shape));
  for (Candidate& c : all)
    if (c.applies.ok()) c.applies = c.algorithm->applies(shape, at_.tree);
  MOECCL_ASSIGN_OR_RETURN(const Best best, best_of(all, shape));
  if (choices_.size() >= kMostChoices) choices_.clear();
  return choices_[h] = {best.algorithm, rivals_of(best, all, shape)};
}

// Reductions give other bits with another plan, unless both are one sum in rank order. Other plans are therefore tried
// only if plans were measured, or if all give the same bits.
void Selector::add_trial(PlanSlot& cached, const Chosen& chosen, uint64_t bytes) const {
  const moecclOp_t op = cached.key.op;
  // The size of an AllToAllv is not known, and data that goes with the first word counts for no plan.
  const bool tensor = op == moecclOpTensorAllToAll;
  if (tensor && at_.tree.n_tensor_groups() < 2) return;  // all plans are one copy
  const uint64_t most = tensor ? kTryTensorToBytes : kTryToBytes;
  const bool fits = op == moecclOpAllToAllv || (bytes > kTryFromBytes && bytes <= most);
  if (!env().trials || !fits) return;
  const bool any_bits = !plan::reduces(op) || at_.deterministic || has_plan_fits_;
  const auto in_rank_order = [](const algo::Algorithm& a) { return (a.needs & algo::kAnyOrder) == 0; };
  if (!any_bits && !in_rank_order(*chosen.best)) return;
  for (const Trials::Plan& plan : chosen.rivals)
    if (any_bits || in_rank_order(*algo::find(op, plan.name))) cached.tried.push_back(plan);
  if (cached.tried.empty()) return;
  cached.tried.insert(cached.tried.begin(), {chosen.best->name});
  cached.trial_class = hash_combine(class_hash(shape_of(cached.key, false)), profile_hash_);
}

Result<std::shared_ptr<PlanSlot>> Selector::build(const PlanKey& key, const std::string& forced,
                                                  const algo::Algorithm* instead) {
  auto cached = std::make_shared<PlanSlot>();
  cached->key = key;
  cached->forced = forced;
  Chosen chosen{instead, {}};
  const algo::Algorithm* copies_once = nullptr;  // for buffers that peers can reach; null: by price
  const auto make = [&](bool reachable, plan::Plan& built, exec::Choice& choice) -> Status {
    plan::Shape shape = shape_of(key, reachable);
    const algo::Algorithm* a = reachable ? copies_once : instead;
    if (a == nullptr) {
      MOECCL_ASSIGN_OR_RETURN(chosen, choose(shape, forced));
      a = chosen.best;
    }
    choice = build_one(key, shape, *a, built);
    shape.in_place = key.in_place;
    MOECCL_TRY(algo::chunks_cover(shape, built.chunking));
    return env().check_plans ? algo::prove(*a, shape, at_.tree) : Status();
  };
  MOECCL_TRY(make(false, cached->staged, cached->choice));
  cached->signature = cached->choice.plan_hash;
  cached->eager = eager_for(key, cached->choice.algorithm, forced);
  const uint64_t bytes = larger_buffer_bytes(key);
  if (instead == nullptr) add_trial(*cached, chosen, bytes);
  // An AllToAllv asks at any size: its ranks hear of each other's sizes anyway, and the small ones are eager.
  const bool is_v = key.op == moecclOpAllToAllv;
  if (at_.heap_reach && (is_v || bytes >= algo::tuning::kAskReach) && at_.tree.n_ranks > 1 &&
      key.op != moecclOpTensorAllToAll) {
    if (is_v && forced.empty()) {
      copies_once = algo::find(key.op, "direct");
      cached->reach_from_bytes = algo::tuning::kReachAllToAllv;
    }
    MOECCL_TRY(make(true, cached->reachable, cached->choice_if_reachable));
    // An algorithm that needs no reach makes no use of it: if the choice is the same, the answer changes nothing.
    plan::Shape none = shape_of(key, false);
    none.reach.views = none.reach.reads = false;
    const algo::Algorithm* ordinary = algo::find(key.op, cached->choice.algorithm);
    cached->asks_reach = std::string_view(cached->choice_if_reachable.algorithm) != cached->choice.algorithm ||
                         !ordinary->applies(none, at_.tree).ok();
    if (cached->asks_reach) cached->signature = hash_combine(cached->signature, cached->choice_if_reachable.plan_hash);
  }
  if (const algo::Algorithm* direct = algo::find(key.op, "direct");
      direct != nullptr && wants_direct_rest(*cached, key, *direct))
    add_direct_rest(*cached, key, *direct);
  if (instead == nullptr) warn_of_force(*cached);
  return cached;
}

// AllToAllvs begin in the staging, with one synchronisation. Where buffers can be loaded and stored to directly, what
// is left of large ones is copied once instead of twice. Through process_vm_readv this costs as much as it saves,
// unless calibration has measured otherwise.
bool Selector::wants_direct_rest(const PlanSlot& cached, const PlanKey& key, const algo::Algorithm& direct) const {
  if (key.op != moecclOpAllToAllv || !cached.forced.empty() || std::string_view("direct") == cached.choice.algorithm)
    return false;
  const plan::Shape shape = shape_of(key, false);
  if (!direct.applies(shape, at_.tree).ok()) return false;
  const uint8_t reach = plan::reach_bits(shape.reach.staging, shape.reach.views, shape.reach.reads);
  const plan::PlanFit* first = has_plan_fits_ ? at_.profile.find_plan(key.op, cached.choice.algorithm, reach) : nullptr;
  const plan::PlanFit* then = has_plan_fits_ ? at_.profile.find_plan(key.op, direct.name, reach) : nullptr;
  if (first == nullptr || then == nullptr) return shape.reach.views;
  return then->curve.at(kLargeBlockBytes) < first->curve.at(kLargeBlockBytes);
}

void Selector::add_direct_rest(PlanSlot& cached, const PlanKey& key, const algo::Algorithm& direct) const {
  cached.rest = algo::build_for(direct, shape_of(key, false), at_.tree, at_.rank);
  cached.choice_for_rest = {&cached.rest.programs.back(), cached.rest.chunking, direct.name, cached.rest.hash};
  cached.has_rest = true;
  cached.signature = hash_combine(cached.signature, cached.rest.hash);
}

Result<std::shared_ptr<PlanSlot>> Selector::get(const PlanKey& key) {
  if (const auto* last = again(key); last != nullptr) return *last;
  const std::lock_guard lock(mutex_);
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> found, find_or_build(key));
  last_key_ = key;
  return last_ = found;
}

Trials::Class Selector::trial_class(const PlanSlot& slot) const {
  const moecclOp_t op = slot.key.op;
  const bool of_placement = slot.remake != nullptr;
  return {slot.trial_class,
          slot.tried,
          of_placement ? slot.most_bytes : larger_buffer_bytes(slot.key),
          at_.tree.n_ranks,
          plan::facts(op).meets_all,
          op == moecclOpAllToAllv,
          of_placement || op == moecclOpTensorAllToAll};
}

Result<Selector::Next> Selector::next(const PlanSlot& slot, uint64_t sequence, exec::Ballot& ballot) {
  Trials::Pick pick;
  if (slot.key.op == moecclOpAllToAllv) {
    if (exec::Operation::Ran* small = trials_.still_small(); small != nullptr) return Next{nullptr, small};
  } else if (const char* plan = trials_.settled(slot.trial_class)) {
    pick.plan = plan;
  }
  if (pick.plan.empty()) pick = trials_.next(trial_class(slot), sequence, ballot);
  const auto same = [&pick](const char* name) { return name == pick.plan.data() || name == pick.plan; };
  if (same(slot.choice.algorithm)) return Next{nullptr, pick.ran};
  const auto i = static_cast<size_t>(std::ranges::find_if(slot.tried, same, &Trials::Plan::name) - slot.tried.begin());
  // The class may have begun with a plan that this key would not try: that one comes last.
  slot.variants.resize(slot.tried.size() + 1);
  std::shared_ptr<PlanSlot>& other = slot.variants[i];
  const bool made = other != nullptr && (i < slot.tried.size() || same(other->choice.algorithm));
  if (!made) {
    if (slot.remake != nullptr) {
      MOECCL_ASSIGN_OR_RETURN(other, slot.remake(slot, pick.plan));
    } else {
      const std::lock_guard lock(mutex_);
      MOECCL_ASSIGN_OR_RETURN(other, variant(slot, pick.plan));
    }
  }
  if (slot.remake != nullptr && !same(other->choice.algorithm)) {
    trials_.pass();
    const bool as_chosen = std::string_view(other->choice.algorithm) == slot.choice.algorithm;
    return Next{as_chosen ? nullptr : other.get(), nullptr};
  }
  return Next{other.get(), pick.ran};
}

Result<std::shared_ptr<PlanSlot>> Selector::runs_now(const PlanKey& key, Trials::Report* report) {
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> slot, get(key));
  if (slot->tried.empty()) return slot;
  *report = trials_.report(trial_class(*slot));
  if (!report->decided || report->plan == slot->choice.algorithm) return slot;
  const std::lock_guard lock(mutex_);
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> fastest, variant(*slot, report->plan));
  return fastest != nullptr ? fastest : slot;
}

Result<std::shared_ptr<PlanSlot>> Selector::variant(const PlanSlot& cached, std::string_view algorithm) {
  const uint64_t h =
      hash_combine(hash_combine(key_hash(cached.key), hash_string(algorithm)), hash_string(cached.forced));
  if (const auto it = slots_.find(h); it != slots_.end() && it->second->key == cached.key) return it->second;
  const algo::Algorithm* a = algo::find(cached.key.op, algorithm);
  if (!a->applies(shape_of(cached.key, false), at_.tree).ok()) return std::shared_ptr<PlanSlot>();
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> made, build(cached.key, cached.forced, a));
  keep(h, made);
  return made;
}

void Selector::keep(uint64_t hash, const std::shared_ptr<PlanSlot>& made) {
  if (slots_.size() >= kMostPlans) slots_.clear();  // running operations keep theirs
  slots_.insert_or_assign(hash, made);
}

Result<std::shared_ptr<PlanSlot>> Selector::find_or_build(const PlanKey& key) {
  if (pinned_ != nullptr && pinned_key_ == key) return pinned_;
  const uint64_t h = key_hash(key);
  if (const auto it = slots_.find(h); it != slots_.end() && it->second->key == key) return it->second;
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> made, build(key, forced_[key.op]));
  keep(h, made);
  return made;
}

std::shared_ptr<PlanSlot> Selector::slot_of(const PlanKey& key, Made made) {
  auto slot = std::make_shared<PlanSlot>();
  slot->key = key;
  slot->staged.programs.push_back(std::move(made.program));
  slot->choice = {&slot->staged.programs.back(), made.chunking, made.algorithm, made.hash};
  slot->signature = made.hash;
  return slot;
}

Result<std::shared_ptr<PlanSlot>> Selector::only(const PlanKey& key, uint64_t problem,
                                                 const std::function<Result<std::shared_ptr<PlanSlot>>()>& make) {
  const uint64_t h = hash_combine(key_hash(key), problem), before = version();
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = slots_.find(h); it != slots_.end() && it->second->key == key) return it->second;
  }
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> slot,
                          make());  // without the lock, because it may ask for compare()
  const std::lock_guard lock(mutex_);
  if (version() == before) keep(h, slot);
  return slot;
}

}  // namespace moeccl::comm
