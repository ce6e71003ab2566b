// SPDX-License-Identifier: Apache-2.0
// A routing's update: five steps, each of which ends with the same verdict on all ranks.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "src/base/adopt.h"
#include "src/exec/flight.h"
#include "src/moe/moe_layer.h"

namespace moeccl::comm {

// The first thing that every rank sends. A guess for each candidate follows (rank 0's count, see Race), then the rank's
// LevelCounts, level by level for each candidate: of dispatch, and of combine where that returns fewer rows.
struct MoeRouting::Hello {
  uint64_t n_tokens = 0;
  uint64_t delivered = 0;  // rows that experts get of this rank's tokens
  int32_t code = moecclSuccess;
  uint32_t weighted = 0;
  // For a routing with an operation in a graph: 1 + its candidate, and whether there were weights.
  uint32_t captured = 0, captured_weighted = 0;
};

// What every rank sends once it has its records.
struct MoeRouting::Agreement {
  int32_t code = moecclSuccess;
  uint32_t min_chunks = 1, kernel_chunks = 1;  // for the slots of the host and of the persistent kernel
  uint32_t padding = 0;
  uint64_t largest_edge_bytes = 0;
  uint64_t needed_bytes = 0;  // > 0: the cap is exceeded
  // The layer's last step whose operations have run.
  uint64_t step_number = 0;
  double step_took_us = 0;
};

namespace {

constexpr const char* kFails = "could not update its routing";
// In place of a size: the rank has failed and has no records.
constexpr uint64_t kFailed = ~uint64_t{0};
// The most bytes that a rank sends when all blocks have room for the largest message.
constexpr size_t kAtOnceBytes = 8 << 10;

// Checks the rows that ranks claim to put on the links: at most one row for each choice and hop.
Status check_counts(const std::vector<algo::LevelCount>& counts, const std::vector<uint64_t>& tokens_of, uint64_t top_k,
                    const plan::LevelTree& tree) {
  for (size_t i = 0; i < counts.size(); ++i) {
    const algo::LevelCount& c = counts[i];
    const size_t rank = i / tree.depth(), level = i % tree.depth();
    const uint64_t most = tokens_of[rank] * top_k * tree.depth();
    if (c.rows > most || c.peak > c.rows || c.reach > tree.levels[level].n_groups)
      return error(moecclRemoteError, "rank {} says that its {} tokens send {} rows across {}, {} of them to one group",
                   rank, tokens_of[rank], c.rows, tree.levels[level].name, c.peak);
  }
  return {};
}

}  // namespace

Status MoeRouting::update(const int32_t* topk_index, const float* topk_weight, uint64_t n_tokens,
                          const Status& refusal) {
  wait_for_readers();
  if (cuda_tables_ != nullptr) cuda_tables_->wait();
  ready_ = on_device_ = false;
  ++version_;
  Status status = update_all(topk_index, topk_weight, n_tokens, refusal);
  if (!status.ok()) {
    tokens_of_.clear();  // ranks may have read different parts of it
    if (device_tables_ != nullptr) (void)device_tables_->clear();
    return status;
  }
  measured_dispatch_.ns = measured_combine_.ns = measured_backward_.ns = 0;
  step_ = {number_, own_.n_tokens, chosen_, {}, 0};
  for (const algo::MoePrice& p : prices_) step_.prices_us.push_back(p.both_us());
  if (layer_.map() != nullptr) note_routing(topk_index);
  ready_ = true;
  return {};
}

Status MoeRouting::update_all(const int32_t* topk_index, const float* topk_weight, uint64_t n_tokens,
                              const Status& refusal) {
  Status own = refusal.ok() ? check_arguments(topk_index, n_tokens) : refusal;
  if (own.ok()) own = layer_.host().check_reach({topk_index, topk_weight});
  if (own.ok()) own = assign({topk_index, topk_weight, n_tokens});
  MOECCL_TRY(greet(own));
  MOECCL_TRY(exchange_records());
  MOECCL_TRY(agree());
  return bring_tables();
}

Status MoeRouting::assign(const algo::TopK& topk) {
  if (layer_.map() != nullptr) return assign_to_slots(topk);
  engine_ = topk.n_tokens > 0 ? layer_.host().engine_for(topk.index) : nullptr;
  if (engine_ == nullptr) return own_.assign(layer_.config().shape, layer_.placement(), layer_.order(), topk);
  own_.n_tokens = topk.n_tokens;
  own_.weighted = topk.weight != nullptr;
  MOECCL_ASSIGN_OR_RETURN(cuda_, layer_.cuda_routing(*engine_));
  return cuda_->assign(*engine_, topk);
}

Status MoeRouting::assign_to_slots(const algo::TopK& topk) {
  engine_ = nullptr;
  if (topk.n_tokens > 0 && layer_.host().is_device_memory(topk.index))
    return error(moecclUnsupported, "a layer with expert swap reads its choices on the host: give topk_index there");
  const algo::MoeShape& shape = layer_.config().shape;
  const std::span<const int32_t> index(topk.index, topk.n_tokens * shape.top_k);
  for (uint64_t t = 0; t < topk.n_tokens; ++t)
    MOECCL_TRY(algo::check_choices(layer_.order(), index.subspan(t * shape.top_k, shape.top_k), t));
  layer_.map()->to_slots(index, slots_);
  return own_.assign(shape, layer_.placement(), layer_.order(), {slots_.data(), topk.weight, topk.n_tokens});
}

void MoeRouting::note_routing(const int32_t* topk_index) {
  algo::ExpertMap& map = *layer_.map();
  map.note_routing({topk_index, own_.n_tokens * layer_.config().shape.top_k},
                   layer_.candidates()[chosen_]->paths.algorithm());
  map_version_ = map.version();
  local_experts_.clear();
  for (const int32_t slot : tables_.local_experts) local_experts_.push_back(map.expert_in()[static_cast<size_t>(slot)]);
  drop_counts_.resize(own_.drop_counts.size());
  for (size_t e = 0; e < drop_counts_.size(); ++e)
    drop_counts_[e] = own_.drop_counts[static_cast<size_t>(map.slot_of()[e])];
}

void MoeRouting::read_by(const std::shared_ptr<HostStream>& reader) {
  std::erase_if(readers_, [&](const auto& known) { return known.expired() || known.lock() == reader; });
  readers_.push_back(reader);
}

void MoeRouting::wait_for_readers() {
  for (const auto& known : readers_)
    if (const std::shared_ptr<HostStream> reader = known.lock()) (void)reader->synchronize();  // its work never fails
  readers_.clear();
}

Status MoeRouting::check_arguments(const int32_t* topk_index, uint64_t n_tokens) const {
  const algo::MoeShape& shape = layer_.config().shape;
  if (n_tokens > shape.max_tokens)
    return error(moecclInvalidArgument, "n_tokens is {}: the layer was created with max_tokens {}", n_tokens,
                 shape.max_tokens);
  if (!topk_index && n_tokens > 0)
    return error(moecclInvalidArgument, "topk_index is NULL: give [{}][{}] expert numbers", n_tokens, shape.top_k);
  return {};
}

Status MoeRouting::greet(const Status& own) {
  MoeHost& host = layer_.host();
  const size_t count_bytes = host.tree().depth() * sizeof(algo::LevelCount);
  size_t bytes = sizeof(Hello) + layer_.candidates().size() * sizeof(float);
  for (const auto& candidate : layer_.candidates()) bytes += count_bytes * (candidate->returns ? 2 : 1);
  std::vector<std::byte> mine(bytes);
  Hello hello{own_.n_tokens,
              0,
              own.code(),
              own_.weighted,
              captured_ ? static_cast<uint32_t>(chosen_) + 1 : 0,
              captured_ && captured_weighted_};
  if (own.ok())
    hello.delivered = engine_ != nullptr ? cuda_->delivered()
                                         : algo::rows_to_groups(layer_.into_experts(), layer_.placement(), own_)[0];
  std::memcpy(mine.data(), &hello, sizeof(hello));
  std::byte* at = mine.data() + sizeof(hello);
  guesses_ = layer_.guesses(own_.n_tokens);
  std::memcpy(at, guesses_.data(), guesses_.size() * sizeof(float));
  at += guesses_.size() * sizeof(float);
  for (size_t c = 0; c < layer_.candidates().size() && own.ok(); ++c) {
    const MoeCandidate& candidate = *layer_.candidates()[c];
    for (const bool back : {false, true}) {
      if (back && !candidate.returns) continue;
      if (engine_ != nullptr)
        cuda_->counts(c, back, counts_);
      else
        algo::count_rows(back ? *candidate.returns : candidate.ways, host.tree(), layer_.placement(), own_, counts_);
      std::memcpy(at, counts_.data(), count_bytes);
      at += count_bytes;
    }
  }
  gathered_.resize(bytes * host.n_ranks());
  number_ = host.next_number();
  MOECCL_TRY(host.all_gather(mine.data(), bytes, gathered_.data()));
  keep_step();  // the exchange has ended what was in flight
  MOECCL_TRY(own);
  return choose(gathered_.data(), bytes);
}

// A rank without tokens has no weights to pass; all others must agree. All ranks see all answers and fail together.
Status MoeRouting::agree_on_weights(std::span<const Hello> hellos) {
  weighted_ = false;
  bool known = false;
  uint32_t first = 0;
  for (uint32_t r = 0; r < hellos.size(); ++r) {
    const Hello& hello = hellos[r];
    if (hello.n_tokens == 0) continue;
    if (known && (hello.weighted != 0) != weighted_)
      return error(moecclMismatch, "rank {} gives {}, rank {} {}: topk_weight must be NULL on all ranks or on none",
                   first, weighted_ ? "weights" : "no weights", r, weighted_ ? "does not" : "does");
    if (!known) first = r, weighted_ = hello.weighted != 0;
    known = true;
  }
  return {};
}

// Prices each plan from the counts of all ranks, corrected by the times of earlier steps, and takes the cheapest. All
// ranks have the same figures and so make the same choice.
Status MoeRouting::choose(const std::byte* greetings, size_t bytes) {
  MoeHost& host = layer_.host();
  const uint32_t n = host.n_ranks(), depth = host.tree().depth();
  tokens_of_.resize(n);
  std::vector<Hello> hellos(n);
  uint64_t delivered = 0;
  for (uint32_t r = 0; r < n; ++r) {
    Hello& hello = hellos[r];
    std::memcpy(&hello, greetings + r * bytes, sizeof(hello));
    if (hello.code != moecclSuccess) return failed_there(r, kFails, hello.code);
    if (hello.n_tokens > layer_.config().shape.max_tokens)
      return error(moecclRemoteError, "rank {} says that it brings {} tokens: the layer was created with max_tokens {}",
                   r, hello.n_tokens, layer_.config().shape.max_tokens);
    if (hello.delivered > hello.n_tokens * layer_.config().shape.top_k)
      return error(moecclRemoteError, "rank {} says that experts get {} rows of its {} tokens", r, hello.delivered,
                   hello.n_tokens);
    tokens_of_[r] = hello.n_tokens;
    delivered += hello.delivered;
  }
  MOECCL_TRY(agree_on_weights(hellos));
  prices_.clear();
  std::vector<double> both_us;
  std::memcpy(guesses_.data(), greetings + sizeof(Hello), guesses_.size() * sizeof(float));
  const std::byte* at = greetings + sizeof(Hello) + guesses_.size() * sizeof(float);
  const auto next_loads = [&]() -> Result<std::vector<algo::LevelLoad>> {
    std::vector<algo::LevelCount> counts(size_t{n} * depth);
    for (uint32_t r = 0; r < n; ++r) std::memcpy(&counts[size_t{r} * depth], at + r * bytes, depth * sizeof(counts[0]));
    at += depth * sizeof(counts[0]);
    MOECCL_TRY(check_counts(counts, tokens_of_, layer_.config().shape.top_k, host.tree()));
    return algo::level_loads(host.tree(), counts);
  };
  const std::shared_ptr<const plan::Profile> profile = host.profile();
  const uint64_t tokens = std::accumulate(tokens_of_.begin(), tokens_of_.end(), uint64_t{0});
  for (const auto& candidate : layer_.candidates()) {
    algo::MoeRows rows;
    rows.row_bytes = layer_.config().shape.row_bytes;
    rows.delivered = static_cast<double>(delivered) / n;
    rows.tokens = static_cast<double>(tokens) / n;
    MOECCL_ASSIGN_OR_RETURN(rows.levels, next_loads());
    if (candidate->returns) {
      MOECCL_ASSIGN_OR_RETURN(rows.returned, next_loads());
    }
    prices_.push_back(algo::price(candidate->paths.algorithm(), host.tree(), *profile, std::move(rows)));
    both_us.push_back(prices_.back().both_us());
  }
  chosen_ = layer_.pick(both_us, guesses_);
  return keep_captured(hellos);
}

// A graph replays the plan that it captured, so updates keep that plan. All ranks see all answers.
Status MoeRouting::keep_captured(std::span<const Hello> hellos) {
  const uint64_t tokens = std::accumulate(tokens_of_.begin(), tokens_of_.end(), uint64_t{0});
  for (uint32_t r = 0; r < hellos.size(); ++r) {
    const Hello& hello = hellos[r];
    if (hello.captured == 0) continue;
    if (hello.captured > layer_.candidates().size())
      return error(moecclRemoteError, "rank {} sent a routing's plan that does not exist", r);
    chosen_ = hello.captured - 1;
    if (tokens > 0 && weighted_ != (hello.captured_weighted != 0)) {
      return error(moecclInvalidUsage,
                   "the routing is part of a graph, captured {} weights, and is updated {}: give topk_weight as it was "
                   "then, or capture with another routing",
                   hello.captured_weighted != 0 ? "with" : "without", weighted_ ? "with some" : "without");
    }
    weighted_ = hello.captured_weighted != 0;
    return {};
  }
  return {};
}

Status MoeRouting::write_records() {
  if (engine_ != nullptr) return cuda_->write(*engine_, chosen_, own_, writer_);
  writer_.write(layer_.candidates()[chosen_]->ways, layer_.placement(), own_);
  return {};
}

Status MoeRouting::exchange_records() {
  const Status own = write_records();
  // All ranks know every rank's tokens, and so the largest message that any rank may send.
  const uint64_t tokens = *std::max_element(tokens_of_.begin(), tokens_of_.end());
  const size_t block = std::bit_ceil(sizeof(uint64_t) + most_record_bytes(tokens));  // few sizes: calls are kept
  if (block * tokens_of_.size() <= kAtOnceBytes) return exchange_at_once(own, block);
  return exchange_sized(own);
}

size_t MoeRouting::most_record_bytes(uint64_t tokens) const {
  const uint64_t choices = tokens * layer_.config().shape.top_k;
  return algo::message_words(tokens, choices, weighted_ ? choices : 0) * sizeof(uint32_t);
}

// Keeps the sizes of the records that each rank sends here and makes room for them. If a rank has failed, returns that.
Status MoeRouting::expect_records(const Status& own, std::span<const uint64_t> sizes) {
  MOECCL_TRY(own);
  const auto n = static_cast<uint32_t>(sizes.size());
  for (uint32_t r = 0; r < n; ++r)
    if (sizes[r] == kFailed) return failed_there(r, kFails, moecclRemoteError);
  received_bytes_.assign(sizes.begin(), sizes.end());
  for (uint32_t r = 0; r < n; ++r) {
    const size_t most = most_record_bytes(tokens_of_[r]);
    if (sizes[r] > most || sizes[r] % sizeof(uint32_t) != 0)
      return error(moecclRemoteError,
                   "rank {} announces {} bytes of routing records for {} tokens: at most {} are possible", r, sizes[r],
                   tokens_of_[r], most);
  }
  received_.resize(std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}) / sizeof(uint32_t));
  return {};
}

