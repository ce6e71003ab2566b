#include "src/comm/selection.h"

#include <algorithm>
#include <bit>

#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/comm/pipeline_chunks.h"
#include "src/exec/eager.h"

namespace moeccl::comm {
namespace {

// Asking whether all buffers can be reached costs one more synchronisation; from this size on what it may save is more
// (docs/decisions.md).
constexpr uint64_t kAskReachBytes = 256 << 10;
constexpr size_t kMostPlans = 1024;

uint64_t key_hash(const PlanKey& k) {
  uint64_t h = hash_combine(static_cast<uint64_t>(k.op), k.root);
  h = hash_combine(h, k.count);
  return hash_combine(h, k.element_bytes * 4u + (k.scaled ? 1u : 0u) + (k.in_place ? 2u : 0u));
}

// Shapes whose sizes share their two leading bits are priced once.
uint64_t class_hash(const plan::Shape& s) {
  const uint64_t bytes = s.count * s.element_bytes;
  const auto width = static_cast<uint64_t>(std::bit_width(bytes));
  const uint64_t size_class = width < 2 ? width : width * 2 + ((bytes >> (width - 2)) & 1);
  uint64_t h = hash_combine(static_cast<uint64_t>(s.op), size_class);
  h = hash_combine(h, (s.deterministic ? 1u : 0u) | (s.scaled ? 2u : 0u) | (s.reach.views ? 4u : 0u) |
                          (s.reach.reads ? 8u : 0u) | (s.reach.staging ? 16u : 0u));
  return hash_combine(h, s.root == 0 ? 0 : 1);
}

std::string names_for(moecclOp_t op) {
  std::string names;
  for (const algo::Algorithm& a : algo::algorithms()) {
    if (a.op == op) names += format("{}{}", names.empty() ? "" : ", ", a.name);
  }
  return names;
}

}  // namespace

bool parse_op(const std::string& name, moecclOp_t* op) {
  for (int i = 0; i < MOECCL_NUM_OPS; ++i) {
    if (name == exec::op_name(static_cast<moecclOp_t>(i))) {
      *op = static_cast<moecclOp_t>(i);
      return true;
    }
  }
  return false;
}

Selector::Selector(uint32_t rank, plan::LevelTree tree, plan::Reach reach, bool heap_reach, bool outboxes,
                   bool deterministic, uint64_t staging_bytes, const plan::Profile& profile)
    : rank_(rank),
      tree_(std::move(tree)),
      reach_(reach),
      heap_reach_(heap_reach),
      outboxes_(outboxes),
      deterministic_(deterministic),
      staging_bytes_(staging_bytes),
      profile_(profile) {}

Status Selector::force_from_text(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    const size_t colon = item.find(':');
    moecclOp_t op{};
    if (colon == std::string::npos || !parse_op(item.substr(0, colon), &op)) {
      return error(moecclInvalidArgument,
                   "MOECCL_PLAN: \"{}\" at position {} is not operation:algorithm, such as allreduce:ring", item, at);
    }
    MOECCL_TRY(force(op, item.substr(colon + 1)));
    at = end + 1;
  }
  return {};
}

Status Selector::force(moecclOp_t op, const std::string& algorithm) {
  const bool moe = op >= moecclOpDispatch && op != moecclOpTensorAllToAll;  // plans of a routing or a placement
  const bool automatic = algorithm.empty() || algorithm == "auto";
  if (!automatic && !moe && algo::find(op, algorithm) == nullptr) {
    return error(moecclInvalidArgument, "no algorithm \"{}\" for {}: there are {}", algorithm, exec::op_name(op),
                 names_for(op));
  }
  forced_[op] = automatic ? "" : algorithm;
  plans_.clear();
  choices_.clear();
  last_ = nullptr;
  return {};
}

plan::Shape Selector::shape_of(const PlanKey& key, bool reachable) const {
  plan::Shape s;
  s.op = key.op;
  s.n_ranks = tree_.n_ranks;
  s.root = key.root;
  s.count = key.count;
  s.element_bytes = key.element_bytes;
  s.deterministic = deterministic_;
  s.scaled = key.scaled;
  s.reach = reach_;
  if (reachable) s.reach.views = s.reach.reads = true;
  s.staging_bytes = staging_bytes_;
  if (key.op == moecclOpTensorAllToAll)
    s.pipeline_chunks = pipeline_chunks(tree_, profile_, key.count * key.element_bytes);
  return s;
}

