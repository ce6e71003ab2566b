// SPDX-License-Identifier: Apache-2.0
// The model without any communication: y = (x + MoE(x)) Wh with x = a Wi, two-layer experts, top-2 softmax gate.
//
// Gradients are summed in fixed point. Integers add up to the same number in any order, so training takes the same
// course, bit by bit, whichever rank computes which token. That makes the curves comparable; a real program sums
// floats.
#pragma once

#include <cmath>

#include "common.h"

namespace training {

constexpr int kHidden = 16, kInner = 32, kOut = 8, kExperts = 8, kTopK = 2;
constexpr int kSampleTokens = 8, kSamplesPerRank = 8, kTokens = kSampleTokens * kSamplesPerRank;
constexpr int kExpertSize = 2 * kHidden * kInner;  // W1 [hidden][inner], then W2 [inner][hidden]

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

// The two best experts of each token and their softmax weights.
struct Gate {
  std::vector<int32_t> expert = std::vector<int32_t>(kTokens * kTopK);
  Floats weight = Floats(kTokens * kTopK);

  void forward(const Floats& x, const Floats& wg) {
    float logit[kExperts];
    for (size_t t = 0; t < kTokens; t++) {
      multiply(&x[t * kHidden], wg.data(), logit, 1, kHidden, kExperts);
      int first = 0, second = -1;
      for (int e = 1; e < kExperts; e++)
        if (logit[e] > logit[first]) first = e;
      for (int e = 0; e < kExperts; e++)
        if (e != first && (second < 0 || logit[e] > logit[second])) second = e;
      const float p = 1 / (1 + std::exp(logit[second] - logit[first]));
      expert[t * kTopK] = first, expert[t * kTopK + 1] = second;
      weight[t * kTopK] = p, weight[t * kTopK + 1] = 1 - p;
    }
  }
  // From the gradients of the weights, adds to the gradients of the gate's matrix and of x.
  void backward(const Floats& x, const Floats& wg, const Floats& dweight, Fixed& grad, Floats& dx) const {
    for (size_t t = 0; t < kTokens; t++) {
      const float* d = &dweight[t * kTopK];
      const float s = weight[t * kTopK] * weight[t * kTopK + 1] * (d[0] - d[1]);
      float dlogit[kExperts] = {};
      dlogit[expert[t * kTopK]] = s, dlogit[expert[t * kTopK + 1]] = -s;
      add_outer(&x[t * kHidden], dlogit, grad.data(), kHidden, kExperts);
      float back[kHidden];
      multiply_transposed(dlogit, wg.data(), back, 1, kHidden, kExperts);
      for (int i = 0; i < kHidden; i++) dx[t * kHidden + static_cast<size_t>(i)] += back[i];
    }
  }
};

// The task to learn. Tokens come from clusters, and most tokens of a sample come from one of them. The answer is the
// sum of a nonlinear map that all clusters share, a small map of the cluster, and noise, which no model can learn and
// which sets the floor of the loss.
class Task {
 public:
  static constexpr float kNoise = 1.5f;
  // n_drifting: the number of samples in a batch if clusters come and go. The clusters then lie further apart, their
  // own maps are larger and there is less noise, so that it matters whether tokens find their expert. 0: clusters are
  // equally frequent.
  explicit Task(uint64_t n_drifting = 0)
      : n_drifting_(n_drifting),
        noise_(n_drifting > 0 ? 0.2f : kNoise),
        centre_(random_matrix(kExperts * kHidden, n_drifting > 0 ? 1.2f : 0.3f, 11)),
        own_(random_matrix(kExperts * kHidden * kOut, n_drifting > 0 ? 0.4f : 0.02f, 14)) {}
  void sample(uint64_t step, uint64_t number, float* a, float* y) const {
    Random random(step * 100003 + number * 7 + 5);
    size_t liked = random.next() % kExperts;
    if (n_drifting_ > 0) liked = drifting(step, (static_cast<double>(number) + 0.5) / static_cast<double>(n_drifting_));
    for (int t = 0; t < kSampleTokens; t++, a += kHidden, y += kOut) {
      const size_t cluster = random.unit() < 0.8f ? liked : random.next() % kExperts;
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
  // Returns the cluster at `share` of the batch. The part of cluster c, which changes by a factor of 55 within 16
  // steps, is proportional to exp(2 sin(2 pi (step / 32 + c / 8))).
  static size_t drifting(uint64_t step, double share) {
    double part[kExperts], sum = 0;
    for (size_t c = 0; c < kExperts; c++) {
      const double turns = static_cast<double>(step % 32) / 32 + static_cast<double>(c) / kExperts;
      sum += part[c] = std::exp(2 * std::sin(6.283185307179586 * turns));
    }
    size_t c = 0;
    for (share *= sum; c + 1 < kExperts && share > part[c]; c++) share -= part[c];
    return c;
  }

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