// A few tokens fit into blocks that have room for the largest message, each after its size: one exchange, not two.
Status MoeRouting::exchange_at_once(const Status& own, size_t block) {
  const uint32_t n = layer_.host().n_ranks();
  std::vector<std::byte> out(block * n), in(block * n);
  const auto* records = reinterpret_cast<const std::byte*>(writer_.words().data());
  for (uint32_t r = 0; r < n; ++r) {
    const uint64_t size = own.ok() ? writer_.bytes()[r] : kFailed;
    std::memcpy(&out[r * block], &size, sizeof(size));
    if (!own.ok()) continue;
    std::copy_n(records, size, &out[r * block] + sizeof(size));  // both may be NULL where there are no tokens
    records += size;
  }
  MOECCL_TRY(layer_.host().all_to_all(out.data(), block, in.data()));
  std::vector<uint64_t> sizes(n);
  for (uint32_t r = 0; r < n; ++r) std::memcpy(&sizes[r], &in[r * block], sizeof(sizes[r]));
  MOECCL_TRY(expect_records(own, sizes));
  auto* to = reinterpret_cast<std::byte*>(received_.data());
  for (uint32_t r = 0; r < n; ++r) {
    to = std::copy_n(&in[r * block] + sizeof(uint64_t), sizes[r], to);
  }
  return {};
}

