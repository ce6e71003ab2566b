// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/moe_bench.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/text.h"

namespace perf {

std::vector<double> MoeResult::total_us() const {
  std::vector<double> total(dispatch_us.size());
  for (size_t i = 0; i < total.size(); i++) total[i] = dispatch_us[i] + combine_us[i];
  return total;
}

moecclMoe_t create_layer(const MoeOptions& options, const std::vector<int32_t>& expert_rank, size_t max_tokens,
                         const std::string& algorithm, const Team& team) {
  const moecclMoeConfig_t config = layer_config(options, expert_rank, max_tokens, algorithm);
  moecclMoe_t moe = nullptr;
  check(moecclMoeCreate(&moe, team.comm(0), &config), ("moecclMoeCreate with algorithm " + algorithm).c_str(),
        team.rank(0), team.comm(0));
  return moe;
}

MoeBench::MoeBench(const MoeOptions& options, const std::vector<RankRouting>& routing,
                   const std::vector<int32_t>& expert_rank, const Team& team, Progress* progress)
    : options_(options),
      routing_(routing),
      expert_rank_(expert_rank),
      team_(team),
      progress_(progress),
      oracle_(options, routing, expert_rank, team.rank(0)) {
  allocate();
}

void MoeBench::demand(moecclResult_t result, const char* call) const {
  check(result, call, team_.rank(0), team_.comm(0));
}

void MoeBench::allocate() {
  const Memory memory = options_.job.memory;
  if (memory == Memory::kCuda) gpu::use(team_.rank(0));
  const size_t row = oracle_.row_bytes();
  const size_t token_bytes = std::max<size_t>(1, mine().n_tokens) * row;
  const size_t rows_bytes = std::max<size_t>(1, oracle_.n_rows()) * row;
  tokens_ = Buffer(token_bytes, memory);
  combined_ = Buffer(token_bytes, memory);
  rows_ = Buffer(rows_bytes, memory);
  if (!options_.backward) return;
  gradient_rows_ = Buffer(rows_bytes, memory);
  gradient_weights_.resize(mine().index.size());
}

MoeBench::Candidate MoeBench::create(const std::string& algorithm) {
  Candidate c;
  c.result.algorithm = algorithm;
  c.moe = create_layer(options_, expert_rank_, most_tokens(routing_), algorithm, team_);
  demand(moecclRoutingCreate(&c.routing, c.moe, mine().index.data(), mine().weight.data(), mine().n_tokens),
         ("moecclRoutingCreate with algorithm " + algorithm).c_str());
  return c;
}

moecclRoutingInfo_t MoeBench::info(const Candidate& c) const {
  moecclRoutingInfo_t info = {};
  info.size = sizeof info;
  demand(moecclRoutingGetInfo(c.routing, &info), "moecclRoutingGetInfo");
  return info;
}

namespace {

char* host(Buffer& b) { return b.host(b.data()); }
void sent(Buffer& b) { b.push(b.data(), b.bytes()); }
const char* got(Buffer& b) {
  b.pull(b.data(), b.bytes());
  return host(b);
}
void blot(Buffer& b) {
  std::memset(host(b), 0xee, b.bytes());
  sent(b);
}

}  // namespace

void MoeBench::prepare(Candidate& c, Place place, const char* call, const Operation& operation) {
  if (!options_.cuda_graph || c.graphs[place] != nullptr) return;
  if (stream_ == nullptr) stream_ = gpu::make_stream();
  gpu::begin_capture(stream_);
  demand(operation(reinterpret_cast<moecclStream_t>(stream_)), call);
  c.graphs[place] = gpu::end_capture(stream_);
}

void MoeBench::run_once(Candidate& c, Place place, const char* call, const Operation& operation) {
  if (!options_.cuda_graph) return demand(operation(nullptr), call);
  gpu::launch_graph(c.graphs[place], stream_);
  gpu::synchronize(stream_);
}

void MoeBench::run(Candidate& c, Place place, const char* call, const Operation& operation) {
  prepare(c, place, call, operation);
  // Ranks that share a device must not fill buffers or make graphs while the replay of another one waits for them.
  if (options_.cuda_graph) team_.barrier();
  run_once(c, place, call, operation);
}

uint64_t MoeBench::verify(Candidate& c) {
  uint64_t wrong = oracle_.check_info(info(c));
  // A wrong n_rows would overrun the buffers.
  if (info(c).n_rows != oracle_.n_rows())
    fail("rank " + std::to_string(team_.rank(0)) + ": " + std::to_string(info(c).n_rows) +
         " rows where the routing gives " + std::to_string(oracle_.n_rows()));
  oracle_.fill_tokens(host(tokens_));
  sent(tokens_);
  blot(rows_);
  run(c, kDispatch, "moecclDispatch",
      [&](moecclStream_t s) { return moecclDispatch(c.routing, tokens_.data(), rows_.data(), s); });
  wrong += oracle_.check_rows(got(rows_));
  oracle_.fill_outputs(host(rows_));
  sent(rows_);
  blot(combined_);
  run(c, kCombine, "moecclCombine",
      [&](moecclStream_t s) { return moecclCombine(c.routing, rows_.data(), combined_.data(), s); });
  wrong += oracle_.check_tokens(got(combined_), true);
  return options_.backward ? wrong + verify_backward(c) : wrong;
}

// rows_ holds the experts' outputs.
uint64_t MoeBench::verify_backward(Candidate& c) {
  const bool weights = with_weights();
  blot(combined_);
  run(c, kDispatchBackward, "moecclDispatchBackward",
      [&](moecclStream_t s) { return moecclDispatchBackward(c.routing, rows_.data(), combined_.data(), s); });
  uint64_t wrong = oracle_.check_tokens(got(combined_), false);
  oracle_.fill_gradients(host(tokens_));
  sent(tokens_);
  blot(gradient_rows_);
  run(c, kCombineBackward, "moecclCombineBackward", [&](moecclStream_t s) {
    return moecclCombineBackward(c.routing, tokens_.data(), gradient_rows_.data(), weights ? rows_.data() : nullptr,
                                 weights ? gradient_weights_.data() : nullptr, s);
  });
  wrong += oracle_.check_gradient_rows(got(gradient_rows_));
  return weights ? wrong + oracle_.check_gradient_weights(gradient_weights_.data()) : wrong;
}

double MoeBench::timed(Candidate& c, Place place, const char* call, const Operation& operation) {
  prepare(c, place, call, operation);
  return team_.timed_us([&] { run_once(c, place, call, operation); });
}

void MoeBench::update(Candidate& c) {
  demand(moecclRoutingUpdate(c.routing, mine().index.data(), mine().weight.data(), mine().n_tokens),
         "moecclRoutingUpdate");
}

void MoeBench::time_once(Candidate& c, bool keep) {
  const bool weights = with_weights();
  const double dispatch = timed(c, kDispatch, "moecclDispatch", [&](moecclStream_t s) {
    return moecclDispatch(c.routing, tokens_.data(), rows_.data(), s);
  });
  const double combine = timed(c, kCombine, "moecclCombine", [&](moecclStream_t s) {
    return moecclCombine(c.routing, rows_.data(), combined_.data(), s);
  });
  if (keep) c.result.ran.push_back(info(c).algorithm);
  if (keep) c.result.dispatch_us.push_back(dispatch);
  if (keep) c.result.combine_us.push_back(combine);
  if (!options_.backward) return;
  const double combine_backward = timed(c, kCombineBackward, "moecclCombineBackward", [&](moecclStream_t s) {
    return moecclCombineBackward(c.routing, tokens_.data(), gradient_rows_.data(), weights ? rows_.data() : nullptr,
                                 weights ? gradient_weights_.data() : nullptr, s);
  });
  const double dispatch_backward = timed(c, kTimedDispatchBackward, "moecclDispatchBackward", [&](moecclStream_t s) {
    return moecclDispatchBackward(c.routing, gradient_rows_.data(), combined_.data(), s);
  });
  if (keep) c.result.combine_backward_us.push_back(combine_backward);
  if (keep) c.result.dispatch_backward_us.push_back(dispatch_backward);
}

// Combines the figures of all ranks and frees the algorithm.
void MoeBench::conclude(Candidate& c) {
  MoeResult& r = c.result;
  for (std::vector<double>* times : {&r.dispatch_us, &r.combine_us, &r.dispatch_backward_us, &r.combine_backward_us})
    *times = slowest(*times);
  const moecclRoutingInfo_t mine = info(c);
  r.plan = mine.algorithm;
  r.emulated = mine.emulated != 0;
  r.predicted_us = team_.combine({mine.predicted_dispatch_us + mine.predicted_combine_us}, moecclMax)[0];
  std::vector<double> sums = {static_cast<double>(mine.logical_bytes)};
  for (const moecclLevelTraffic_t& level : mine.levels) {
    sums.push_back(static_cast<double>(level.rows));
    sums.push_back(static_cast<double>(level.bytes));
    sums.push_back(static_cast<double>(level.metadata_bytes));
  }
  sums = team_.combine(sums, moecclSum);
  r.logical_bytes = sums[0];
  for (size_t l = 0; l < static_cast<size_t>(mine.n_levels); l++)
    r.levels.push_back({mine.levels[l].name, sums[3 * l + 1], sums[3 * l + 2], sums[3 * l + 3]});
  if (options_.explain && team_.rank(0) == 0) {
    r.explanation = explained([&](char* text, size_t bytes, size_t* needed) {
      demand(moecclMoeExplain(c.routing, text, bytes, needed), "moecclMoeExplain");
    });
  }
  for (void*& graph : c.graphs)
    if (graph != nullptr) gpu::end_graph(std::exchange(graph, nullptr));
  demand(moecclRoutingDestroy(c.routing), "moecclRoutingDestroy");
  demand(moecclMoeDestroy(c.moe), "moecclMoeDestroy");
}

std::vector<double> MoeBench::slowest(const std::vector<double>& mine) const {
  return mine.empty() ? mine : team_.combine(mine, moecclMax);
}

size_t MoeBench::add(const std::string& algorithm) {
  if (progress_ != nullptr) progress_->show("checking " + algorithm, 0, 1);
  Candidate c = create(algorithm);
  c.result.n_wrong = team_.sum({verify(c)});
  candidates_.push_back(std::move(c));
  fill_for_timing();
  return candidates_.size() - 1;
}

// The checks may leave values that are slow to add (NaN, subnormal).
void MoeBench::fill_for_timing() {
  oracle_.fill_gradients(host(tokens_));
  sent(tokens_);
}

void MoeBench::run_rounds(int rounds, bool keep) {
  const size_t n = candidates_.size();
  for (int i = 0; i < rounds; i++, n_rounds_++)
    for (size_t turn = 0; turn < n; turn++) {
      const size_t at = (turn + n_rounds_ / 2) % n;
      Candidate& c = candidates_[n_rounds_ % 2 == 0 ? at : n - 1 - at];
      if (options_.update) update(c);
      time_once(c, keep);
      if (progress_ != nullptr) progress_->show("timing " + c.result.algorithm, i, rounds);
    }
}

int MoeBench::settle(size_t candidate) {
  Candidate& c = candidates_[candidate];
  std::string plan;
  int steps = 0;
  for (int stayed = 0; steps < kMostSteps && stayed < kSteadySteps; steps++) {
    update(c);
    time_once(c, false);
    if (progress_ != nullptr) progress_->show("settling " + c.result.algorithm, steps, kMostSteps);
    const std::string now = info(c).algorithm;
    stayed = now == plan ? stayed + 1 : 0;
    plan = now;
  }
  return steps;
}

std::vector<std::vector<double>> MoeBench::total_us() const {
  std::vector<std::vector<double>> all;
  for (const Candidate& c : candidates_) {
    all.push_back(slowest(c.result.dispatch_us));
    const std::vector<double> combine = slowest(c.result.combine_us);
    for (size_t i = 0; i < combine.size(); i++) all.back()[i] += combine[i];
  }
  return all;
}

std::vector<MoeResult> MoeBench::finish() {
  std::vector<MoeResult> results;
  for (Candidate& c : candidates_) {
    conclude(c);
    results.push_back(std::move(c.result));
  }
  candidates_.clear();
  if (progress_ != nullptr) progress_->clear();
  return results;
}

std::vector<MoeResult> MoeBench::run_in_turns(const std::vector<std::string>& algorithms) {
  for (const std::string& algorithm : algorithms) {
    const size_t at = add(algorithm);
    if (algorithm != "auto" || options_.cuda_graph) continue;
    MoeResult& r = candidates_[at].result;
    r.steps_to_settle = settle(at);
    r.n_wrong += team_.sum({verify(candidates_[at])});  // of the plan that it settled on
    fill_for_timing();
  }
  run_rounds(options_.warmup, false);
  run_rounds(options_.iters, true);
  return finish();
}

// 2dh needs two levels. Hosts are a level too, so only the communicator knows how many there are.
std::vector<std::string> MoeBench::algorithms() const {
  if (!options_.algorithms.empty()) return options_.algorithms;
  const std::string two_levels = "2dh";
  const moecclMoeConfig_t config = layer_config(options_, expert_rank_, 1, two_levels);
  moecclMoe_t moe = nullptr;
  if (moecclMoeCreate(&moe, team_.comm(0), &config) != moecclSuccess) return {"flat", "auto"};
  demand(moecclMoeDestroy(moe), "moecclMoeDestroy");
  return {"flat", two_levels, "auto"};
}

std::vector<MoeResult> MoeBench::run() {
  if (!options_.sequential) return run_in_turns(algorithms());
  std::vector<MoeResult> results;
  for (const std::string& algorithm : algorithms())
    for (MoeResult& r : run_in_turns({algorithm})) results.push_back(std::move(r));
  return results;
}

}  // namespace perf
