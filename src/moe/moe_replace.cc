// SPDX-License-Identifier: Apache-2.0
// A step of the re-placing combine: what ranks tell each other at its beginning, and the background thread's part.
#include "src/moe/moe_replace.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

#include "src/base/clock.h"
#include "src/base/hash.h"
#include "src/solve/sample.h"

namespace moeccl::comm {

// What a rank says first; its samples' next counts and its choices follow.
struct MoeReplacement::Hello {
  int32_t code = moecclSuccess;
  int32_t padding = 0;
  uint64_t hash = 0;  // of the given placement
};

namespace {

constexpr const char* kFields[] = {"sample_tokens", "mode", "residual", "use_next", "min_gain", "refine_pairs"};

Status check_config(const moecclReplaceConfig_t& c, const MoeConfig& layer, const plan::LevelTree& tree) {
  const int mode = solve::raw(c.mode);
  if (c.sample_tokens < 1 || c.sample_tokens > UINT32_MAX)
    return error(moecclInvalidArgument, "config.sample_tokens is {}: a sample has between 1 and {} tokens",
                 c.sample_tokens, UINT32_MAX);
  if (mode < moecclReplaceSolve || mode > moecclReplaceGiven)
    return error(moecclInvalidArgument, "config.mode is {}: not a moecclReplaceMode_t", mode);
  if (!(c.min_gain <= 1))
    return error(moecclInvalidArgument, "config.min_gain is {}: give a share below 1", c.min_gain);
  if (layer.domains && !layer.domains->plain())
    return error(moecclUnsupported,
                 "samples cannot move on a layer with expert domains (moecclHybridMoeCreate): use domains of size 1");
  const size_t element = moecclTypeSize(layer.type);
  if (layer.shape.row_bytes % element != 0)
    return error(moecclInvalidArgument,
                 "hidden_bytes is {}, not a multiple of the {} bytes of the layer's type: rows cannot be summed",
                 layer.shape.row_bytes, element);
  if (c.residual && uint64_t{layer.placement.n_experts()} + tree.n_ranks > 65535)
    return error(moecclUnsupported,
                 "config.residual with {} experts on {} ranks: together at most 65535 are possible; add the residual "
                 "outside, with mode moecclReplaceKeep",
                 layer.placement.n_experts(), tree.n_ranks);
  return {};
}

}  // namespace

MoeReplacement::MoeReplacement(MoeLayer& layer, const moecclReplaceConfig_t& config)
    : layer_(layer), config_(config), moe_config_(layer.config()) {
  const plan::LevelTree& tree = layer.host().tree();
  if (config.residual) moe_config_.placement = algo::with_residents(layer.config().placement);
  canonical_ = algo::CanonicalOrder(tree, moe_config_.placement).position;
  node_.assign(tree.levels[0].group_of_rank.begin(), tree.levels[0].group_of_rank.end());
  n_nodes_ = tree.levels[0].n_groups;
}

Result<std::unique_ptr<MoeReplacement>> MoeReplacement::create(MoeLayer& layer, const moecclReplaceConfig_t& config) {
  MoeHost& host = layer.host();
  Status own = check_config(config, layer.config(), host.tree());
  std::unique_ptr<MoeReplacement> made;
  if (own.ok()) {
    made.reset(new MoeReplacement(layer, config));
    for (const auto& c : layer.candidates()) {
      made->candidates_.push_back(std::make_unique<MoeCandidate>(made->moe_config_, made->moe_config_.placement,
                                                                 host.tree(), c->paths.algorithm(), host.rank(),
                                                                 host.staging_bytes()));
      const MoeSlots& slots = made->candidates_.back()->slots;
      if (!slots.enough())
        own = error(
            moecclOutOfMemory,
            "{} with residuals needs {} bytes of staging, {} are allowed: raise staging_bytes or memory_cap_bytes",
            c->name, slots.needed_bytes, slots.budget);
    }
  }
  const AgreedFields<std::size(kFields)> mine{
      {static_cast<double>(config.sample_tokens), static_cast<double>(solve::raw(config.mode)),
       static_cast<double>(config.residual != 0), static_cast<double>(config.use_next != 0), config.min_gain,
       static_cast<double>(config.refine_pairs)},
      own.code()};
  MOECCL_ASSIGN_OR_RETURN(const auto all, answers_of(host, mine, own, "fails in moecclReplaceCreate"));
  MOECCL_TRY(compare("moecclReplaceCreate", kFields, all));
  return made;
}

Status MoeReplacement::check(const MoeRouting& routing, const int32_t* next, const int32_t* placement) const {
  MOECCL_TRY(routing.on_host("re-placing"));
  if (layer_.map() != nullptr)
    return error(moecclUnsupported, "re-placing: experts of this layer change places (moecclExpertSwapAttach)");
  if (&routing.layer() != &layer_)
    return error(moecclInvalidArgument, "routing belongs to another layer than the replacement");
  MOECCL_ASSIGN_OR_RETURN(const algo::Samples samples, algo::Samples::make(config_.sample_tokens, routing.tokens_of_));
  const uint32_t rank = layer_.host().rank();
  if (config_.use_next && next == nullptr && samples.first[rank + 1] > samples.first[rank])
    return error(moecclInvalidArgument, "next is NULL, but config.use_next is set: give counts[{}][{}]",
                 samples.first[rank + 1] - samples.first[rank], layer_.config().placement.n_experts());
  if (config_.mode == moecclReplaceGiven) {
    if (placement == nullptr && samples.n() > 0)
      return error(moecclInvalidArgument, "placement is NULL, but config.mode is moecclReplaceGiven: give the {} homes",
                   samples.n());
    std::vector<int64_t> left(layer_.host().n_ranks());
    for (uint32_t r = 0; r < left.size(); ++r) left[r] = samples.first[r + 1] - samples.first[r];
    for (uint32_t i = 0; i < samples.n(); ++i) {
      if (placement[i] < 0 || static_cast<size_t>(placement[i]) >= left.size())
        return error(moecclInvalidArgument, "placement[{}] is {}: ranks are 0..{}", i, placement[i], left.size() - 1);
      if (--left[static_cast<size_t>(placement[i])] < 0)
        return error(
            moecclInvalidArgument, "placement gives rank {} more samples than it has now ({})", placement[i],
            samples.first[static_cast<size_t>(placement[i]) + 1] - samples.first[static_cast<size_t>(placement[i])]);
    }
  }
  // The same on all ranks, so all fail together: the tables of any placement, and everybody's choices.
  const algo::MoeShape& shape = layer_.config().shape;
  algo::RoutingLoad load;
  for (const uint64_t n : routing.tokens_of_) load.records += n;
  load.tokens = shape.max_tokens;
  load.choices = load.rows = load.records * (shape.top_k + 1);
  load.lists = 64;
  const uint64_t bytes = algo::RoutingTables::bytes_bound(load, 8) + 2 * load.choices * 16;
  if (moe_config_.memory_cap > 0 && bytes > moe_config_.memory_cap)
    return error(moecclOutOfMemory, "re-placing {} tokens needs up to {} bytes, memory_cap_bytes allows {}",
                 load.records, bytes, moe_config_.memory_cap);
  return {};
}

Status MoeReplacement::begin(MoeRouting& routing, const int32_t* next, const int32_t* placement) {
  // A solve that failed before was reported by the calls that needed it.
  (void)background_->wait();
  routing_ = nullptr;
  const Status own = check(routing, next, placement);
  if (own.ok()) {
    tokens_of_ = routing.tokens_of_;
    MOECCL_ASSIGN_OR_RETURN(samples_, algo::Samples::make(config_.sample_tokens, tokens_of_));
    placement_.assign(placement, placement + (config_.mode == moecclReplaceGiven ? samples_.n() : 0));
  } else if (routing.tokens_of_.size() != layer_.host().n_ranks()) {
    return own;  // nothing was agreed on any rank: a routing without an update
  }
  routing_ = &routing;
  const Status met = exchange(own, next, placement);
  if (!met.ok()) {
    routing_ = nullptr;
    return met;
  }
  routing_version_ = routing.version_;
  rows_ = algo::ResidualRows::make(choices_, moe_config_.placement, layer_.host().rank(), config_.residual != 0,
                                   routing.tables_);
  wait_us_ = -1;
  facts_ = {};
  routing.read_by(background_);
  background_->start([this] { return solve_and_build(); });
  return {};
}

Status MoeReplacement::exchange(const Status& own, const int32_t* next, const int32_t* placement) {
  MoeHost& host = layer_.host();
  const uint32_t n = host.n_ranks(), k = layer_.config().shape.top_k, n_experts = layer_.config().placement.n_experts();
  const std::vector<uint64_t>& tokens = routing_->tokens_of_;
  const uint64_t most = *std::max_element(tokens.begin(), tokens.end());
  const size_t next_bytes = config_.use_next ? most / config_.sample_tokens * n_experts * sizeof(int32_t) : 0;
  const size_t offset = sizeof(Hello) + next_bytes;
  const size_t stride = (offset + algo::packed_choices_bytes(most, k) + 7) / 8 * 8;
  std::vector<std::byte> mine(stride), all(stride * n);
  Hello hello{own.code(), 0, 0};
  if (own.ok()) {
    if (config_.mode == moecclReplaceGiven) hello.hash = hash_bytes(placement, samples_.n() * sizeof(int32_t));
    const size_t here = tokens[host.rank()] / config_.sample_tokens * n_experts * sizeof(int32_t);
    if (config_.use_next && here > 0) std::memcpy(mine.data() + sizeof(hello), next, here);
    algo::pack_choices(routing_->own_, mine.data() + offset);
  }
  std::memcpy(mine.data(), &hello, sizeof(hello));
  number_ = host.next_number();
  MOECCL_TRY(host.all_gather(mine.data(), stride, all.data()));
  MOECCL_TRY(own);
  for (uint32_t r = 0; r < n; ++r) {
    Hello theirs;
    std::memcpy(&theirs, all.data() + r * stride, sizeof(theirs));
    if (theirs.code != moecclSuccess) return failed_there(r, "could not begin re-placing", theirs.code);
    if (theirs.hash != hello.hash)
      return error(moecclMismatch, "rank {} gives another placement than rank {}: it must be the same on all ranks", r,
                   host.rank());
  }
  MOECCL_TRY(take_next(all.data() + sizeof(Hello), stride, n_experts));
  const algo::PackedChoices packed{all.data() + offset, stride, tokens, k, config_.residual != 0};
  MOECCL_ASSIGN_OR_RETURN(choices_, algo::unpack_choices(packed, moe_config_.placement, canonical_));
  return algo::check_against(routing_->tables_, choices_, layer_.config().placement, host.rank());
}

Status MoeReplacement::take_next(const std::byte* blobs, size_t stride, size_t n_experts) {
  next_.clear();
  if (!config_.use_next) return {};
  next_.resize(samples_.n() * n_experts);
  for (uint32_t r = 0; r < layer_.host().n_ranks(); ++r) {
    const size_t n = (samples_.first[r + 1] - samples_.first[r]) * n_experts;
    if (n > 0) std::memcpy(next_.data() + samples_.first[r] * n_experts, blobs + r * stride, n * sizeof(int32_t));
  }
  // Their sums over the experts of a rank are 32-bit numbers too.
  const auto most = static_cast<int32_t>(INT32_MAX / std::max<size_t>(n_experts, 1));
  for (size_t i = 0; i < next_.size(); ++i)
    if (next_[i] < 0 || next_[i] > most)
      return error(moecclInvalidArgument, "next of sample {} for expert {} is {}: give a count between 0 and {}",
                   i / n_experts, i % n_experts, next_[i], most);
  return {};
}

// ---- The background thread: a function of what all ranks know alike ----

Status MoeReplacement::solve_and_build() {
  const int64_t begun = now_ns();
  MOECCL_TRY(solve());
  MOECCL_TRY(build());
  solve_us_ = static_cast<double>(now_ns() - begun) / 1000;
  return {};
}

Status MoeReplacement::solve() {
  const plan::LevelTree& tree = layer_.host().tree();
  const MoeCandidate& plan = *candidates_[routing_->chosen_];
  const algo::CountRequest request{plan.paths.algorithm(), moe_config_.shape.expert_major, &moe_config_.placement,
                                   node_, n_nodes_};
  algo::SampleCounts counts = algo::count_samples(request, choices_, samples_);
  if (config_.use_next) algo::count_next(request, next_, layer_.config().placement.n_experts(), counts);
  std::vector<int32_t> current(samples_.n());
  for (uint32_t i = 0; i < current.size(); ++i) current[i] = static_cast<int32_t>(samples_.home(i));
  moecclSampleProblem_t problem = MOECCL_SAMPLE_PROBLEM_INIT;
  problem.n_samples = static_cast<int32_t>(samples_.n());
  problem.n_experts = counts.n_columns;
  problem.n_devices = static_cast<int32_t>(tree.n_ranks);
  problem.n_nodes = static_cast<int32_t>(n_nodes_);
  problem.num_gather = counts.num.data();
  problem.num_scatter = config_.use_next ? counts.next.data() : nullptr;
  problem.expert_device = counts.device.data();
  problem.device_node = node_.data();
  problem.current = current.data();
  problem.min_gain = config_.min_gain;
  problem.refine_pairs = config_.refine_pairs;
  const plan::Profile& profile = layer_.host().profile();
  const plan::LinkCost& outer = plan::link_of(tree, profile, 0);
  const plan::LinkCost& inner = plan::link_of(tree, profile, tree.depth() - 1);
  if (outer.bytes_per_ns > 0 && inner.bytes_per_ns > 0 && tree.depth() > 1) {
    const auto row_us = [&](const plan::LinkCost& link) {
      return static_cast<double>(moe_config_.shape.row_bytes) / link.bytes_per_ns / 1000;
    };
    problem.alpha_inter_us = outer.alpha_ns / 1000, problem.alpha_intra_us = inner.alpha_ns / 1000;
    problem.beta_inter_us = row_us(outer), problem.beta_intra_us = row_us(inner);
  }
  // Without rows there is nothing to move and nothing for the solver to look at.
  counts.num.push_back(0), current.push_back(0);
  problem.num_gather = counts.num.data(), problem.current = current.data();
  moecclSampleAnswer_t chosen{};
  MOECCL_TRY(run_solver(problem, &chosen));
  facts_.keep = chosen.keep;
  facts_.moved = chosen.moved;
  facts_.moved_nodes = chosen.moved_nodes;
  facts_.gain = chosen.gain;
  placement_hash_ = hash_bytes(placement_.data(), placement_.size() * sizeof(int32_t), samples_.n() + 1);
  return {};
}

Status MoeReplacement::run_solver(moecclSampleProblem_t given, moecclSampleAnswer_t* chosen) {
  MOECCL_ASSIGN_OR_RETURN(moecclSampleProblem_t problem, solve::checked(given));
  MOECCL_ASSIGN_OR_RETURN(auto workspace, solve::Workspace::make(nullptr, 0, solve::sample_bytes(problem), ""));
  const auto evaluate = [&](const int32_t* placement, moecclSampleAnswer_t* answer) {
    solve::Arena arena = workspace.arena();
    solve::evaluate_samples(problem, placement, answer, arena);
  };
  if (config_.mode == moecclReplaceKeep)
    placement_.assign(problem.current, problem.current + problem.n_samples);
  else if (config_.mode == moecclReplaceSolve)
    placement_.resize(samples_.n());
  placement_.push_back(0);  // never without an address
  if (config_.mode == moecclReplaceSolve) {
    solve::Arena arena = workspace.arena();
    solve::solve_samples(problem, placement_.data(), chosen, arena);
  } else {
    evaluate(placement_.data(), chosen);
  }
  // This combine alone: Eq. 3 of the gather.
  problem.num_scatter = nullptr;
  moecclSampleAnswer_t gather{};
  evaluate(placement_.data(), &gather);
  placement_.pop_back();
  facts_.node_bytes_before = static_cast<uint64_t>(gather.inter_before) * moe_config_.shape.row_bytes;
  facts_.node_bytes_after = static_cast<uint64_t>(gather.inter_after) * moe_config_.shape.row_bytes;
  return {};
}

Status MoeReplacement::build() {
  const uint32_t rank = layer_.host().rank();
  const MoeCandidate& plan = *candidates_[routing_->chosen_];
  const algo::Homes homes(samples_, placement_, layer_.host().n_ranks());
  local_samples_.clear();
  for (uint32_t i = 0; i < placement_.size(); ++i)
    if (static_cast<uint32_t>(placement_[i]) == rank) local_samples_.push_back(static_cast<int32_t>(i));
  const algo::Cut cut = algo::find_cut(plan.paths, moe_config_.placement, choices_, homes, plan.slots.slot_rows);
  if (cut.n_chunks == 0)
    return error(moecclInternalError, "no cut of the re-placed samples into slots of {} rows", plan.slots.slot_rows);
  const algo::HomeRecords records(plan.rank, plan.paths, choices_, homes, rows_);
  MOECCL_TRY(records.fill(tables_, moe_config_.shape, routing_->weighted_, routing_->tables_));
  tables_.build(std::max(cut.n_chunks, algo::moe_pipeline_chunks(cut.largest_edge_rows * moe_config_.shape.row_bytes)));
  for (uint32_t i = 0; i < plan.rank.edges.in.size(); ++i)
    if (node_[plan.rank.edges.in[i].peer] != node_[rank])
      facts_.node_bytes_sent += tables_.rows_returned(i) * moe_config_.shape.row_bytes;
  return {};
}

}  // namespace moeccl::comm
