// SPDX-License-Identifier: Apache-2.0
#include "moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace training {

Gate::Gate(const MoeSetup& s)
    : expert(s.shape.tokens() * static_cast<size_t>(s.shape.top_k)),
      weight(expert.size()),
      shape_(s.shape),
      matrix_(s.part.take(s.shape.hidden, static_cast<size_t>(s.shape.experts), 0, 0)),
      popularity_(s.corpus.popularity()) {
  const Floats init = s.corpus.gate(s.layer);
  std::copy(init.begin(), init.end(), matrix_.value);
}

void Gate::forward(const Floats& z) {
  const size_t n = shape_.tokens(), e = static_cast<size_t>(shape_.experts), k = static_cast<size_t>(shape_.top_k);
  Floats logits(n * e);
  multiply(n, z.data(), matrix_, logits.data());
  std::vector<int32_t> order(e);
  Floats score(e);
  for (size_t t = 0; t < n; t++) {
    const float* logit = &logits[t * e];
    for (size_t i = 0; i < e; i++) score[i] = logit[i] + popularity_[i];
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + shape_.top_k, order.end(),
                      [&](int32_t a, int32_t b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
    float sum = 0;
    for (size_t i = 0; i < k; i++) {
      expert[t * k + i] = order[i];
      sum += weight[t * k + i] = std::exp(logit[order[i]] - logit[order[0]]);
    }
    for (size_t i = 0; i < k; i++) weight[t * k + i] /= sum;
  }
}

void Gate::backward(const Floats& z, const Floats& dweight, Floats& dz) const {
  const size_t n = shape_.tokens(), e = static_cast<size_t>(shape_.experts), k = static_cast<size_t>(shape_.top_k);
  Floats dlogits(n * e, 0.0f);
  for (size_t t = 0; t < n; t++) {
    float along = 0;
    for (size_t i = t * k; i < (t + 1) * k; i++) along += weight[i] * dweight[i];
    for (size_t i = t * k; i < (t + 1) * k; i++)
      dlogits[t * e + static_cast<size_t>(expert[i])] = weight[i] * (dweight[i] - along);
  }
  multiply_backward(n, z.data(), dlogits.data(), matrix_, dz.data());
}

Experts::Experts(const Shape& shape, size_t n_slots)
    : value(n_slots * shape.expert_size()), grad(value.size()), shape_(shape) {}

Mlp Experts::slot(size_t s) {
  const size_t up = s * shape_.expert_size(), down = up + shape_.hidden * shape_.expert_inner;
  return {{&value[up], &grad[up], shape_.hidden, shape_.expert_inner},
          {&value[down], &grad[down], shape_.expert_inner, shape_.hidden}};
}

Floats initial_expert(const Shape& shape, size_t layer, int e) {
  const auto hidden = static_cast<float>(shape.hidden), inner = static_cast<float>(shape.expert_inner);
  const uint64_t seed = 1000 * (layer + 1) + static_cast<uint64_t>(e);
  Floats w = random_matrix(shape.hidden * shape.expert_inner, 1 / std::sqrt(hidden), 2 * seed);
  const Floats down = random_matrix(shape.hidden * shape.expert_inner, 0.3f / std::sqrt(inner), 2 * seed + 1);
  w.insert(w.end(), down.begin(), down.end());
  return w;
}

size_t MoeBlock::n_weights(const Shape& shape) {
  return 2 * shape.hidden + shape.hidden * static_cast<size_t>(shape.experts) +
         mlp_size(shape.hidden, shape.shared_inner);
}

MoeBlock::MoeBlock(const MoeSetup& s, size_t n_slots, Bare)
    : shape_(s.shape),
      ranks_(s.ranks),
      norm_(s.part.take_norm(s.shape.hidden)),
      gate_(s),
      shared_{s.part.take(s.shape.hidden, s.shape.shared_inner, 1 / std::sqrt(static_cast<float>(s.shape.hidden)),
                          700 + 2 * s.layer),
              s.part.take(s.shape.shared_inner, s.shape.hidden,
                          0.3f / std::sqrt(static_cast<float>(s.shape.shared_inner)), 701 + 2 * s.layer)},
      experts_(s.shape, n_slots),
      learner_(experts_.value.size()),
      normed_(s.shape.tokens() * s.shape.hidden),
      shared_inner_(s.shape.tokens() * s.shape.shared_inner) {}

MoeBlock::MoeBlock(const MoeSetup& s) : MoeBlock(s, static_cast<size_t>(s.shape.experts / s.ranks.n), Bare{}) {
  const auto n_own = static_cast<int>(experts_.n_slots());
  for (int i = 0; i < n_own; i++) {
    const Floats w = initial_expert(shape_, s.layer, ranks_.rank * n_own + i);
    std::copy(w.begin(), w.end(), experts_.slot(static_cast<size_t>(i)).up.value);
  }
  const moecclMoeConfig_t config = config_of(shape_, s.algorithm);
  check(moecclMoeCreate(&moe_, ranks_.tokens, &config), "moecclMoeCreate", ranks_.tokens);
}

MoeBlock::~MoeBlock() {
  if (routing_ != nullptr) (void)moecclRoutingDestroy(routing_);
  if (moe_ != nullptr) (void)moecclMoeDestroy(moe_);
}

moecclMoeConfig_t MoeBlock::config_of(const Shape& shape, const char* algorithm) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = shape.hidden * sizeof(float);
  config.type = moecclFloat32;
  config.top_k = shape.top_k;
  config.n_experts = shape.experts;  // expert e is on rank e / (experts / ranks)
  config.max_tokens = shape.tokens();
  config.layout = moecclLayoutExpertMajor;
  config.algorithm = algorithm;
  config.trials = -1;  // choose plans by price alone, so that a run can be repeated on a busy machine
  return config;
}

