// SPDX-License-Identifier: Apache-2.0
// The model without any communication: y = (x + MoE(x)) Wh with x = a Wi, two-layer experts, a gate with one or two
// choices of a token.
//
// Gradients are summed in fixed point. Integers add up to the same number in any order, so training takes the same
// course, bit by bit, whichever rank computes which token. That makes the curves comparable; a real program sums
// floats.
#pragma once

#include <cmath>

#include "common.h"

namespace training {

constexpr int kHidden = 16, kInner = 32, kOut = 8;
constexpr int kSampleTokens = 8, kSamplesPerRank = 8, kTokens = kSampleTokens * kSamplesPerRank;
constexpr int kExpertSize = 2 * kHidden * kInner;  // W1 [hidden][inner], then W2 [inner][hidden]

struct Shape {
  size_t n_experts = 8, top_k = 2;
};

// out[n][b] = in[n][a] m[a][b]
inline void multiply(const float* in, const float* m, float* out, size_t n, int a, int b) {
  for (size_t i = 0; i < n; i++) {
    for (int j = 0; j < b; j++) {
      float sum = 0;
      for (int k = 0; k < a; k++) sum += in[i * static_cast<size_t>(a) + static_cast<size_t>(k)] * m[k * b + j];
      out[i * static_cast<size_t>(b) + static_cast<size_t>(j)] = sum;
    }
  }
}
// out[n][a] = in[n][b] m[a][b]^T
inline void multiply_transposed(const float* in, const float* m, float* out, size_t n, int a, int b) {
  for (size_t i = 0; i < n; i++) {
    for (int k = 0; k < a; k++) {
      float sum = 0;
      for (int j = 0; j < b; j++) sum += in[i * static_cast<size_t>(b) + static_cast<size_t>(j)] * m[k * b + j];
      out[i * static_cast<size_t>(a) + static_cast<size_t>(k)] = sum;
    }
  }
}

// Sums in units of 2^-40.
using Fixed = std::vector<int64_t>;
constexpr float kUnit = 1099511627776.0f;
inline int64_t to_fixed(float v) { return std::llrint(static_cast<double>(v) * static_cast<double>(kUnit)); }
inline float from_fixed(int64_t v) { return static_cast<float>(static_cast<double>(v) / static_cast<double>(kUnit)); }
// grad[a][b] += x[a] y[b] for one token
inline void add_outer(const float* x, const float* y, int64_t* grad, int a, int b) {
  for (int k = 0; k < a; k++)
    for (int j = 0; j < b; j++) grad[k * b + j] += to_fixed(x[k] * y[j]);
}

// The Adam optimizer of a contiguous run of weights.
class Adam {
 public:
  explicit Adam(size_t n) : moments_{Floats(n), Floats(n)} {}
  void step(float* weight, const int64_t* grad) {
    t_++;
    const float c1 = 1 - std::pow(0.9f, static_cast<float>(t_)), c2 = 1 - std::pow(0.999f, static_cast<float>(t_));
    Floats &m = moments_[0], &v = moments_[1];
    for (size_t i = 0; i < m.size(); i++) {
      const float g = from_fixed(grad[i]);
      m[i] = 0.9f * m[i] + 0.1f * g;
      v[i] = 0.999f * v[i] + 0.001f * g * g;
      weight[i] -= 0.003f * (m[i] / c1) / (std::sqrt(v[i] / c2) + 1e-8f);
    }
  }
  // Returns the optimizer state of each weight. When weights move to another rank, their state moves with them.
  Floats* moments() { return moments_; }

