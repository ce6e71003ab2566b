// SPDX-License-Identifier: Apache-2.0
#include "transformer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace training {

Transformer::Transformer(const Feature& feature, const Shape& shape, const Corpus& corpus, const Ranks& ranks)
    : shape_(shape), corpus_(corpus), ranks_(ranks) {
  bool swaps = false;
  for (size_t l = 0; l < shape.layers; l++) {
    DensePart& part = *parts_.emplace_back(
        std::make_unique<DensePart>(ranks, Attention::n_weights(shape) + MoeBlock::n_weights(shape)));
    attention_.emplace_back(shape, part, 10 + 2 * l);
    moe_.push_back(make_moe({shape, ranks, corpus, l, feature.of(l), feature.algorithm.c_str(), part}));
    swaps = swaps || feature.of(l).swap;
  }
  const size_t words = shape.vocabulary * shape.hidden;
  DensePart& part = *parts_.emplace_back(std::make_unique<DensePart>(ranks, 2 * words + 2 * shape.hidden));
  embedding_ = part.take(shape.vocabulary, shape.hidden, 0, 0);
  const Floats directions = corpus.embedding();
  std::copy(directions.begin(), directions.end(), embedding_.value);
  norm_ = part.take_norm(shape.hidden);
  answer_ = part.take(shape.hidden, shape.vocabulary, 0.3f / std::sqrt(static_cast<float>(shape.hidden)), 5);
  x_.resize(shape.tokens() * shape.hidden);
  h_ = dx_ = dh_ = x_;
  if (!swaps) return;
  moecclExpertSwapConfig_t config = MOECCL_EXPERT_SWAP_CONFIG_INIT;
  config.interval = 1;  // the run is short: count each layer in every step
  check(moecclExpertSwapCreate(&swap_, ranks.tokens, &config), "moecclExpertSwapCreate", ranks.tokens);
  for (size_t l = 0; l < shape.layers; l++)
    if (feature.of(l).swap) moe_[l]->attach(swap_);
}

Transformer::~Transformer() {
  await_dense();
  if (swap_ != nullptr) (void)moecclExpertSwapDestroy(swap_);
}

void Transformer::await_dense() const { check(moecclStreamSynchronize(ranks_.stream), "moecclStreamSynchronize"); }

StepFacts Transformer::step(uint64_t number) {
  StepFacts facts;
  const double begin = now();
  facts.loss = forward(number);
  backward();
  if (swap_ != nullptr) check(moecclExpertSwapFinish(swap_, &facts.swaps), "moecclExpertSwapFinish", ranks_.tokens);
  learn();
  if (swap_ != nullptr && swaps_) check(moecclExpertSwapBegin(swap_), "moecclExpertSwapBegin", ranks_.tokens);
  facts.ms = 1e3 * (now() - begin);
  for (const auto& m : moe_) {
    facts.dropped += m->n_dropped();
    facts.combine_mb += static_cast<double>(m->node_bytes().first) / 1e6;
    facts.replaced_mb += static_cast<double>(m->node_bytes().second) / 1e6;
  }
  return facts;
}

double Transformer::forward(uint64_t number) {
  await_dense();
  const size_t s = shape_.sample_tokens, width = shape_.hidden;
  // The sample at each place of all ranks. Layers may move samples.
  std::vector<int32_t> sample_at(shape_.samples * static_cast<size_t>(ranks_.n));
  std::iota(sample_at.begin(), sample_at.end(), 0);
  tokens_.clear();
  std::vector<int32_t> sample(s + 1);
  for (size_t i = 0; i < shape_.samples; i++) {
    corpus_.sample(number, static_cast<size_t>(ranks_.rank) * shape_.samples + i, sample.data());
    tokens_.insert(tokens_.end(), sample.begin(), sample.end() - 1);
  }
  for (size_t t = 0; t < tokens_.size(); t++)
    std::copy_n(embedding_.value + static_cast<size_t>(tokens_[t]) * width, width, &x_[t * width]);
  for (size_t l = 0; l < shape_.layers; l++) {
    attention_[l].forward(x_, h_);
    moe_[l]->forward(h_, x_);
    moe_[l]->move(sample_at);
  }
  return head(sample_at, number);
}

