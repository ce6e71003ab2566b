// SPDX-License-Identifier: Apache-2.0
// Causal attention within each sample, after a norm: out = x + attention(norm(x)).
#pragma once

#include "dense.h"

namespace training {

class Attention {
 public:
  static size_t n_weights(const Shape& shape) { return 2 * shape.hidden + 4 * shape.hidden * shape.attention; }
  Attention(const Shape& shape, DensePart& part, uint64_t seed);
  void forward(const Floats& x, Floats& out);
  // Writes dx[tokens][hidden].
  void backward(const Floats& dout, Floats& dx);

 private:
  // One head of one sample.
  struct Head {
    const float* qkv;  // q of this head in the row of the sample's first token; k and v follow in the same row
    float* share;      // [sample_tokens][sample_tokens], the weight of each earlier token
    size_t at;         // the sample's first token
    size_t column;     // where this head begins in a row of mixed_
  };
  template <class Body>
  void for_each_head(Body&& body);
  void attend(const Head& h);
  void attend_backward(const Head& h, const Floats& dmixed, Floats& dqkv) const;

  Shape shape_;
  Norm norm_;
  Weight qkv_weight_, out_weight_;
  Floats x_, normed_, qkv_, share_, mixed_;
};

}  // namespace training
