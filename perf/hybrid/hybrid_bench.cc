// SPDX-License-Identifier: Apache-2.0
#include "perf/hybrid/hybrid_bench.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "perf/common/fail.h"
#include "perf/common/stats.h"

namespace perf {
namespace {

double since_us(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

// Small integers, so that sums are exact.
float token_value(int rank, size_t token, size_t i) {
  return static_cast<float>((static_cast<size_t>(rank) * 7 + token * 5 + i) % 251);
}
unsigned char expert_byte(int expert, size_t i) {
  return static_cast<unsigned char>(static_cast<size_t>(expert) * 37 + i * 11 + (i >> 8));
}

}  // namespace

struct HybridBench::Layer {
  moecclHybrid_t hybrid = nullptr;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  moecclHybridInfo_t placement{};
  moecclRoutingInfo_t info{};
  std::vector<unsigned char> held;
  std::vector<float> rows;
};

HybridBench::HybridBench(const Team& team, const HybridShape& shape)
    : team_(team),
      shape_(shape),
      rank_(team.rank(0)),
      n_(team.n_ranks()),
      n_experts_(n_ * shape.experts_per_rank),
      n_tokens_(std::max<size_t>(1, shape.data_bytes / shape.row_bytes)) {
  check(moecclStreamCreate(&stream_), "moecclStreamCreate", rank_);
  const size_t width = shape_.row_bytes / sizeof(float);
  for (size_t t = 0; t < n_tokens_; t++)
    for (size_t i = 0; i < width; i++) in_.push_back(token_value(rank_, t, i));
  out_.resize(in_.size());
}

HybridBench::~HybridBench() { (void)moecclStreamDestroy(stream_); }

HybridBench::Layer HybridBench::create(const std::vector<int32_t>& domain, const char* algorithm) {
  Layer layer;
  moecclComm_t comm = team_.comm(0);
  moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
  config.n_experts = n_experts_;
  config.n_levels = static_cast<int32_t>(domain.size());
  config.domain = domain.empty() ? nullptr : domain.data();
  config.data_bytes = static_cast<double>(n_tokens_ * shape_.row_bytes);
  config.expert_bytes = static_cast<double>(shape_.expert_bytes) * shape_.experts_per_rank;
  config.pre_expert_s = shape_.pre_expert_s;
  check(moecclHybridCreate(&layer.hybrid, comm, &config), "moecclHybridCreate", rank_, comm);
  layer.placement.size = sizeof(layer.placement);
  check(moecclHybridGetInfo(layer.hybrid, &layer.placement), "moecclHybridGetInfo", rank_, comm);
  moecclMoeConfig_t moe = MOECCL_MOE_CONFIG_INIT;
  moe.hidden_bytes = shape_.row_bytes;
  moe.type = moecclFloat32;
  moe.top_k = 1;  // the model's tokens: each goes to one place
  moe.max_tokens = n_tokens_;
  moe.layout = moecclLayoutExpertMajor;
  moe.algorithm = algorithm;
  check(moecclHybridMoeCreate(&layer.moe, layer.hybrid, comm, &moe), "moecclHybridMoeCreate", rank_, comm);
  // The gate is even, as the model assumes (Section III).
  std::vector<int32_t> index(n_tokens_);
  for (size_t t = 0; t < n_tokens_; t++)
    index[t] = static_cast<int32_t>((t + static_cast<size_t>(rank_)) % static_cast<size_t>(n_experts_));
  check(moecclRoutingCreate(&layer.routing, layer.moe, index.data(), nullptr, n_tokens_), "moecclRoutingCreate", rank_,
        comm);
  layer.info.size = sizeof(layer.info);
  check(moecclRoutingGetInfo(layer.routing, &layer.info), "moecclRoutingGetInfo", rank_, comm);
  layer.rows.resize(layer.info.n_rows * shape_.row_bytes / sizeof(float) + 1);
  layer.held.resize(static_cast<size_t>(layer.placement.n_held) * shape_.expert_bytes + 1);
  own_.clear();
  for (int32_t e = 0; e < layer.placement.n_own; e++)
    for (size_t i = 0; i < shape_.expert_bytes; i++) own_.push_back(expert_byte(layer.placement.own_experts[e], i));
  own_.push_back(0);
  return layer;
}

void HybridBench::destroy(Layer& layer) {
  check(moecclRoutingDestroy(layer.routing), "moecclRoutingDestroy", rank_);
  check(moecclMoeDestroy(layer.moe), "moecclMoeDestroy", rank_);
  check(moecclHybridDestroy(layer.hybrid), "moecclHybridDestroy", rank_);
}

void HybridBench::gather(Layer& layer, moecclStream_t stream) {
  check(moecclHybridGather(layer.hybrid, own_.data(), layer.held.data(), shape_.expert_bytes, stream),
        "moecclHybridGather", rank_, team_.comm(0));
}

void HybridBench::tokens(Layer& layer) {
  check(moecclDispatch(layer.routing, in_.data(), layer.rows.data(), nullptr), "moecclDispatch", rank_, team_.comm(0));
  check(moecclCombine(layer.routing, layer.rows.data(), out_.data(), nullptr), "moecclCombine", rank_, team_.comm(0));
}

// Every byte of every gathered expert, every dispatched row, and what combine brings back.
uint64_t HybridBench::verify(Layer& layer) {
  uint64_t wrong = 0;
  gather(layer, nullptr);
  for (int32_t h = 0; h < layer.placement.n_held; h++)
    for (size_t i = 0; i < shape_.expert_bytes; i++)
      wrong += layer.held[static_cast<size_t>(h) * shape_.expert_bytes + i] !=
               expert_byte(layer.placement.held_experts[h], i);
  std::fill(out_.begin(), out_.end(), -1.0f);
  tokens(layer);
  const size_t width = shape_.row_bytes / sizeof(float);
  for (size_t r = 0; r < layer.info.n_rows; r++)
    for (size_t i = 0; i < width; i++)
      wrong += layer.rows[r * width + i] !=
               token_value(layer.info.row_source[r], static_cast<size_t>(layer.info.row_token[r]), i);
  for (size_t i = 0; i < in_.size(); i++) wrong += out_[i] != in_[i];
  return wrong;
}

HybridTime HybridBench::run(const std::vector<int32_t>& domain, const char* algorithm, int iters, int warmup) {
  Layer layer = create(domain, algorithm);
  HybridTime time;
  time.domain.assign(layer.placement.domain, layer.placement.domain + layer.placement.n_levels);
  time.model_us = layer.placement.after_us;
  time.wrong = verify(layer);
  std::vector<double> all, gathers, sent_tokens;
  for (int i = -warmup; i < iters; i++) {
    team_.barrier();
    const auto start = std::chrono::steady_clock::now();
    gather(layer, stream_);
    if (shape_.pre_expert_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(shape_.pre_expert_s));
    check(moecclStreamSynchronize(stream_), "moecclStreamSynchronize", rank_, team_.comm(0));
    const double before_tokens = since_us(start);
    tokens(layer);
    const double whole = since_us(start);
    if (i < 0) continue;
    all.push_back(whole);
    sent_tokens.push_back(whole - before_tokens);
    gathers.push_back(before_tokens);
  }
  time.measured_us = median(team_.combine(all, moecclMax));
  time.gather_us = median(team_.combine(gathers, moecclMax));
  time.tokens_us = median(team_.combine(sent_tokens, moecclMax));
  time.wrong = team_.sum({time.wrong + verify(layer)});
  destroy(layer);
  return time;
}

uint64_t HybridBench::sent() const {
  std::vector<moecclTraffic_t> to(static_cast<size_t>(n_));
  check(moecclCommTraffic(team_.comm(0), to.data(), n_), "moecclCommTraffic", rank_, team_.comm(0));
  uint64_t messages = 0;
  for (const moecclTraffic_t& t : to) messages += t.messages;
  return messages;
}

HybridBench::Messages HybridBench::count(const std::vector<int32_t>& domain) {
  Layer layer = create(domain, "hier:1");
  Messages m;
  uint64_t before = sent();
  check(moecclDispatch(layer.routing, in_.data(), layer.rows.data(), nullptr), "moecclDispatch", rank_, team_.comm(0));
  m.tokens = sent() - before;
  before = sent();
  gather(layer, nullptr);
  m.gather = sent() - before;
  m.tokens = team_.sum({m.tokens});
  m.gather = team_.sum({m.gather});
  destroy(layer);
  return m;
}

std::vector<std::vector<int32_t>> domains_of(const std::vector<int32_t>& sizes) {
  std::vector<std::vector<int32_t>> all{{}};
  for (const int32_t size : sizes) {
    std::vector<std::vector<int32_t>> longer;
    for (const std::vector<int32_t>& prefix : all)
      for (int32_t s = 1; s <= size; s++)
        if (size % s == 0) {
          longer.push_back(prefix);
          longer.back().push_back(s);
        }
    all = std::move(longer);
  }
  return all;
}

}  // namespace perf
