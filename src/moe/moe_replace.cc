// SPDX-License-Identifier: Apache-2.0
// The beginning of a re-placing step: what ranks tell each other.
#include "src/moe/moe_replace.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

#include "src/base/adopt.h"
#include "src/base/clock.h"
#include "src/base/hash.h"
#include "src/solve/arena.h"
#include "src/solve/assignment.h"
#include "src/solve/sample.h"
#include "src/solve/sample_cost.h"

namespace moeccl::comm {

namespace {

constexpr const char* kFields[] = {"sample_tokens", "mode", "residual", "use_next", "min_gain", "refine_pairs"};

Status check_config(const moecclReplaceConfig_t& c, const MoeConfig& layer, const plan::LevelTree& tree) {
  const int mode = solve::raw(c.mode);
  if (c.sample_tokens < 1 || c.sample_tokens > UINT32_MAX)
    return error(moecclInvalidArgument, "config.sample_tokens is {}: a sample has between 1 and {} tokens",
                 c.sample_tokens, UINT32_MAX);
  if (mode < moecclReplaceSolve || mode > moecclReplaceGiven)
    return error(moecclInvalidArgument, "config.mode is {}: not a moecclReplaceMode_t", mode);
  if (c.residual < 0 || c.residual > 2)
    return error(moecclInvalidArgument, "config.residual is {}: give 0, 1 (the dispatched row) or 2 (a row of its own)",
                 c.residual);
  if (c.use_next < 0 || c.use_next > 2)
    return error(moecclInvalidArgument, "config.use_next is {}: give 0, 1 (counts) or 2 (choices)", c.use_next);
  if (!std::isfinite(c.min_gain) || c.min_gain > 1)
    return error(moecclInvalidArgument, "config.min_gain is {}: give a share below 1, or -1 for any gain", c.min_gain);
  if (layer.domains && !layer.domains->plain())
    return error(moecclUnsupported,
                 "samples cannot move on a layer with expert domains (moecclHybridMoeCreate): use domains of size 1");
  if (layer.shape.by_choice)
    return error(
        moecclUnsupported,
        "samples cannot move on a layer with algorithm \"flat:ordered\", whose sums are in the order of choices: "
        "give auto, flat, 2dh or hier:N");
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

// Sums of rows that are rounded to 16 bits or fewer depend on where they are formed.
bool clock_decides_bits(const MoeLayer& layer) {
  const moecclDataType_t type = layer.config().type;
  return layer.host().deterministic() && type != moecclFloat32 && type != moecclFloat64;
}

}  // namespace

MoeReplacement::MoeReplacement(MoeLayer& layer, const moecclReplaceConfig_t& config)
    : layer_(layer),
      rank_(layer.host().rank()),
      n_ranks_(layer.host().n_ranks()),
      config_(config),
      tree_(layer.host().tree()),
      moe_config_(layer.config()),
      gain_(config.mode == moecclReplaceSolve && !clock_decides_bits(layer) ? config.min_gain : -1,
            config.use_next != 0) {
  if (config.residual != 0) {
    residents_ = config.residual == 2 ? algo::Residents::kOfAll : algo::Residents::kOfLone;
    moe_config_.placement = algo::with_residents(layer.config().placement);
    if (config.residual == 2) ++moe_config_.shape.top_k;
  }
  canonical_ = algo::CanonicalOrder(tree_, moe_config_.placement).position;
  node_.assign(tree_.levels[0].group_of_rank.begin(), tree_.levels[0].group_of_rank.end());
  n_nodes_ = tree_.levels[0].n_groups;
  for (uint32_t l = 1; l + 1 < tree_.depth() && n_inner_ < solve::kMaxInner; ++l, ++n_inner_)
    for (const uint32_t group : tree_.levels[l].group_of_rank) inner_group_.push_back(static_cast<int32_t>(group));
}

Result<std::unique_ptr<MoeReplacement>> MoeReplacement::create(MoeLayer& layer, const moecclReplaceConfig_t* given) {
  MoeHost& host = layer.host();
  moecclReplaceConfig_t config = MOECCL_REPLACE_CONFIG_INIT;
  std::unique_ptr<MoeReplacement> made;
  const Status own = [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(config, adopt(given, "config"));
    MOECCL_TRY(check_config(config, layer.config(), host.tree()));
    made.reset(new MoeReplacement(layer, config));
    for (const auto& c : layer.candidates()) {
      made->candidates_.push_back(std::make_unique<MoeCandidate>(made->moe_config_, made->moe_config_.placement,
                                                                 made->tree_, c->paths.algorithm(), host.rank(),
                                                                 GrantedStaging{host.staging_bytes(), 0}));
      const MoeSlots& slots = made->candidates_.back()->slots;
      if (!slots.enough())
        return error(
            moecclOutOfMemory,
            "{} with residuals needs {} bytes of staging, {} are allowed: raise staging_bytes or memory_cap_bytes",
            c->name, slots.needed_bytes, slots.budget);
    }
    return {};
  }();
  const AgreedFields<std::size(kFields)> mine{
      {static_cast<double>(config.sample_tokens), static_cast<double>(solve::raw(config.mode)),
       static_cast<double>(config.residual), static_cast<double>(config.use_next), config.min_gain,
       static_cast<double>(config.refine_pairs)},
      own.code()};
  MOECCL_ASSIGN_OR_RETURN(const auto all, answers_of(host, mine, own, "fails in moecclReplaceCreate"));
  MOECCL_TRY(compare("moecclReplaceCreate", kFields, all));
  return made;
}

uint64_t MoeReplacement::rows_of_sample() const {
  const bool resides = residents_ != algo::Residents::kNone;
  return config_.sample_tokens * (layer_.config().shape.top_k + (resides ? 1 : 0));
}

Status MoeReplacement::check(const MoeRouting& routing, const int32_t* next, const int32_t* placement) const {
  // Checked first, because another layer's communicator may have been destroyed.
  if (&routing.layer() != &layer_)
    return error(moecclInvalidArgument, "routing belongs to another layer than the replacement");
  MOECCL_TRY(routing.on_host("re-placing"));
  if (layer_.map() != nullptr)
    return error(moecclUnsupported, "re-placing: experts of this layer change places (moecclExpertSwapAttach)");
  MOECCL_ASSIGN_OR_RETURN(const algo::Samples samples, algo::Samples::make(config_.sample_tokens, routing.tokens_of_));
  if (samples.n() > uint32_t{solve::kMostSamples})
    return error(moecclUnsupported,
                 "the ranks have {} samples of {} tokens, at most {} are possible: raise "
                 "config.sample_tokens",
                 samples.n(), config_.sample_tokens, solve::kMostSamples);
  if (samples.n() > 0 && rows_of_sample() * (config_.use_next == 2 ? 2 : 1) > uint64_t{solve::kMostCost})
    return error(
        moecclUnsupported,
        "config.sample_tokens is {}: a sample of so many tokens may have more than {} rows: give smaller samples",
        config_.sample_tokens, solve::kMostCost);
  const uint32_t rank = layer_.host().rank();
  if (config_.use_next && next == nullptr && samples.first[rank + 1] > samples.first[rank])
    return config_.use_next == 2
               ? error(moecclInvalidArgument, "next is NULL, but config.use_next is 2: give next_index[{}][{}]",
                       routing.tokens_of_[rank], layer_.config().shape.top_k)
               : error(moecclInvalidArgument, "next is NULL, but config.use_next is set: give counts[{}][{}]",
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
  // Bounds the tables of any placement, all ranks' choices and the solver. It is the same on all ranks, so all fail
  // together.
  const algo::MoeShape& shape = layer_.config().shape;
  algo::RoutingLoad load;
  for (const uint64_t n : routing.tokens_of_) load.records += n;
  load.tokens = shape.max_tokens;
  load.choices = load.rows = load.records * (shape.top_k + 1);
  load.lists = 64;
  const uint64_t bytes =
      algo::RoutingTables::bytes_bound(load, 8) + 2 * load.choices * 16 + solver_bytes(routing, samples.n());
  if (moe_config_.memory_cap > 0 && bytes > moe_config_.memory_cap)
    return error(moecclOutOfMemory, "re-placing {} tokens needs up to {} bytes, memory_cap_bytes allows {}",
                 load.records, bytes, moe_config_.memory_cap);
  return {};
}

uint64_t MoeReplacement::solver_bytes(const MoeRouting& routing, uint32_t n_samples) const {
  const int32_t other = 0;
  moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
  p.n_samples = static_cast<int32_t>(n_samples);
  p.n_devices = static_cast<int32_t>(n_ranks_), p.n_nodes = static_cast<int32_t>(n_nodes_);
  p.n_inner = n_inner_, p.inner_group = inner_group_.data();
  p.num_scatter = config_.use_next ? &other : nullptr;
  const uint64_t counts = uint64_t{n_samples} * columns(routing) * sizeof(int32_t);
  return counts * (config_.use_next ? 2 : 1) + sent(routing).bytes * (n_ranks_ + 1) + solve::sample_bytes(p);
}

Status MoeReplacement::begin(MoeRouting& routing, const int32_t* next, const int32_t* placement) {
  (void)prepared();  // the calls that needed an earlier, failed solve have already reported it
  const int64_t begun = now_ns();
  MOECCL_TRY(begin_step(routing, next, placement));
  begin_us_ = static_cast<double>(now_ns() - begun) / 1000;
  return {};
}

Status MoeReplacement::begin_step(MoeRouting& routing, const int32_t* next, const int32_t* placement) {
  routing_ = nullptr;
  const Status own = check(routing, next, placement);
  if (own.ok()) {
    tokens_of_ = routing.tokens_of_;
    MOECCL_ASSIGN_OR_RETURN(samples_, algo::Samples::make(config_.sample_tokens, tokens_of_));
    placement_.assign(placement, placement + (config_.mode == moecclReplaceGiven ? samples_.n() : 0));
  } else if (routing.tokens_of_.size() != layer_.host().n_ranks()) {
    return own;  // no rank agreed on anything: the routing never had an update
  }
  routing_ = &routing;
  wait_us_ = -1;
  facts_ = {};
  at_home_ = skips(own);
  if (at_home_ && !own.ok()) {
    routing_ = nullptr;
    return own;
  }
  if (at_home_) return begin_at_home(routing);
  const Status met = exchange(own, next, placement);
  if (!met.ok()) {
    routing_ = nullptr;
    return met;
  }
  routing_version_ = routing.version_;
  price_links();
  start(&MoeReplacement::solve_and_build);
  return {};
}

void MoeReplacement::start(Status (MoeReplacement::*work)()) {
  routing_->read_by(background_);
  (void)background_->enqueue(background_->hold([this, work]() -> Status {
    prepared_ = contained([&] { return (this->*work)(); });
    return {};
  }));
}

const Status& MoeReplacement::prepared() {
  (void)background_->synchronize();
  return prepared_;
}

// A deterministic communicator must produce the same bits whatever the clock says, but a residual that is added at home
// is not added where the first expert is.
bool MoeReplacement::skips(const Status& own) {
  if (residents_ == algo::Residents::kOfLone && layer_.host().deterministic()) return false;
  const bool can = fits_at_home();
  // The other ranks begin without this one, which calls again: only then does the step count.
  if (!own.ok() && can) return gain_.pauses();
  return gain_.skips(can);
}

// Looks at all candidates, not only at the routing's plan, so that a rank with a wrong routing comes to the same
// answer.
bool MoeReplacement::fits_at_home() const {
  if (residents_ == algo::Residents::kNone) return true;
  return std::equal(candidates_.begin(), candidates_.end(), layer_.candidates().begin(),
                    [](const auto& ours, const auto& theirs) {
                      const algo::BlockWidths &own = ours->paths.widths(), &other = theirs->paths.widths();
                      for (uint32_t h = 0; h < ours->paths.n_hops(); ++h)
                        if (own.rows(h, ours->slots.slot_rows) < other.rows(h, theirs->slots.slot_rows)) return false;
                      return true;
                    });
}

Status MoeReplacement::begin_at_home(MoeRouting& routing) {
  // No exchange has ended what the last step still has on a stream, which may read the lists that are now made again.
  if (residents_ != algo::Residents::kNone) layer_.host().wait_idle();
  number_ = layer_.host().next_number();
  routing_version_ = routing.version_;
  const uint64_t n_tokens = tokens_of_[layer_.host().rank()];
  rows_ = residents_ == algo::Residents::kNone ? algo::ResidualRows{}
                                               : algo::ResidualRows::at_home(routing.tables_, n_tokens);
  n_rows_ = residents_ == algo::Residents::kNone ? routing.tables_.n_rows() : rows_.n_rows;
  of_rows_.clear(), of_tokens_ = rows_.of_tokens;
  placement_.resize(samples_.n());
  for (uint32_t i = 0; i < samples_.n(); ++i) placement_[i] = static_cast<int32_t>(samples_.home(i));
  placement_hash_ = hash_bytes(placement_.data(), placement_.size() * sizeof(int32_t), samples_.n() + 1);
  facts_.keep = facts_.skipped = 1;
  facts_.gain = gain_.gain();
  start(&MoeReplacement::build_at_home);
  return {};
}

algo::CountRequest MoeReplacement::count_request() const {
  return {candidates_[routing_->chosen_]->paths.algorithm(), moe_config_.shape.expert_major, &moe_config_.placement,
          node_, n_nodes_};
}

size_t MoeReplacement::columns(const MoeRouting& routing) const {
  // exchange() asks before all ranks have checked: a routing of another layer may run a plan that this one lacks.
  const size_t chosen = std::min(routing.chosen_, candidates_.size() - 1);
  const algo::MoeAlgorithm algorithm = candidates_[chosen]->paths.algorithm();
  return algorithm.dedup() || !moe_config_.shape.expert_major ? n_ranks_ : moe_config_.placement.n_experts();
}

MoeReplacement::Sent MoeReplacement::sent(const MoeRouting& routing) const {
  const uint64_t most = *std::max_element(routing.tokens_of_.begin(), routing.tokens_of_.end());
  const size_t next = config_.use_next ? most / config_.sample_tokens * columns(routing) * sizeof(int32_t) : 0;
  const size_t at = sizeof(Hello) + next;
  return {at, (at + algo::packed_choices_bytes(most, layer_.config().shape.top_k) + 7) / 8 * 8};
}

Result<std::vector<int32_t>> MoeReplacement::own_next(const int32_t* next) const {
  const uint64_t n_tokens = tokens_of_[layer_.host().rank()];
  const uint32_t n_experts = layer_.config().placement.n_experts();
  if (n_tokens == 0) return std::vector<int32_t>();
  if (config_.use_next == 2) {
    auto made = algo::next_of_choices(count_request(), layer_.order(), {next, nullptr, n_tokens},
                                      layer_.config().shape.top_k, config_.sample_tokens);
    if (!made.ok()) return std::move(made).status().with_context("next");
    return made;
  }
  const std::span<const int32_t> counts{next, n_tokens / config_.sample_tokens * n_experts};
  // The sums of these counts over a rank's experts are 32-bit numbers too.
  const auto most = static_cast<int32_t>(INT32_MAX / std::max<size_t>(n_experts, 1));
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i] < 0 || counts[i] > most)
      return error(moecclInvalidArgument,
                   "next of sample {} of this rank for expert {} is {}: give a count between 0 and {}", i / n_experts,
                   i % n_experts, counts[i], most);
  std::vector<int32_t> made =
      algo::next_of_counts(count_request(), routing_->own_, n_experts, counts, config_.sample_tokens);
  // The solver's costs are a sample's rows of both operations together.
  const size_t n_samples = n_tokens / config_.sample_tokens, columns = made.size() / n_samples;
  const auto room = static_cast<int64_t>(solve::kMostCost - rows_of_sample());
  for (size_t i = 0; i < n_samples; ++i) {
    const std::span<const int32_t> sample = std::span(made).subspan(i * columns, columns);
    if (const int64_t rows = std::accumulate(sample.begin(), sample.end(), int64_t{0}); rows > room)
      return error(moecclInvalidArgument, "next of sample {} of this rank counts {} rows: at most {} are possible", i,
                   rows, room);
  }
  return made;
}

Status MoeReplacement::exchange(const Status& checked, const int32_t* next, const int32_t* placement) {
  MoeHost& host = layer_.host();
  const uint32_t n = host.n_ranks();
  const Sent sends = sent(*routing_);
  choices_at_ = sends.choices_at, stride_ = sends.bytes;
  std::vector<std::byte> mine(stride_);
  gathered_.resize(stride_ * n);
  Status own = checked;
  if (own.ok() && config_.use_next) {
    if (const auto made = own_next(next); !made.ok()) {
      own = made.status();
    } else if (!made->empty()) {
      std::memcpy(mine.data() + sizeof(Hello), made->data(), made->size() * sizeof(int32_t));
    }
  }
  Hello hello{own.code(), 0, 0, times_};
  if (own.ok()) {
    if (config_.mode == moecclReplaceGiven) hello.hash = hash_bytes(placement, samples_.n() * sizeof(int32_t));
    algo::pack_choices(routing_->own_, mine.data() + choices_at_);
  }
  std::memcpy(mine.data(), &hello, sizeof(hello));
  number_ = host.next_number();
  times_ = {};
  MOECCL_TRY(host.all_gather(mine.data(), stride_, gathered_.data()));
  MOECCL_TRY(own);
  std::vector<ReplaceGain::Times> times;
  for (uint32_t r = 0; r < n; ++r) {
    Hello theirs;
    std::memcpy(&theirs, gathered_.data() + r * stride_, sizeof(theirs));
    if (theirs.code != moecclSuccess) return failed_there(r, "could not begin re-placing", theirs.code);
    if (theirs.hash != hello.hash)
      return error(moecclMismatch, "rank {} gives another placement than rank {}: it must be the same on all ranks", r,
                   host.rank());
    times.push_back(theirs.times);
  }
  gain_.note(times);
  // With the residual at the first experts, only the choices tell how many rows combine's input has.
  if (residents_ == algo::Residents::kOfLone) {
    MOECCL_TRY(take_choices());
    n_rows_ = rows_.n_rows, of_rows_ = std::move(rows_.of_rows), of_tokens_ = std::move(rows_.of_tokens);
    return {};
  }
  const bool rows_for_all = residents_ == algo::Residents::kOfAll;
  algo::ResidualRows seen;
  if (rows_for_all) seen = algo::ResidualRows::at_home(routing_->tables_, routing_->tokens_of_[host.rank()]);
  n_rows_ = rows_for_all ? seen.n_rows : routing_->tables_.n_rows();
  of_rows_.clear(), of_tokens_ = std::move(seen.of_tokens);
  return {};
}

}  // namespace moeccl::comm
