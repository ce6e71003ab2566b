// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/cuda_routing.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "src/exec/cuda/urgent_stream.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;
using namespace moeccl::cuda;

namespace {

// Hands out places in one allocation, each aligned for any type.
class Layout {
 public:
  size_t take(size_t bytes) {
    const size_t at = end_;
    end_ += (bytes + 255) / 256 * 256;
    return at;
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 0;
};

uint32_t tiles(uint64_t n_tokens, uint32_t tile) { return static_cast<uint32_t>((n_tokens + tile - 1) / tile); }

}  // namespace

Result<std::unique_ptr<CudaRouting>> CudaRouting::create(StreamEngine& engine, const Model& setting) {
  std::unique_ptr<CudaRouting> r(new CudaRouting(setting));
  const cuda::Current current(engine.context());
  r->context_ = engine.context();
  r->lay_out();
  if (r->end_ - r->words_ > UINT32_MAX * sizeof(uint32_t))
    return error(
        moecclUnsupported,
        "routing on the device of {} tokens a rank with top_k {}: records of up to {} bytes, at most 16 GiB are "
        "possible; give topk_index in host memory or fewer tokens a step",
        setting.shape->max_tokens, setting.shape->top_k, r->end_ - r->words_);
  MOECCL_ASSIGN_OR_RETURN(r->calls_, create_urgent_stream(engine.context()));
  MOECCL_ASSIGN_OR_RETURN(r->device_, cuda::Memory::device(engine.context(), r->end_));
  MOECCL_ASSIGN_OR_RETURN(r->pinned_, cuda::Memory::pinned(engine.context(), r->pinned_bytes()));
  MOECCL_TRY(r->upload_tables());
  return r;
}

size_t CudaRouting::bytes_of(const Model& setting) {
  CudaRouting r(setting);
  r.lay_out();
  return r.end_ + r.pinned_bytes();
}

// The constant tables come first, so that one copy moves them all.
void CudaRouting::lay_out() {
  Layout layout;
  const uint32_t n_experts = s_.placement->n_experts(), n_ranks = s_.placement->n_ranks, n_peers = n_ranks + 1;
  const size_t tokens = s_.shape->max_tokens, choices = tokens * s_.shape->top_k;
  const auto put = [&](size_t n, auto&& fill) {
    const size_t offset = layout.take(n * sizeof(uint32_t));
    tables_.resize(layout.end() / sizeof(uint32_t));
    for (size_t i = 0; i < n; ++i) tables_[offset / sizeof(uint32_t) + i] = fill(i);
    return offset;
  };
  const algo::CanonicalOrder& order = *s_.order;
  position_ = put(n_experts, [&](size_t e) { return order.position[e]; });
  expert_ = put(n_experts, [&](size_t p) { return uint32_t{order.expert[p]}; });
  owner_ = put(n_experts, [&](size_t p) { return s_.placement->owner[order.expert[p]]; });
  const auto put_ways = [&](const algo::RowWays& ways) {
    Count count;
    count.way_first = put(ways.first.size(), [&](size_t i) { return ways.first[i]; });
    count.way_to = put(ways.hop.size(), [&](size_t i) { return ways.hop[i]; });
    count.way_slot = put(ways.group.size(), [&](size_t i) { return ways.group[i]; });
    count.n_slots = ways.n_groups;
    count.dedup = ways.dedup;
    return count;
  };
  size_t most_hops = 0;
  for (const algo::Paths* paths : s_.candidates) {
    const algo::RowWays ways(*paths, *s_.tree, *s_.placement, s_.rank);
    for (uint32_t x = 0; x < ways.n_ranks(); ++x) most_hops = std::max(most_hops, ways.to(x).size());
    Candidate& c = candidates_.emplace_back();
    c.sent = put_ways(ways);
    if (algo::returns_fewer(paths->algorithm(), *s_.shape)) c.returned = put_ways(ways.shared_by_rank());
  }
  delivered_ = put_ways(algo::RowWays::into_experts(*s_.placement, s_.shape->expert_major));
  key_ = layout.take(choices * sizeof(uint32_t));
  weight_ = layout.take(choices * sizeof(float));
  if (s_.shape->capacity > 0) {
    drop_tile_ = layout.take(size_t{tiles(tokens, kRouteTile)} * n_experts * sizeof(uint32_t));
    drop_first_ = layout.take((size_t{n_experts} + 1) * sizeof(uint32_t));
    drop_list_ = layout.take(choices * sizeof(uint32_t));
  }
  for (Candidate& c : candidates_)
    c.tile = layout.take(size_t{tiles(tokens, kRecordTile)} * n_peers * sizeof(RouteTotals));
  summary_ = bad_ = layout.take(sizeof(uint32_t));
  drop_counts_ = layout.take(n_experts * sizeof(int32_t));
  delivered_.rows = layout.take(delivered_.n_slots * sizeof(uint32_t));
  for (Candidate& c : candidates_) {
    for (Count* count : {&c.sent, &c.returned}) count->rows = layout.take(count->n_slots * sizeof(uint32_t));
    c.total = layout.take(n_peers * sizeof(RouteTotals));
  }
  results_ = own_n_experts_ = layout.take(tokens);
  own_expert_ = layout.take(choices * sizeof(uint16_t));
  own_choice_ = layout.take(choices * sizeof(uint32_t));
  own_weight_ = layout.take(choices * sizeof(float));
  // Each choice adds to the message of each rank on its way at most a token, a number of experts and an expert, and a
  // weight to the last one. Each message also has a header and the unfilled ends of two lists.
  const size_t passes = choices * most_hops;
  words_ = layout.take((size_t{6} * n_ranks + 2 * passes + choices) * sizeof(uint32_t));
  end_ = layout.end();
}

Status CudaRouting::upload_tables() {
  std::memcpy(pinned_.data(), tables_.data(), tables_.size() * sizeof(uint32_t));
  calls_.copy(device_.data(), pinned_.data(), tables_.size() * sizeof(uint32_t), "routing tables to the device");
  tables_ = {};
  return finish();
}

Status launch_route_order(const StreamEngine& engine, cuda::Stream stream, const RouteOrderKernelArgs& order,
                          const RouteKernelArgs& lists, const RouteDropKernelArgs& drop) {
  MOECCL_TRY(engine.launch_on(stream, "moeccl_route_order", &order, size_t{order.n_tokens} * order.top_k));
  if (drop.capacity == 0) return {};
  const size_t tiles = size_t{lists.n_tiles} * kRouteTile;
  MOECCL_TRY(engine.launch_on(stream, "moeccl_route_count", &lists, tiles));
  MOECCL_TRY(engine.launch_on(stream, "moeccl_route_scan", &lists, 1));
  MOECCL_TRY(engine.launch_on(stream, "moeccl_route_fill", &lists, tiles));
  return engine.launch_on(stream, "moeccl_route_drop", &drop, size_t{drop.n_experts} * 256);
}

void CudaRouting::launch(StreamEngine& engine, const char* kernel, const void* args, size_t n_threads) {
  if (calls_.status().ok()) calls_.note(engine.launch_on(calls_.stream(), kernel, args, n_threads));
}

void CudaRouting::launch_order(StreamEngine& engine) {
  const auto n_tokens = static_cast<uint32_t>(topk_.n_tokens);
  const uint32_t top_k = s_.shape->top_k, n_experts = s_.placement->n_experts();
  const RouteOrderKernelArgs order{topk_.index, at<uint32_t>(position_), n_tokens,          top_k,
                                   n_experts,   at<uint32_t>(key_),      at<uint32_t>(bad_)};
  RouteKernelArgs lists{};
  lists.topk = topk_.index;
  lists.n_tokens = n_tokens;
  lists.top_k = top_k;
  lists.n_experts = n_experts;
  lists.n_tiles = tiles(n_tokens, kRouteTile);
  lists.tile_count = at<uint32_t>(drop_tile_);
  lists.first = at<uint32_t>(drop_first_);
  lists.list = at<uint32_t>(drop_list_);
  const RouteDropKernelArgs drop{lists.first, lists.list,         order.position, n_experts,
                                 top_k,       s_.shape->capacity, order.key,      at<int32_t>(drop_counts_)};
  if (calls_.status().ok()) calls_.note(launch_route_order(engine, calls_.stream(), order, lists, drop));
}

namespace {

constexpr uint32_t kWarpThreads = 32;

}  // namespace

RouteWays CudaRouting::ways_of(const Count& count) const {
  return {at<uint32_t>(owner_), at<uint32_t>(count.way_first), at<uint32_t>(count.way_to),
          at<uint32_t>(count.way_slot)};
}

void CudaRouting::launch_count(StreamEngine& engine, const Count& count) {
  if (count.n_slots == 0) return;
  RouteLevelsKernelArgs levels{};
  levels.key = at<uint32_t>(key_);
  levels.ways = ways_of(count);
  levels.n_tokens = static_cast<uint32_t>(topk_.n_tokens);
  levels.top_k = s_.shape->top_k;
  levels.n_slots = count.n_slots;
  levels.dedup = count.dedup ? 1 : 0;
  levels.rows = at<uint32_t>(count.rows);
  launch(engine, "moeccl_route_levels", &levels, levels.n_tokens);
}

void CudaRouting::launch_counts(StreamEngine& engine) {
  launch_count(engine, delivered_);
  for (const Candidate& c : candidates_) {
    launch_count(engine, c.sent);
    launch_count(engine, c.returned);
    RouteRecordsKernelArgs records = records_args(c);
    launch(engine, "moeccl_route_records_count", &records,
           size_t{records.n_tiles} * (records.n_ranks + 1) * kWarpThreads);
    launch(engine, "moeccl_route_records_scan", &records, 1);
  }
}

RouteRecordsKernelArgs CudaRouting::records_args(const Candidate& c) const {
  RouteRecordsKernelArgs a{};
  a.key = at<uint32_t>(key_);
  a.ways = ways_of(c.sent);
  a.expert = at<uint32_t>(expert_);
  a.weight = topk_.weight;
  a.n_tokens = static_cast<uint32_t>(topk_.n_tokens);
  a.top_k = s_.shape->top_k;
  a.n_ranks = s_.placement->n_ranks;
  a.n_tiles = tiles(topk_.n_tokens, kRecordTile);
  a.tile = at<RouteTotals>(c.tile);
  a.total = at<RouteTotals>(c.total);
  a.words = at<uint32_t>(words_);
  a.own_n_experts = at<uint8_t>(own_n_experts_);
  a.own_expert = at<uint16_t>(own_expert_);
  a.own_choice = at<uint32_t>(own_choice_);
  a.own_weight = at<float>(own_weight_);
  return a;
}

Status CudaRouting::assign(StreamEngine& engine, const algo::TopK& topk) {
  const cuda::Current current(context_);
  topk_ = topk;
  // Routing calls take no stream, so they come after everything on the default stream.
  MOECCL_TRY(cuda::synchronize(nullptr, "the default stream"));
  if (topk.weight != nullptr && !cuda::pointed(topk.weight).on_device()) {
    // Goes through page-locked memory that nothing uses yet.
    const size_t bytes = topk.n_tokens * s_.shape->top_k * sizeof(float);
    std::byte* staged = pinned_.data() + (own_weight_ - summary_);
    std::memcpy(staged, topk.weight, bytes);
    calls_.copy(device_.data() + weight_, staged, bytes, "weights to the device");
    topk_.weight = at<float>(weight_);
  }
  std::byte* const summary = device_.data() + summary_;
  calls_.fill(summary, 0, results_ - summary_, "routing on the device");
  calls_.fill(device_.data() + bad_, 0xff, sizeof(uint32_t), "routing on the device");
  launch_order(engine);
  launch_counts(engine);
  calls_.copy(pinned_.data(), summary, results_ - summary_, "counts of a routing");
  MOECCL_TRY(finish());
  const uint32_t bad = *seen<uint32_t>(bad_);
  return bad == ~0u ? Status() : check_choices(bad);
}

// Returns the error for a token that the device found wrong, as the host's check reports it.
Status CudaRouting::check_choices(uint32_t token) const {
  const uint32_t top_k = s_.shape->top_k;
  const auto* from = topk_.index + size_t{token} * top_k;
  // Page-locked: see StreamEngine::fetch().
  MOECCL_ASSIGN_OR_RETURN(const cuda::Memory copied, cuda::Memory::pinned(context_, top_k * sizeof(int32_t)));
  auto* const choices = reinterpret_cast<int32_t*>(copied.data());
  MOECCL_TRY(cuda::copy(choices, from, top_k * sizeof(int32_t), calls_.stream(), "choices of a token"));
  MOECCL_TRY(cuda::synchronize(calls_.stream(), "choices of a token"));
  MOECCL_TRY(algo::check_choices(*s_.order, {choices, top_k}, token));
  return error(moecclInternalError,
               "topk_index[{}] was found wrong on the device, and right on the host: did it change?", token);
}

void CudaRouting::counts(size_t candidate, bool back, std::vector<algo::LevelCount>& levels) const {
  const Count& count = back ? candidates_[candidate].returned : candidates_[candidate].sent;
  algo::sum_levels(*s_.tree, {seen<uint32_t>(count.rows), count.n_slots}, levels);
}

uint64_t CudaRouting::delivered() const { return *seen<uint32_t>(delivered_.rows); }

Status CudaRouting::write(StreamEngine& engine, size_t candidate, algo::OwnChoices& own, algo::RecordWriter& writer) {
  const cuda::Current current(context_);
  const Candidate& c = candidates_[candidate];
  const RouteRecordsKernelArgs a = records_args(c);
  launch(engine, "moeccl_route_records_fill", &a, size_t{a.n_tiles} * (a.n_ranks + 1) * kWarpThreads);
  const RouteTotals* total = seen<RouteTotals>(c.total);
  const size_t n_tokens = topk_.n_tokens, n_choices = total[a.n_ranks].choices, n_words = total[a.n_ranks].first_word;
  const auto fetch = [&](size_t offset, size_t bytes) {
    if (bytes == 0) return;
    calls_.copy(pinned_.data() + (offset - summary_), device_.data() + offset, bytes, "records of a routing");
  };
  fetch(own_n_experts_, n_tokens);
  fetch(own_expert_, n_choices * sizeof(uint16_t));
  fetch(own_choice_, n_choices * sizeof(uint32_t));
  if (topk_.weight != nullptr) fetch(own_weight_, n_choices * sizeof(float));
  fetch(words_, n_words * sizeof(uint32_t));
  std::vector<size_t> bytes(a.n_ranks);
  for (uint32_t r = 0; r < a.n_ranks; ++r)
    bytes[r] = algo::message_words(total[r].records, total[r].choices, total[r].weights) * sizeof(uint32_t);
  MOECCL_TRY(finish());
  own.n_tokens = n_tokens;
  own.weighted = topk_.weight != nullptr;
  own.token.resize(n_tokens);
  std::iota(own.token.begin(), own.token.end(), 0);
  const auto take = [&](auto& to, size_t offset, size_t n) {
    const auto* from = seen<std::decay_t<decltype(to[0])>>(offset);
    to.assign(from, from + n);
  };
  take(own.n_experts, own_n_experts_, n_tokens);
  take(own.expert, own_expert_, n_choices);
  take(own.choice, own_choice_, n_choices);
  take(own.weight, own_weight_, own.weighted ? n_choices : 0);
  take(own.drop_counts, drop_counts_, s_.placement->n_experts());
  own.n_dropped = 0;
  for (const int32_t n : own.drop_counts) own.n_dropped += static_cast<uint64_t>(n);
  writer.adopt(*s_.placement, own, {seen<uint32_t>(words_), n_words}, bytes);
  return {};
}

}  // namespace moeccl::exec