Status MoeRouting::exchange_sized(const Status& own) {
  MoeHost& host = layer_.host();
  const uint32_t n = host.n_ranks();
  std::vector<uint64_t> sizes(n), mine(n, kFailed);
  if (own.ok()) mine.assign(writer_.bytes().begin(), writer_.bytes().end());
  // Few ranks exchange all sizes, which takes one message where an AllToAll takes several. The bytes grow with n^2.
  constexpr uint32_t kFewRanks = 64;
  if (n <= kFewRanks) {
    std::vector<uint64_t> all(size_t{n} * n);  // [from][to]
    MOECCL_TRY(host.all_gather(mine.data(), n * sizeof(uint64_t), all.data()));
    for (uint32_t r = 0; r < n; ++r) sizes[r] = all[size_t{r} * n + host.rank()];
  } else {
    MOECCL_TRY(host.all_to_all(mine.data(), sizeof(uint64_t), sizes.data()));
  }
  MOECCL_TRY(expect_records(own, sizes));
  return host.all_to_all_v(writer_.words().data(), writer_.bytes().data(), received_.data(), received_bytes_.data());
}

Status MoeRouting::read_received(Agreement* mine) {
  const MoeHost& host = layer_.host();
  const MoeConfig& config = layer_.config();
  const MoeCandidate& plan = *layer_.candidates()[chosen_];
  std::vector<algo::RecordView> views(host.n_ranks());
  const uint32_t* at = received_.data();
  for (uint32_t r = 0; r < host.n_ranks(); ++r) {
    MOECCL_ASSIGN_OR_RETURN(views[r], algo::read_records(at, received_bytes_[r], weighted_));
    at += received_bytes_[r] / sizeof(uint32_t);
  }
  views[host.rank()] = algo::view_of(own_);
  MOECCL_TRY(tables_.receive(plan.rank, config.shape, views, tokens_of_, weighted_));
  uint64_t needed_rows = 0;
  mine->min_chunks = tables_.min_chunks(plan.slots.slot_rows, &needed_rows);
  if (layer_.has_tables()) mine->kernel_chunks = tables_.min_chunks(plan.kernel_rows, &needed_rows);
  mine->largest_edge_bytes = tables_.largest_edge_rows() * config.shape.row_bytes;
  const uint32_t chunks = std::max({mine->min_chunks, mine->kernel_chunks, algo::kMoePipelineChunks});
  const uint64_t held = algo::RoutingTables::bytes_bound(tables_.load(), chunks);
  uint64_t bytes = held + (writer_.words().size() + received_.size()) * sizeof(uint32_t) + plan.staging_bytes(config) +
                   layer_.device_bytes(device_tables_ == nullptr);
  if (layer_.has_tables()) bytes += exec::RowTables::bytes_bound(held / 2);
  if (cuda_tables_ != nullptr) bytes += cuda_tables_->memory_bytes();
  if (config.memory_cap > 0 && bytes > config.memory_cap) mine->needed_bytes = bytes;
  return {};
}

