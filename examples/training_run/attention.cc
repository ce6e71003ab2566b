// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>
#include <cmath>

namespace training {

Attention::Attention(const Shape& shape, DensePart& part, uint64_t seed)
    : shape_(shape),
      norm_(part.take_norm(shape.hidden)),
      qkv_weight_(part.take(shape.hidden, 3 * shape.attention, 1 / std::sqrt(static_cast<float>(shape.hidden)), seed)),
      out_weight_(
          part.take(shape.attention, shape.hidden, 0.3f / std::sqrt(static_cast<float>(shape.attention)), seed + 1)),
      normed_(shape.tokens() * shape.hidden),
      qkv_(shape.tokens() * 3 * shape.attention),
      share_(shape.samples * shape.heads * shape.sample_tokens * shape.sample_tokens),
      mixed_(shape.tokens() * shape.attention) {}

template <class Body>
void Attention::for_each_head(Body&& body) {
  const size_t s = shape_.sample_tokens, width = shape_.attention / shape_.heads;
  for (size_t i = 0; i < shape_.samples; i++)
    for (size_t h = 0; h < shape_.heads; h++)
      body(Head{&qkv_[i * s * 3 * shape_.attention + h * width], &share_[(i * shape_.heads + h) * s * s], i * s,
                h * width});
}

void Attention::forward(const Floats& x, Floats& out) {
  x_ = x;
  norm(shape_.tokens(), norm_, x.data(), normed_.data());
  multiply(shape_.tokens(), normed_.data(), qkv_weight_, qkv_.data());
  for_each_head([&](const Head& h) { attend(h); });
  multiply(shape_.tokens(), mixed_.data(), out_weight_, out.data());
  add(x.size(), x.data(), out.data());
}

void Attention::backward(const Floats& dout, Floats& dx) {
  dx = dout;
  Floats dmixed(mixed_.size(), 0.0f), dqkv(qkv_.size(), 0.0f), dnormed(x_.size(), 0.0f);
  multiply_backward(shape_.tokens(), mixed_.data(), dout.data(), out_weight_, dmixed.data());
  for_each_head([&](const Head& h) { attend_backward(h, dmixed, dqkv); });
  multiply_backward(shape_.tokens(), normed_.data(), dqkv.data(), qkv_weight_, dnormed.data());
  norm_backward(shape_.tokens(), norm_, x_.data(), dnormed.data(), dx.data());
}

void Attention::attend(const Head& h) {
  const size_t s = shape_.sample_tokens, a = shape_.attention, width = a / shape_.heads, row = 3 * a;
  const float scale = 1 / std::sqrt(static_cast<float>(width));
  for (size_t i = 0; i < s; i++) {
    const float* q = h.qkv + i * row;
    float* share = h.share + i * s;
    float most = -1e30f, sum = 0;
    for (size_t j = 0; j <= i; j++) {
      const float* k = h.qkv + j * row + a;
      float dot = 0;
      for (size_t c = 0; c < width; c++) dot += q[c] * k[c];
      share[j] = dot * scale;
      most = std::max(most, share[j]);
    }
    for (size_t j = 0; j <= i; j++) sum += share[j] = std::exp(share[j] - most);
    float* mixed = &mixed_[(h.at + i) * a + h.column];
    std::fill_n(mixed, width, 0.0f);
    for (size_t j = 0; j <= i; j++) {
      share[j] /= sum;
      const float* v = h.qkv + j * row + 2 * a;
      for (size_t c = 0; c < width; c++) mixed[c] += share[j] * v[c];
    }
  }
}

void Attention::attend_backward(const Head& h, const Floats& dmixed, Floats& dqkv) const {
  const size_t s = shape_.sample_tokens, a = shape_.attention, width = a / shape_.heads, row = 3 * a;
  const float scale = 1 / std::sqrt(static_cast<float>(width));
  float* const d = &dqkv[h.at * row + h.column];
  Floats dshare(s);
  for (size_t i = 0; i < s; i++) {
    const float *share = h.share + i * s, *dm = &dmixed[(h.at + i) * a + h.column], *q = h.qkv + i * row;
    float along = 0;
    for (size_t j = 0; j <= i; j++) {
      const float* v = h.qkv + j * row + 2 * a;
      float *dv = d + j * row + 2 * a, dot = 0;
      for (size_t c = 0; c < width; c++) {
        dot += dm[c] * v[c];
        dv[c] += share[j] * dm[c];
      }
      dshare[j] = dot;
      along += dot * share[j];
    }
    for (size_t j = 0; j <= i; j++) {
      const float dlogit = share[j] * (dshare[j] - along) * scale;
      const float* k = h.qkv + j * row + a;
      float *dq = d + i * row, *dk = d + j * row + a;
      for (size_t c = 0; c < width; c++) {
        dq[c] += dlogit * k[c];
        dk[c] += dlogit * q[c];
      }
    }
  }
}

}  // namespace training
