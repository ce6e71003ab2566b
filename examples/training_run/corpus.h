// SPDX-License-Identifier: Apache-2.0
// The data that the model reads, and a gate that is already specialised.
//
// There are as many topics as ranks, and each sample has one. A topic has its own tokens, and one of four tokens
// follows each. In each layer a token has top_k experts: a share of them on the topic's rank, a share on that rank's
// node, and the rest drawn from all experts by Zipf's law. The gate starts with exactly these choices, like the gate of
// a model after long training, so that a short run has the routing of a long one. It continues to learn from there.
#pragma once

#include "shape.h"

namespace training {

// How tokens choose experts. The first experts are the most popular, so with zipf above 0 they are on the first rank.
struct Routing {
  double zipf = 0;                  // exponent of the experts' popularity
  double on_rank = 0, on_node = 0;  // shares of a topic's choices
  bool all_topics = false;          // every step has all topics equally often; false: each sample's topic is drawn
};

class Corpus {
 public:
  Corpus(const Shape& shape, const Routing& routing, int n_ranks, int ranks_per_node, uint64_t seed);
  // Writes tokens[sample_tokens + 1] of a sample. The model has to predict each token's successor.
  void sample(uint64_t step, uint64_t number, int32_t* tokens) const;
  Floats embedding() const;         // [vocabulary][hidden], orthogonal rows
  Floats gate(size_t layer) const;  // [hidden][experts]
  // Returns what is added to the logits when experts are chosen, [experts]. Without it the popularity that the gates
  // start with is gone after some twenty steps, because the hidden states of an untrained model change so fast. It is
  // too small to change the first choices.
  Floats popularity() const;

 private:
  std::vector<int32_t> choose(size_t layer, size_t token) const;
  float direction(size_t token, size_t i) const;

  Shape shape_;
  Routing routing_;
  int n_ranks_, ranks_per_node_;
  uint64_t seed_;
  std::vector<double> popular_;  // [experts] cumulative popularities
};

}  // namespace training