// A late rank makes the others wait, and a rank with few rows finishes early, so the median rank counts.
void MoeRouting::note_step(const MoeStep& step, std::span<const Agreement> all) {
  std::vector<double> took;
  for (const Agreement& a : all) {
    if (a.step_number == 0 || a.step_number != step.number) return;
    took.push_back(a.step_took_us);
  }
  const auto middle = took.begin() + static_cast<ptrdiff_t>(took.size() / 2);
  std::nth_element(took.begin(), middle, took.end());
  layer_.note_step(step, *middle);
}

Status MoeRouting::agree() {
  MoeHost& host = layer_.host();
  Agreement mine;
  const Status own = read_received(&mine);
  mine.code = own.code();
  const MoeStep step = layer_.take_step();
  mine.step_number = step.number;
  mine.step_took_us = step.took_us;
  MOECCL_ASSIGN_OR_RETURN(const std::vector<Agreement> all, answers_of(host, mine, own, kFails));
  uint32_t chunks = 1, kernel_chunks = 1;
  uint64_t largest = 0;
  for (uint32_t r = 0; r < host.n_ranks(); ++r) {
    if (all[r].needed_bytes > 0)
      return error(moecclOutOfMemory, "rank {} needs {} bytes for this routing, memory_cap_bytes allows {}", r,
                   all[r].needed_bytes, layer_.config().memory_cap);
    // At most one chunk for each token of an origin, see RoutingTables::min_chunks().
    for (const uint32_t asked : {all[r].min_chunks, all[r].kernel_chunks}) {
      if (asked > std::bit_ceil(layer_.config().shape.max_tokens))
        return error(moecclRemoteError, "rank {} asks for {} chunks: {} tokens have at most {}", r, asked,
                     layer_.config().shape.max_tokens, std::bit_ceil(layer_.config().shape.max_tokens));
      if (asked == 0)
        return error(moecclInternalError, "rank {} found no cut of this routing into slots of {} rows", r,
                     layer_.candidates()[chosen_]->slots.slot_rows);
    }
    chunks = std::max(chunks, all[r].min_chunks);
    kernel_chunks = std::max(kernel_chunks, all[r].kernel_chunks);
    largest = std::max(largest, all[r].largest_edge_bytes);
  }
  note_step(step, all);
  const uint32_t useful = std::min(algo::moe_pipeline_chunks(largest), prices_[chosen_].most_chunks);
  host_chunks_ = std::max(chunks, useful);
  kernel_chunks_ = std::max(kernel_chunks, useful);
  tables_.build(layer_.has_tables() ? kernel_chunks_ : host_chunks_);
  return {};
}

