// SPDX-License-Identifier: Apache-2.0
// What the model reads, and a gate that is specialised already.
//
// Samples have a topic, one for each rank; a topic has its own tokens, and one of four tokens follows each. In each
// layer a token has its top_k experts: a share of them on the topic's rank, a share on that rank's node, and the rest
// drawn from all experts by Zipf's law. The gate begins with exactly these choices, as that of a model that has been
// trained for long, so that a short run has the routing of a long one; it learns on from there.
#pragma once

#include "shape.h"

namespace training {

// Where tokens go. The first experts are the most popular ones, so with zipf above 0 they lie on the first rank.
struct Routing {
  double zipf = 0;                  // exponent of the experts' popularity
  double on_rank = 0, on_node = 0;  // shares of a topic's choices
  bool all_topics = false;          // each as often in every step; else each sample's is drawn
};

class Corpus {
 public:
  Corpus(const Shape& shape, const Routing& routing, int n_ranks, int ranks_per_node, uint64_t seed);
  // tokens[sample_tokens + 1] of a sample: each token's successor is what the model shall say.
  void sample(uint64_t step, uint64_t number, int32_t* tokens) const;
  Floats embedding() const;         // [vocabulary][hidden], orthogonal rows
  Floats gate(size_t layer) const;  // [hidden][experts]

 private:
  std::vector<int32_t> choose(size_t layer, size_t token) const;
  float direction(size_t token, size_t i) const;

  Shape shape_;
  Routing routing_;
  int n_ranks_, ranks_per_node_;
  uint64_t seed_;
  std::vector<double> popular_;  // [experts] sums of the popularities
};

}  // namespace training