std::vector<Candidate> Selector::candidates(const plan::Shape& shape) const {
  std::vector<Candidate> out;
  for (const algo::Algorithm& a : algo::algorithms()) {
    if (a.op != shape.op) continue;
    Candidate c{&a, a.applies(shape, tree_), 0, false};
    if (c.applies.ok()) {
      c.predicted_ns = measured_ns(a, shape);
      c.measured = c.predicted_ns > 0;
      if (!c.measured) c.predicted_ns = plan::price(algo::build_all(a, shape, tree_), tree_, profile_).total_ns;
    }
    out.push_back(std::move(c));
  }
  return out;
}

double Selector::measured_ns(const algo::Algorithm& a, const plan::Shape& shape) const {
  if (!has_plan_fits_ || shape.deterministic || shape.scaled) return 0;
  const plan::PlanFit* fit =
      profile_.find_plan(shape.op, a.name, plan::reach_bits(shape.reach.staging, shape.reach.views, shape.reach.reads));
  return fit == nullptr ? 0 : fit->correction * fit->curve.at(static_cast<double>(shape.count * shape.element_bytes));
}

std::shared_ptr<CachedPlan> Selector::build_named(const PlanKey& key, const algo::Algorithm& a, bool reachable) const {
  auto made = std::make_shared<CachedPlan>();
  const auto build_one = [&](const plan::Shape& shape, const algo::Algorithm& which, plan::Plan& built,
                             exec::Choice& choice) {
    built = algo::build_for(which, shape, tree_, rank_);
    choice = {&built.programs.back(), built.chunking, which.name, built.hash};
  };
  const plan::Shape ordinary = shape_of(key, false);
  if (reachable && !a.applies(ordinary, tree_).ok()) {
    // As get() has it: the question is asked, and answered yes where all buffers are in the heap.
    for (const algo::Algorithm& other : algo::algorithms()) {
      if (other.op != key.op || !other.applies(ordinary, tree_).ok()) continue;
      build_one(ordinary, other, made->staged, made->choice);
      break;
    }
    build_one(shape_of(key, true), a, made->reachable, made->choice_if_reachable);
    made->asks_reach = true;
    made->signature = hash_combine(made->choice.plan_hash, made->choice_if_reachable.plan_hash);
    return made;
  }
  build_one(ordinary, a, made->staged, made->choice);
  made->signature = made->choice.plan_hash;
  return made;
}

void Selector::set_profile(const plan::Profile& profile) {
  const uint32_t cores = profile_.cores;
  profile_ = profile;
  profile_.cores = cores;  // this communicator's
  has_plan_fits_ = !profile_.plans.empty() && profile_.n_ranks == tree_.n_ranks && profile_.tree_hash == tree_.hash();
  plans_.clear();
  choices_.clear();
  last_ = nullptr;
}

Result<const algo::Algorithm*> Selector::choose(const plan::Shape& shape) {
  if (!forced_[shape.op].empty()) {
    const algo::Algorithm* a = algo::find(shape.op, forced_[shape.op]);
    Status applies = a->applies(shape, tree_);
    if (applies.ok()) return a;
    log(LogLevel::kInfo, "forced algorithm {} does not apply to {} of {} elements: {}", a->name,
        exec::op_name(shape.op), shape.count, applies.message());
  }
  // A measured choice costs little, and is made for the very size.
  const uint64_t h = has_plan_fits_ ? hash_combine(class_hash(shape), shape.count) : class_hash(shape);
  if (const auto it = choices_.find(h); it != choices_.end() && it->second->applies(shape, tree_).ok())
    return it->second;
  const algo::Algorithm* best = nullptr;
  double best_ns = 0;
  std::string reasons;
  const std::vector<Candidate> all = candidates(shape);
  // Prices and measurements are not compared with each other.
  const bool measured =
      std::any_of(all.begin(), all.end(), [](const Candidate& c) { return c.applies.ok() && c.measured; });
  for (const Candidate& c : all) {
    if (c.applies.ok() && measured && !c.measured) continue;
    if (!c.applies.ok()) {
      reasons += format(" {}: {};", c.algorithm->name, c.applies.message());
    } else if (best == nullptr || c.predicted_ns < best_ns) {
      best = c.algorithm;
      best_ns = c.predicted_ns;
    }
  }
  if (best == nullptr) {
    return error(moecclUnsupported, "no algorithm can run {} on this topology:{}", exec::op_name(shape.op), reasons);
  }
  choices_[h] = best;
  return best;
}