 private:
  Floats moments_[2];
  int t_ = 0;
};

// Runs one token through one expert, forward and backward.
struct Expert {
  const float* weights;  // [kExpertSize]
  const float* w2() const { return weights + kHidden * kInner; }
  void forward(const float* x, float* inner, float* y) const {
    multiply(x, weights, inner, 1, kHidden, kInner);
    for (int i = 0; i < kInner; i++) inner[i] = inner[i] > 0 ? inner[i] : 0;
    multiply(inner, w2(), y, 1, kInner, kHidden);
  }
  // Adds to grad[kExpertSize] and writes dx[hidden].
  void backward(const float* x, const float* inner, const float* dy, int64_t* grad, float* dx) const {
    float dinner[kInner];
    add_outer(inner, dy, grad + kHidden * kInner, kInner, kHidden);
    multiply_transposed(dy, w2(), dinner, 1, kInner, kHidden);
    for (int i = 0; i < kInner; i++) dinner[i] = inner[i] > 0 ? dinner[i] : 0;
    add_outer(x, dinner, grad, kHidden, kInner);
    multiply_transposed(dinner, weights, dx, 1, kHidden, kInner);
  }
};

// The best experts of each token and their weights: with two choices the softmax of both, with one its part of the
// softmax of all, as in a Switch Transformer.
struct Gate {
  Shape shape;
  std::vector<int32_t> expert;  // [tokens][top_k]
  Floats weight;                // same shape
  Floats part;                  // with one choice: the softmax, [tokens][experts]

  explicit Gate(const Shape& s)
      : shape(s),
        expert(kTokens * s.top_k),
        weight(kTokens * s.top_k),
        part(s.top_k == 1 ? kTokens * s.n_experts : 0) {}

  void forward(const Floats& x, const Floats& wg) {
    const size_t n = shape.n_experts, top_k = shape.top_k;
    Floats logit(n);
    for (size_t t = 0; t < kTokens; t++) {
      multiply(&x[t * kHidden], wg.data(), logit.data(), 1, kHidden, static_cast<int>(n));
      size_t first = 0, second = n;
      for (size_t e = 1; e < n; e++)
        if (logit[e] > logit[first]) first = e;
      for (size_t e = 0; e < n; e++)
        if (e != first && (second == n || logit[e] > logit[second])) second = e;
      expert[t * top_k] = static_cast<int32_t>(first);
      if (top_k == 2) {
        expert[t * 2 + 1] = static_cast<int32_t>(second);
        const float p = 1 / (1 + std::exp(logit[second] - logit[first]));
        weight[t * 2] = p, weight[t * 2 + 1] = 1 - p;
        continue;
      }
      float sum = 0;
      for (size_t e = 0; e < n; e++) sum += part[t * n + e] = std::exp(logit[e] - logit[first]);
      for (size_t e = 0; e < n; e++) part[t * n + e] /= sum;
      weight[t] = part[t * n + first];
    }
  }
  // From the gradients of the weights, adds to the gradients of the gate's matrix and of x.
  void backward(const Floats& x, const Floats& wg, const Floats& dweight, Fixed& grad, Floats& dx) const {
    const size_t n = shape.n_experts;
    for (size_t t = 0; t < kTokens; t++) {
      const Floats dlogit = shape.top_k == 2 ? of_two(t, &dweight[t * 2]) : of_one(t, dweight[t]);
      add_outer(&x[t * kHidden], dlogit.data(), grad.data(), kHidden, static_cast<int>(n));
      float back[kHidden];
      multiply_transposed(dlogit.data(), wg.data(), back, 1, kHidden, static_cast<int>(n));
      for (int i = 0; i < kHidden; i++) dx[t * kHidden + static_cast<size_t>(i)] += back[i];
    }
  }