// Operations in flight do not read the lists: those on the persistent kernel have their own, and this is the first one
// elsewhere since the lists were cut for the kernel.
void MoeRouting::cut_for_host() {
  if (tables_.n_chunks() == host_chunks_) return;
  wait_for_readers();
  tables_.build(host_chunks_);
}

uint64_t MoeRouting::memory_bytes() const {
  uint64_t bytes =
      tables_.bytes() + received_.capacity() * sizeof(uint32_t) + writer_.words().size() * sizeof(uint32_t);
  if (device_tables_ != nullptr) bytes += device_tables_->memory_bytes();
  if (cuda_tables_ != nullptr) bytes += cuda_tables_->memory_bytes();
  return bytes;
}

void MoeRouting::fill_levels(moecclRoutingInfo_t& info) const {
  const plan::LevelTree& tree = layer_.host().tree();
  const MoeCandidate& plan = *layer_.candidates()[chosen_];
  const uint32_t rank = layer_.host().rank();
  const auto level_of = [&](uint32_t peer) {
    return std::min<uint32_t>(tree.level_between(rank, peer), MOECCL_MAX_LEVELS - 1);
  };
  info.n_levels = static_cast<int32_t>(std::min<uint32_t>(tree.depth(), MOECCL_MAX_LEVELS));
  for (int32_t l = 0; l < info.n_levels; ++l)
    exec::copy_text(info.levels[l].name, tree.levels[static_cast<size_t>(l)].name);
  for (size_t j = 0; j < plan.rank.edges.out.size(); ++j) {
    moecclLevelTraffic_t& level = info.levels[level_of(plan.rank.edges.out[j].peer)];
    level.rows += tables_.rows_out()[j];
    level.bytes += tables_.rows_out()[j] * layer_.config().shape.row_bytes;
  }
  for (uint32_t p = 0; p < writer_.bytes().size(); ++p)
    if (p != rank) info.levels[level_of(p)].metadata_bytes += writer_.bytes()[p];
}

