// SPDX-License-Identifier: Apache-2.0
// The model: embedding, layers of attention and MoE, a norm and the answer for the next token. One object trains it
// with one feature.
#pragma once

#include "attention.h"
#include "moe.h"

namespace training {

struct StepFacts {
  double loss = 0;                         // mean over all ranks' tokens
  int64_t dropped = 0;                     // choices without room, over all layers and ranks
  int32_t swaps = 0;                       // pairs of experts that changed places
  double combine_mb = 0, replaced_mb = 0;  // of re-placing combines between nodes: with old homes, and as sent
  double ms = 0;                           // this rank's
};

class Transformer {
 public:
  Transformer(const Feature& feature, const Shape& shape, const Corpus& corpus, const Ranks& ranks);
  ~Transformer();
  Transformer(const Transformer&) = delete;
  Transformer& operator=(const Transformer&) = delete;

  // Runs one training step.
  StepFacts step(uint64_t number);
  // From now on, experts stay where swaps have put them.
  void keep_places() { swaps_ = false; }
  // Returns the relative error of the gradients against differences of the loss, for tests. Learns nothing. Collective.
  double gradient_error(uint64_t number);

 private:
  double forward(uint64_t number);
  void backward();
  void learn();
  double head(const std::vector<int32_t>& sample_at, uint64_t number);
  void await_dense() const;

  Shape shape_;
  const Corpus& corpus_;
  const Ranks& ranks_;
  // The last part holds embedding, norm and answer.
  std::vector<std::unique_ptr<DensePart>> parts_;
  std::vector<Attention> attention_;
  std::vector<std::unique_ptr<MoeBlock>> moe_;
  Weight embedding_, answer_;
  Norm norm_;
  moecclExpertSwap_t swap_ = nullptr;
  bool swaps_ = true;
  Adam adam_;
  std::vector<int32_t> tokens_;  // of the samples that this rank loaded
  Floats x_, h_, dx_, dh_;
};

}  // namespace training
