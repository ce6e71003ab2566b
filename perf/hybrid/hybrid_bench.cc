// SPDX-License-Identifier: Apache-2.0
#include "perf/hybrid/hybrid_bench.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "perf/common/fail.h"

namespace perf {
namespace {

// Returns small integers, so that sums are exact.
float token_value(int rank, size_t token, size_t i) {
  return static_cast<float>((static_cast<size_t>(rank) * 7 + token * 5 + i) % 251);
}
// Returns K different experts for each token, each equally likely (the even gate of Section III).
std::vector<int32_t> even_gate(int rank, size_t n_tokens, int32_t n_experts, int top_k) {
  uint64_t state = 88172645463325252u + static_cast<uint64_t>(rank) * 7919;
  const auto below = [&state](uint64_t n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % n;
  };
  std::vector<int32_t> all(static_cast<size_t>(n_experts)), index;
  for (size_t e = 0; e < all.size(); e++) all[e] = static_cast<int32_t>(e);
  if (top_k == 1) {  // in turn, so that no expert is left out
    for (size_t t = 0; t < n_tokens; t++) index.push_back(all[(t + static_cast<size_t>(rank)) % all.size()]);
    return index;
  }
  for (size_t t = 0; t < n_tokens; t++)
    for (size_t k = 0; k < static_cast<size_t>(top_k); k++) {
      std::swap(all[k], all[k + below(all.size() - k)]);
      index.push_back(all[k]);
    }
  return index;
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
  std::vector<float> rows, grad_held, grad_own;
};

HybridBench::HybridBench(const Team& team, const HybridShape& shape)
    : team_(team),
      shape_(shape),
      rank_(team.rank(0)),
      n_(team.n_ranks()),
      n_experts_(n_ * shape.experts_per_rank),
      n_tokens_(std::max<size_t>(1, shape.data_bytes / shape.row_bytes)) {
  if (shape_.top_k > n_experts_)
    fail("-k is " + std::to_string(shape_.top_k) + ": give at most the number of experts, " +
         std::to_string(n_experts_));
  check(moecclStreamCreate(&stream_), "moecclStreamCreate", rank_);
  const size_t width = shape_.row_bytes / sizeof(float);
  for (size_t t = 0; t < n_tokens_; t++)
    for (size_t i = 0; i < width; i++) in_.push_back(token_value(rank_, t, i));
  out_.resize(in_.size());
}

HybridBench::~HybridBench() { (void)moecclStreamDestroy(stream_); }

HybridBench::Layer HybridBench::create(const HybridChoice& choice) {
  Layer layer;
  const std::vector<int32_t>& domain = choice.domain;
  moecclComm_t comm = team_.comm(0);
  moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
  config.n_experts = n_experts_;
  config.n_levels = static_cast<int32_t>(domain.size());
  config.domain = domain.empty() ? nullptr : domain.data();
  config.data_bytes = static_cast<double>(n_tokens_ * shape_.row_bytes) * shape_.top_k;
  config.expert_bytes = static_cast<double>(shape_.expert_bytes) * shape_.experts_per_rank;
  config.pre_expert_s = shape_.pre_expert_s;
  config.top_k = shape_.top_k;
  config.forward_only = shape_.forward_only ? 1 : 0;
  check(moecclHybridCreate(&layer.hybrid, comm, &config), "moecclHybridCreate", rank_, comm);
  layer.placement.size = sizeof(layer.placement);
  check(moecclHybridGetInfo(layer.hybrid, &layer.placement), "moecclHybridGetInfo", rank_, comm);
  moecclMoeConfig_t moe = MOECCL_MOE_CONFIG_INIT;
  moe.hidden_bytes = shape_.row_bytes;
  moe.type = moecclFloat32;
  moe.top_k = shape_.top_k;
  moe.max_tokens = n_tokens_;
  moe.layout = moecclLayoutExpertMajor;
  moe.algorithm = choice.algorithm;
  check(moecclHybridMoeCreate(&layer.moe, layer.hybrid, comm, &moe), "moecclHybridMoeCreate", rank_, comm);
  const std::vector<int32_t> index = even_gate(rank_, n_tokens_, n_experts_, shape_.top_k);
  check(moecclRoutingCreate(&layer.routing, layer.moe, index.data(), nullptr, n_tokens_), "moecclRoutingCreate", rank_,
        comm);
  layer.info.size = sizeof(layer.info);
  check(moecclRoutingGetInfo(layer.routing, &layer.info), "moecclRoutingGetInfo", rank_, comm);
  layer.rows.resize(layer.info.n_rows * shape_.row_bytes / sizeof(float) + 1);
  layer.held.resize(static_cast<size_t>(layer.placement.n_held) * shape_.expert_bytes + 1);
  const size_t elements = shape_.expert_bytes / sizeof(float);
  for (int32_t h = 0; h < layer.placement.n_held && !shape_.forward_only; h++)
    layer.grad_held.insert(layer.grad_held.end(), elements, static_cast<float>(layer.placement.held_experts[h] % 13));
  layer.grad_held.push_back(0);
  layer.grad_own.resize(static_cast<size_t>(layer.placement.n_own) * elements + 1);
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

void HybridBench::give_back(Layer& layer, moecclStream_t stream) {
  check(moecclHybridReduce(layer.hybrid, layer.grad_held.data(), layer.grad_own.data(),
                           shape_.expert_bytes / sizeof(float), moecclFloat32, stream),
        "moecclHybridReduce", rank_, team_.comm(0));
}

void HybridBench::tokens(Layer& layer) {
  check(moecclDispatch(layer.routing, in_.data(), layer.rows.data(), nullptr), "moecclDispatch", rank_, team_.comm(0));
  check(moecclCombine(layer.routing, layer.rows.data(), out_.data(), nullptr), "moecclCombine", rank_, team_.comm(0));
}

void HybridBench::tokens_back(Layer& layer) {
  check(moecclCombineBackward(layer.routing, in_.data(), layer.rows.data(), nullptr, nullptr, nullptr),
        "moecclCombineBackward", rank_, team_.comm(0));
  check(moecclDispatchBackward(layer.routing, layer.rows.data(), out_.data(), nullptr), "moecclDispatchBackward", rank_,
        team_.comm(0));
}

// Checks every byte of every gathered expert, every dispatched row, the results of combine and of the backward pass,
// and the sums of gradients, to which each holder contributes the same small number.
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
  const auto all_came_back = [&] {
    for (size_t i = 0; i < in_.size(); i++) wrong += out_[i] != in_[i] * static_cast<float>(shape_.top_k);
  };
  all_came_back();
  if (shape_.forward_only) return wrong;
  std::fill(out_.begin(), out_.end(), -1.0f);
  tokens_back(layer);
  all_came_back();
  give_back(layer, nullptr);
  const size_t elements = shape_.expert_bytes / sizeof(float);
  const auto holders = static_cast<float>(layer.placement.n_held / std::max(1, layer.placement.n_own));
  for (int32_t e = 0; e < layer.placement.n_own; e++)
    for (size_t i = 0; i < elements; i++)
      wrong += layer.grad_own[static_cast<size_t>(e) * elements + i] !=
               holders * static_cast<float>(layer.placement.own_experts[e] % 13);
  return wrong;
}

void HybridBench::compute(double seconds) const {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

HybridBench::Parts HybridBench::step(Layer& layer) {
  Parts p;
  const auto start = Clock::now();
  const auto wait = [&] {
    check(moecclStreamSynchronize(stream_), "moecclStreamSynchronize", rank_, team_.comm(0));
    return since_us(start);
  };
  gather(layer, stream_);
  compute(shape_.pre_expert_s);
  p.gather_us = wait();
  tokens(layer);
  if (!shape_.forward_only) tokens_back(layer);
  const double given = since_us(start);
  p.tokens_us = given - p.gather_us;
  if (shape_.forward_only) return p;
  give_back(layer, stream_);
  compute(2 * shape_.pre_expert_s);
  p.return_us = wait() - given;
  return p;
}

std::vector<HybridTime> HybridBench::run(const std::vector<HybridChoice>& choices, int iters, int warmup) {
  std::vector<Layer> layers;
  std::vector<HybridTime> times(choices.size());
  for (size_t c = 0; c < choices.size(); c++) {
    layers.push_back(create(choices[c]));
    times[c].domain.assign(layers[c].placement.domain, layers[c].placement.domain + layers[c].placement.n_levels);
    times[c].model_us = layers[c].placement.after_us;
    times[c].wrong = verify(layers[c]);
  }
  struct Samples {
    std::vector<double> all, gather, tokens, back;
  };
  std::vector<Samples> samples(choices.size());
  for (int i = -warmup; i < iters; i++) {
    for (size_t c = 0; c < choices.size(); c++) {
      team_.barrier();
      const Parts p = step(layers[c]);
      if (i < 0) continue;
      samples[c].all.push_back(p.gather_us + p.tokens_us + p.return_us);
      samples[c].gather.push_back(p.gather_us);
      samples[c].tokens.push_back(p.tokens_us);
      samples[c].back.push_back(p.return_us);
    }
  }
  for (size_t c = 0; c < choices.size(); c++) {
    times[c].measured_us = team_.slowest(samples[c].all);
    times[c].gather_us = team_.slowest(samples[c].gather);
    times[c].tokens_us = team_.slowest(samples[c].tokens);
    times[c].return_us = team_.slowest(samples[c].back);
    times[c].wrong = team_.sum({times[c].wrong + verify(layers[c])});
    destroy(layers[c]);
  }
  return times;
}

uint64_t HybridBench::sent() const {
  std::vector<moecclTraffic_t> to(static_cast<size_t>(n_));
  check(moecclCommTraffic(team_.comm(0), to.data(), n_), "moecclCommTraffic", rank_, team_.comm(0));
  uint64_t messages = 0;
  for (const moecclTraffic_t& t : to) messages += t.messages;
  return messages;
}

HybridBench::Messages HybridBench::count(const std::vector<int32_t>& domain) {
  Layer layer = create({domain, "hier:1"});
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
