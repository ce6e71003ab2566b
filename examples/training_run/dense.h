// SPDX-License-Identifier: Apache-2.0
// Weights that every rank has, trained as by a sharded optimizer: gradients are summed over the ranks, each rank
// updates an n-th of the weights, and all ranks get the result.
#pragma once

#include "ranks.h"
#include "shape.h"

namespace training {

// The weights of a layer, which are communicated together.
class DensePart {
 public:
  DensePart(const Ranks& ranks, size_t n_weights);
  // Takes the next weights of the part. A Norm starts as the identity.
  Weight take(size_t rows, size_t columns, float scale, uint64_t seed);
  Norm take_norm(size_t width);
  // Starts the sum of the gradients over all ranks, on the stream of `ranks`, and returns at once.
  void begin_sum();
  // Updates this rank's shard and starts sending it to all ranks. The stream must have been synchronized before.
  void learn(const Adam& a);
  size_t n_weights() const { return used_; }
  float* values() { return value_.data(); }
  // Returns the summed gradient, gathered from all ranks' shards. Collective; for tests.
  Floats gradient() const;

 private:
  const Ranks& ranks_;
  size_t shard_, used_ = 0;
  Floats value_, grad_, first_, second_;
};

// The number of weights in the two matrices of a perceptron.
inline size_t mlp_size(size_t width, size_t inner) { return 2 * width * inner; }

}  // namespace training
