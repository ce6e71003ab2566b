// SPDX-License-Identifier: Apache-2.0
// Causal attention within each sample, behind a norm: out = x + attention(norm(x)).
#pragma once

#include "dense.h"

namespace training {

class Attention {
 public:
  static size_t n_weights(const Shape& shape) { return 2 * shape.hidden + 4 * shape.hidden * shape.attention; }
  Attention(const Shape& shape, DensePart& part, uint64_t seed);
  void forward(const Floats& x, Floats& out);
  // dx[tokens][hidden] is written.
  void backward(const Floats& dout, Floats& dx);

 private:
  // One head of one sample.
  struct Head {
    const float* qkv;  // of the sample's first token and this head: q, and k and v further on in the row
    float* share;      // [sample_tokens][sample_tokens] of each earlier token
    size_t at;         // first token
    size_t column;     // of this head in `mixed`
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