  // Return the gradients of a token's logits.
  Floats of_two(size_t t, const float* d) const {
    Floats dlogit(shape.n_experts);
    const float s = weight[t * 2] * weight[t * 2 + 1] * (d[0] - d[1]);
    dlogit[static_cast<size_t>(expert[t * 2])] = s, dlogit[static_cast<size_t>(expert[t * 2 + 1])] = -s;
    return dlogit;
  }
  Floats of_one(size_t t, float d) const {
    Floats dlogit(shape.n_experts);
    for (size_t e = 0; e < dlogit.size(); e++) dlogit[e] = -d * weight[t] * part[t * dlogit.size() + e];
    dlogit[static_cast<size_t>(expert[t])] += d * weight[t];
    return dlogit;
  }
};

// The task to learn. Tokens come from clusters, and most tokens of a sample come from one of them. The answer is the
// sum of a nonlinear map that all clusters share, a small map of the cluster, and noise, which no model can learn and
// which sets the floor of the loss.
class Task {
 public:
  static constexpr float kNoise = 1.5f;
  static constexpr uint64_t kStay = 4;  // steps
  static constexpr double kExponent = 1.3;
  // n_drifting: the number of samples in a batch if clusters come and go, see popularity(). The clusters then lie
  // further apart, their own maps are larger and there is less noise, so that it matters whether tokens find their
  // expert. 0: clusters are equally frequent. There are as many clusters as experts.
  explicit Task(size_t n_clusters, uint64_t n_drifting = 0)
      : n_clusters_(n_clusters),
        n_drifting_(n_drifting),
        noise_(n_drifting > 0 ? 0.2f : kNoise),
        centre_(random_matrix(n_clusters * kHidden, n_drifting > 0 ? 1.2f : 0.3f, 11)),
        own_(random_matrix(n_clusters * kHidden * kOut, n_drifting > 0 ? 0.4f : 0.02f, 14)) {}
  void sample(uint64_t step, uint64_t number, float* a, float* y) const {
    Random random(step * 100003 + number * 7 + 5);
    size_t liked = random.next() % n_clusters_;
    if (n_drifting_ > 0) liked = drifting(step, (static_cast<double>(number) + 0.5) / static_cast<double>(n_drifting_));
    for (int t = 0; t < kSampleTokens; t++, a += kHidden, y += kOut) {
      const size_t cluster = random.unit() < 0.8f ? liked : random.next() % n_clusters_;
      for (size_t i = 0; i < kHidden; i++) a[i] = centre_[cluster * kHidden + i] + 0.6f * random.normal();
      float inner[kInner], own[kOut];
      multiply(a, u_.data(), inner, 1, kHidden, kInner);
      for (float& v : inner) v = v > 0 ? v : 0;
      multiply(inner, v_.data(), y, 1, kInner, kOut);
      multiply(a, &own_[cluster * kHidden * kOut], own, 1, kHidden, kOut);
      for (int i = 0; i < kOut; i++) y[i] += own[i] + noise_ * random.normal();
    }
  }

 private:
  // Returns the part of cluster c in a step, not normalised: Zipf's law, in an order that moves on by one place every
  // kStay steps. The last cluster becomes the most popular one then, and the others fade.
  double popularity(uint64_t step, size_t c) const {
    const size_t place = (c + step / kStay) % n_clusters_;
    return std::pow(static_cast<double>(place + 1), -kExponent);
  }
  // Returns the cluster at `share` of the batch.
  size_t drifting(uint64_t step, double share) const {
    double sum = 0;
    for (size_t c = 0; c < n_clusters_; c++) sum += popularity(step, c);
    size_t c = 0;
    for (share *= sum; c + 1 < n_clusters_ && share > popularity(step, c); c++) share -= popularity(step, c);
    return c;
  }

  size_t n_clusters_;
  uint64_t n_drifting_;
  float noise_;
  Floats centre_;
  Floats u_ = random_matrix(kHidden * kInner, 0.35f, 12), v_ = random_matrix(kInner * kOut, 0.25f, 13);
  Floats own_;
};

// Experts start as copies of the same weights with a little noise, as when a dense model is turned into a sparse one.
inline Floats initial_expert(int e) {
  Floats w = random_matrix(kExpertSize, 0.2f, 21);
  const Floats noise = random_matrix(kExpertSize, 0.005f, 100 + static_cast<uint64_t>(e));
  for (size_t i = 0; i < w.size(); i++) w[i] += noise[i];
  return w;
}

}  // namespace training