// Computes the loss of the samples that are here now, and its gradient into dx_. Returns the loss over all ranks.
double Transformer::head(const std::vector<int32_t>& sample_at, uint64_t number) {
  const size_t s = shape_.sample_tokens, words = shape_.vocabulary, n = shape_.tokens();
  Floats normed(x_.size()), logits(n * words);
  norm(n, norm_, x_.data(), normed.data());
  multiply(n, normed.data(), answer_, logits.data());
  const float part = 1 / static_cast<float>(n * static_cast<size_t>(ranks_.n));
  std::vector<int32_t> sample(s + 1);
  double loss = 0;
  for (size_t t = 0; t < n; t++) {
    if (t % s == 0)
      corpus_.sample(number,
                     static_cast<uint64_t>(sample_at[static_cast<size_t>(ranks_.rank) * shape_.samples + t / s]),
                     sample.data());
    float* logit = &logits[t * words];
    const auto right = static_cast<size_t>(sample[t % s + 1]);
    const float most = *std::max_element(logit, logit + words);
    float sum = 0;
    for (size_t i = 0; i < words; i++) sum += std::exp(logit[i] - most);
    loss -= static_cast<double>((logit[right] - most - std::log(sum)) * part);
    for (size_t i = 0; i < words; i++) logit[i] = part * std::exp(logit[i] - most) / sum;
    logit[right] -= part;
  }
  Floats dnormed(x_.size(), 0.0f);
  multiply_backward(n, normed.data(), logits.data(), answer_, dnormed.data());
  std::fill(dx_.begin(), dx_.end(), 0.0f);
  norm_backward(n, norm_, x_.data(), dnormed.data(), dx_.data());
  check(moecclAllReduce(&loss, &loss, 1, moecclFloat64, moecclSum, ranks_.tokens, nullptr), "moecclAllReduce",
        ranks_.tokens);
  return loss;
}

// Sums each layer's dense gradients while the backward pass of the layers before it runs.
void Transformer::backward() {
  for (size_t l = shape_.layers; l-- > 0;) {
    moe_[l]->backward(dx_, dh_);
    attention_[l].backward(dh_, dx_);
    parts_[l]->begin_sum();
  }
  for (size_t t = 0; t < tokens_.size(); t++)
    add(shape_.hidden, &dx_[t * shape_.hidden], embedding_.grad + static_cast<size_t>(tokens_[t]) * shape_.hidden);
  parts_.back()->begin_sum();
}

void Transformer::learn() {
  for (const auto& m : moe_) m->learn(adam_);
  await_dense();
  for (const auto& p : parts_) p->learn(adam_);
  adam_.t++;
}

double Transformer::gradient_error(uint64_t number) {
  forward(number);
  backward();
  await_dense();
  // A step of this length along the gradient of one set of weights changes the loss by length times the gradient's
  // norm.
  constexpr double kLength = 0.005;
  double worst = 0;
  const auto compare = [&](float* value, const Floats& gradient, bool on_all_ranks) {
    double squares = 0;
    for (const float g : gradient) squares += static_cast<double>(g) * static_cast<double>(g);
    if (!on_all_ranks)
      check(moecclAllReduce(&squares, &squares, 1, moecclFloat64, moecclSum, ranks_.tokens, nullptr), "moecclAllReduce",
            ranks_.tokens);
    const double norm = std::sqrt(squares);
    const Floats before(value, value + gradient.size());
    double loss[2];
    for (const int side : {0, 1}) {
      const auto scale = static_cast<float>((side == 0 ? -kLength : kLength) / norm);
      for (size_t i = 0; i < before.size(); i++) value[i] = before[i] + scale * gradient[i];
      loss[side] = forward(number);
    }
    std::copy(before.begin(), before.end(), value);
    worst = std::max(worst, std::abs((loss[1] - loss[0]) / (2 * kLength * norm) - 1));
  };
  // Each loss adds to the gradient of the answer's matrix, so all gradients are taken first.
  std::vector<Floats> dense, experts;
  for (const auto& p : parts_) dense.push_back(p->gradient());
  for (const auto& m : moe_) experts.push_back(m->expert_grads());
  for (size_t i = 0; i < parts_.size(); i++) compare(parts_[i]->values(), dense[i], true);
  for (size_t i = 0; i < moe_.size(); i++) compare(moe_[i]->expert_values(), experts[i], false);
  return worst;
}

}  // namespace training