void MoeBlock::route() {
  const int32_t* chosen = choose().data();
  ranks_.timed(Times::kRouting, "moecclRoutingUpdate", [&] {
    return routing_ == nullptr ? moecclRoutingCreate(&routing_, moe_, chosen, gate_.weight.data(), shape_.tokens())
                               : moecclRoutingUpdate(routing_, chosen, gate_.weight.data(), shape_.tokens());
  });
  info_.size = sizeof info_;
  check(moecclRoutingGetInfo(routing_, &info_), "moecclRoutingGetInfo", ranks_.tokens);
  routed();
}

// Calls body(weights, first row, number of rows) for each slot that has rows.
template <class Body>
void MoeBlock::for_each_slot(Body&& body) {
  for (size_t s = 0; s < static_cast<size_t>(info_.n_local_experts); s++) {
    const auto first = static_cast<size_t>(info_.expert_offsets[s]);
    const auto n = static_cast<size_t>(info_.expert_counts[s]);
    if (n > 0) body(experts_.slot(s), first, n);
  }
}

void MoeBlock::forward(const Floats& h, Floats& out) {
  h_ = h;
  norm(shape_.tokens(), norm_, h.data(), normed_.data());
  gate_.forward(normed_);
  route();
  const size_t width = shape_.hidden;
  rows_.resize(info_.n_rows * width);
  rows_normed_.resize(rows_.size());
  y_.resize(rows_.size());
  inner_.resize(info_.n_rows * shape_.expert_inner);
  ranks_.timed(Times::kDispatch, "moecclDispatch",
               [&] { return moecclDispatch(routing_, h.data(), rows_.data(), nullptr); });
  norm(info_.n_rows, norm_, rows_.data(), rows_normed_.data());
  for_each_slot([&](const Mlp& m, size_t row, size_t n) {
    mlp(n, m, &rows_normed_[row * width], &inner_[row * shape_.expert_inner], &y_[row * width]);
  });
  combine(h, out);
}

void MoeBlock::combine(const Floats& h, Floats& out) {
  ranks_.timed(Times::kCombine, "moecclCombine",
               [&] { return moecclCombine(routing_, y_.data(), out.data(), nullptr); });
  Floats shared(h.size());
  mlp(shape_.tokens(), shared_, normed_.data(), shared_inner_.data(), shared.data());
  add(out.size(), h.data(), out.data());
  add(out.size(), shared.data(), out.data());
}

void MoeBlock::backward(const Floats& dout, Floats& dh) {
  Floats dweight(gate_.weight.size());
  combine_backward(dout, dweight);
  const size_t width = shape_.hidden;
  Floats dnormed(rows_.size(), 0.0f);
  drows_.assign(rows_.size(), 0);
  for_each_slot([&](const Mlp& m, size_t row, size_t n) {
    mlp_backward(n, m, &rows_normed_[row * width], &inner_[row * shape_.expert_inner], &dy_[row * width],
                 &dnormed[row * width]);
  });
  norm_backward(info_.n_rows, norm_, rows_.data(), dnormed.data(), drows_.data());
  dispatch_backward(dout, dh);
  // The gate chose at the token's old home, so its gradient belongs there, wherever the sample is now.
  dnormed.assign(h_.size(), 0);
  gate_.backward(normed_, dweight, dnormed);
  norm_backward(shape_.tokens(), norm_, h_.data(), dnormed.data(), dh.data());
}

void MoeBlock::combine_backward(const Floats& dout, Floats& dweight) {
  dy_.resize(y_.size());
  ranks_.timed(Times::kBackward, "moecclCombineBackward", [&] {
    return moecclCombineBackward(routing_, dout.data(), dy_.data(), y_.data(), dweight.data(), nullptr);
  });
}

void MoeBlock::dispatch_backward(const Floats& dout, Floats& dh) {
  ranks_.timed(Times::kBackward, "moecclDispatchBackward",
               [&] { return moecclDispatchBackward(routing_, drows_.data(), dh.data(), nullptr); });
  add(dh.size(), dout.data(), dh.data());
  Floats dnormed(h_.size(), 0.0f);
  mlp_backward(shape_.tokens(), shared_, normed_.data(), shared_inner_.data(), dout.data(), dnormed.data());
  norm_backward(shape_.tokens(), norm_, h_.data(), dnormed.data(), dh.data());
}

void MoeBlock::learn(const Adam& a) { learner_.step(a, experts_.value, experts_.grad); }

// Gradients are written between Begin and Finish; the other tensors are not.
void MoeBlock::attach(moecclExpertSwap_t swap) {
  const uint64_t bytes = shape_.expert_size() * sizeof(float);
  const moecclSwapTensor_t tensors[] = {{experts_.value.data(), bytes, 0, 0},
                                        {learner_.first.data(), bytes, 0, 0},
                                        {learner_.second.data(), bytes, 0, 0},
                                        {experts_.grad.data(), bytes, 1, 0}};
  check(moecclExpertSwapAttach(swap, moe_, tensors, 4, nullptr, nullptr), "moecclExpertSwapAttach", ranks_.tokens);
}

}  // namespace training
