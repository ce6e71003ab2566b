// SPDX-License-Identifier: Apache-2.0
// One rank's model and its training step.
#pragma once

#include "features.h"

namespace training {

// Sums over all ranks, in place. Any assignment of the addends to ranks gives the same bits.
inline void sum_over_ranks(Fixed& sums, moecclComm_t comm) {
  check(moecclAllReduce(sums.data(), sums.data(), sums.size(), moecclInt64, moecclSum, comm, nullptr),
        "moecclAllReduce", comm);
}

// The dense weights, the same on all ranks.
struct Dense {
  explicit Dense(size_t n_experts) : gate(random_matrix(kHidden * n_experts, 0.5f, 2)) {}
  Floats input = random_matrix(kHidden * kHidden, 0.25f, 1), gate, head = random_matrix(kHidden * kOut, 0.25f, 3);
  Adam input_adam{input.size()}, gate_adam{gate.size()}, head_adam{head.size()};
};

class Trainer {
 public:
  Trainer(const Feature& feature, const Place& place, bool drifting = false)
      : place_(place),
        task_(place.shape.n_experts, drifting ? static_cast<uint64_t>(kSamplesPerRank * place.n_ranks) : 0),
        dense_(place.shape.n_experts),
        gate_(place.shape),
        layer_(make_layer(feature, place)) {}
  const MoeLayer& layer() const { return *layer_; }

  // Runs one step and returns the loss over all ranks' tokens.
  float step(size_t number) {
    load(number);
    multiply(a_.data(), dense_.input.data(), x_.data(), kTokens, kHidden, kHidden);
    gate_.forward(x_, dense_.gate);
    layer_->forward(gate_, x_, out_);
    const float loss = head(number);
    layer_->backward(dout_, dx_, dweight_);
    learn();
    return loss;
  }

 private:
  // Loads this rank's share of the batch.
  void load(size_t step) {
    Floats unused(kSampleTokens * kOut);
    for (int i = 0; i < kSamplesPerRank; i++)
      task_.sample(step, static_cast<uint64_t>(place_.rank * kSamplesPerRank + i),
                   &a_[static_cast<size_t>(i) * kSampleTokens * kHidden], unused.data());
  }

  // Computes answers and loss of the samples that are on this rank after the layer, wherever they came from.
  float head(size_t step) {
    Floats y(kTokens * kOut), answer(kTokens * kOut), unused(kSampleTokens * kHidden);
    const std::vector<int32_t> samples = layer_->samples();
    for (size_t i = 0; i < samples.size(); i++)
      task_.sample(step, static_cast<uint64_t>(samples[i]), unused.data(), &y[i * kSampleTokens * kOut]);
    multiply(out_.data(), dense_.head.data(), answer.data(), kTokens, kHidden, kOut);
    const float scale = 1.0f / static_cast<float>(kTokens * place_.n_ranks * kOut);
    Fixed loss(1, 0);
    head_grad_.assign(dense_.head.size(), 0);
    for (size_t i = 0; i < answer.size(); i++) {
      const float error = answer[i] - y[i];
      loss[0] += to_fixed(error * error * scale);
      answer[i] = 2 * error * scale;  // its gradient
    }
    for (size_t t = 0; t < kTokens; t++)
      add_outer(&out_[t * kHidden], &answer[t * kOut], head_grad_.data(), kHidden, kOut);
    multiply_transposed(answer.data(), dense_.head.data(), dout_.data(), kTokens, kHidden, kOut);
    sum_over_ranks(loss, place_.comm);
    return from_fixed(loss[0]);
  }

  void learn() {
    Fixed grad(dense_.gate.size() + dense_.input.size(), 0), gate_grad(dense_.gate.size(), 0);
    gate_.backward(x_, dense_.gate, dweight_, gate_grad, dx_);
    std::copy(gate_grad.begin(), gate_grad.end(), grad.begin());
    for (size_t t = 0; t < kTokens; t++)
      add_outer(&a_[t * kHidden], &dx_[t * kHidden], &grad[dense_.gate.size()], kHidden, kHidden);
    sum_over_ranks(grad, place_.comm);
    sum_over_ranks(head_grad_, place_.comm);
    dense_.gate_adam.step(dense_.gate.data(), grad.data());
    dense_.input_adam.step(dense_.input.data(), &grad[dense_.gate.size()]);
    dense_.head_adam.step(dense_.head.data(), head_grad_.data());
  }

  Place place_;
  Task task_;
  Dense dense_;
  Gate gate_;
  std::unique_ptr<MoeLayer> layer_;
  Floats a_ = Floats(kTokens * kHidden), x_ = a_, out_ = a_, dout_ = a_, dx_ = a_, dweight_ = gate_.weight;
  Fixed head_grad_;
};

}  // namespace training