Status MoeRouting::info(moecclRoutingInfo_t* out) const {
  MOECCL_TRY(on_host("routing info"));
  MOECCL_TRY(check_out(out, "info"));
  const algo::MoeShape& shape = layer_.config().shape;
  moecclRoutingInfo_t info{};
  info.n_tokens = own_.n_tokens;
  info.rank_tokens = tokens_of_.data();
  info.n_rows = tables_.n_rows();
  info.n_unique = tables_.n_unique();
  info.n_local_experts = static_cast<int32_t>(tables_.local_experts.size());
  const bool mapped = layer_.map() != nullptr;
  info.local_experts = mapped ? local_experts_.data() : tables_.local_experts.data();
  info.expert_counts = tables_.expert_counts.data();
  info.expert_offsets = shape.expert_major ? tables_.expert_offsets.data() : nullptr;
  info.row_source = tables_.row_source.data();
  info.row_token = tables_.row_token.data();
  info.choice_offsets = shape.expert_major ? nullptr : tables_.choice_offsets.data();
  info.choice_expert = shape.expert_major ? nullptr : tables_.choice_expert.data();
  info.choice_weight = tables_.choice_weight.data();
  info.drop_counts = mapped ? drop_counts_.data() : own_.drop_counts.data();
  info.n_dropped = own_.n_dropped;
  info.logical_bytes = own_.n_tokens * shape.top_k * shape.row_bytes;
  fill_levels(info);
  exec::copy_text(info.algorithm, layer_.candidates()[chosen_]->name);
  info.emulated = layer_.host().paced();
  if (algo::links_known(layer_.host().tree())) {
    info.predicted_dispatch_us = prices_[chosen_].dispatch_us();
    info.predicted_combine_us = prices_[chosen_].combine_us();
  }
  info.measured_dispatch_us = measured_dispatch_.ns / 1e3;
  info.measured_combine_us = measured_combine_.ns / 1e3;
  give(info, out);
  return {};
}

}  // namespace moeccl::comm