Result<std::shared_ptr<CachedPlan>> Selector::build(const PlanKey& key) {
  auto cached = std::make_shared<CachedPlan>();
  const auto make = [&](bool reachable, plan::Plan& built, exec::Choice& choice) -> Status {
    plan::Shape shape = shape_of(key, reachable);
    MOECCL_ASSIGN_OR_RETURN(const algo::Algorithm* a, choose(shape));
    shape.in_place = key.in_place;
    built = algo::build_for(*a, shape, tree_, rank_);
    choice.program = &built.programs.back();
    choice.chunking = built.chunking;
    choice.algorithm = a->name;
    choice.plan_hash = built.hash;
    choice.program_hash = hash_combine(built.hash, key.in_place ? 2 : 1);
    return {};
  };
  MOECCL_TRY(make(false, cached->staged, cached->choice));
  cached->signature = cached->choice.plan_hash;
  // A forced plan runs step by step. Scaled contributions are rounded before they are summed there as here, but not the
  // own one: in deterministic mode that must not depend on the plan.
  const uint64_t block_bytes = key.count * key.element_bytes;
  cached->eager = outboxes_ && tree_.n_ranks > 1 && exec::has_eager_form(key.op) && forced_[key.op].empty() &&
                  !(deterministic_ && key.scaled) && block_bytes <= transport::kOutboxBytes &&
                  exec::eager_bytes(key.op, tree_.n_ranks, block_bytes) <= transport::kOutboxBytes &&
                  std::string_view("oneshot") == cached->choice.algorithm;
  if (key.op == moecclOpAllToAllv) {
    cached->eager = outboxes_ && tree_.n_ranks > 1 && forced_[key.op].empty() &&
                    exec::eager_table_bytes(tree_.n_ranks) <= transport::kOutboxBytes / 2;
  }
  const uint64_t bytes = key.count * key.element_bytes *
                         std::max(plan::in_blocks(key.op, tree_.n_ranks), plan::out_blocks(key.op, tree_.n_ranks));
  if (heap_reach_ && bytes >= kAskReachBytes && tree_.n_ranks > 1 && key.op != moecclOpAllToAllv &&
      key.op != moecclOpTensorAllToAll) {
    MOECCL_TRY(make(true, cached->reachable, cached->choice_if_reachable));
    cached->asks_reach = cached->choice_if_reachable.plan_hash != cached->choice.plan_hash;
    if (cached->asks_reach) cached->signature = hash_combine(cached->signature, cached->choice_if_reachable.plan_hash);
  }
  // AllToAllvs begin in the staging, with one synchronisation; where buffers can be loaded and stored to directly, what
  // is left of large ones is copied once instead of twice. Not through process_vm_readv: it costs as much as it saves.
  const algo::Algorithm* direct = algo::find(key.op, "direct");
  if (key.op == moecclOpAllToAllv && forced_[key.op].empty() && direct != nullptr && shape_of(key, false).reach.views &&
      std::string_view("direct") != cached->choice.algorithm && direct->applies(shape_of(key, false), tree_).ok()) {
    cached->rest = algo::build_for(*direct, shape_of(key, false), tree_, rank_);
    cached->choice_for_rest = {&cached->rest.programs.back(), cached->rest.chunking, direct->name, cached->rest.hash};
    cached->has_rest = true;
    cached->signature = hash_combine(cached->signature, cached->rest.hash);
  }
  return cached;
}

Result<std::shared_ptr<CachedPlan>> Selector::get(const PlanKey& key) {
  if (const auto* last = again(key); last != nullptr) return *last;
  const uint64_t h = key_hash(key);
  if (const auto it = plans_.find(h); it != plans_.end() && it->second.first == key) {
    last_key_ = key;
    return last_ = it->second.second;
  }
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<CachedPlan> made, build(key));
  if (plans_.size() >= kMostPlans) plans_.clear();  // running operations keep theirs
  plans_.insert_or_assign(h, std::pair{key, made});
  last_key_ = key;
  return last_ = made;
}

}  // namespace moeccl::comm
