// SPDX-License-Identifier: Apache-2.0
// Weights that every rank has. Gradients are summed and weights are brought into step as a sharded optimizer does it:
// each rank learns an n-th of them.
#pragma once

#include "ranks.h"
#include "shape.h"

namespace training {

// The weights of a layer, which travel together.
class DensePart {
 public:
  DensePart(const Ranks& ranks, size_t n_weights);
  // The next weights of the part. A Norm begins as the identity.
  Weight take(size_t rows, size_t columns, float scale, uint64_t seed);
  Norm take_norm(size_t width);
  // Starts the sum of the gradients over all ranks, on the stream of `ranks`, and returns at once.
  void begin_sum();
  // After the stream was synchronized: this rank's shard learns, and all ranks get it.
  void learn(const Adam& a);
  size_t n_weights() const { return used_; }
  float* values() { return value_.data(); }
  // The summed gradient, from everybody's shards. Collective, for tests.
  Floats gradient() const;

 private:
  const Ranks& ranks_;
  size_t shard_, used_ = 0;
  Floats value_, grad_, first_, second_;
};

// Two matrices of a perceptron.
inline size_t mlp_size(size_t width, size_t inner) { return 2 * width * inner; }

}  // namespace training
