// SPDX-License-Identifier: Apache-2.0
#include "math.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// The compiler emits three versions of each of these functions, and the loader picks the one that the processor can
// run. Sanitizers are excluded because they start later than the loader.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define TRAINING_CLONES 1
#define TRAINING_FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TRAINING_FAST
#endif

namespace training {

namespace {

// sum[m][columns] of left(m, t) * right[t][columns] over t. left(m, t) is left[m * row_stride + t * term_stride].
struct Product {
  size_t rows, columns, terms;
  const float* left;
  size_t row_stride, term_stride;
  const float* right;
  float* sum;
  bool adds;  // add to the previous contents of `sum`
};

// A block of 4 rows and 2 lanes stays in registers while all terms are added up, so kLane, the number of floats in a
// lane, must be that of the processor's registers: with longer lanes the block does not fit, and each term goes through
// memory.
template <size_t kLane>
__attribute__((always_inline)) inline void multiply_blocks(const Product& p) {
  typedef float Lane __attribute__((vector_size(kLane * sizeof(float)), aligned(4), may_alias));
  constexpr size_t kRows = 4;
  for (size_t j = 0; j < p.columns; j += 2 * kLane) {
    const bool two = j + kLane < p.columns;
    for (size_t i = 0; i < p.rows; i += kRows) {
      const size_t rows = std::min(kRows, p.rows - i);
      Lane acc[kRows][2] = {};
      const float* right = p.right + j;
      if (rows == kRows && two) {
        const float* a = p.left + i * p.row_stride;
        for (size_t t = 0; t < p.terms; t++, right += p.columns, a += p.term_stride) {
          const Lane b0 = *reinterpret_cast<const Lane*>(right), b1 = *reinterpret_cast<const Lane*>(right + kLane);
          for (size_t r = 0; r < kRows; r++) {
            acc[r][0] += a[r * p.row_stride] * b0;
            acc[r][1] += a[r * p.row_stride] * b1;
          }
        }
      } else {
        for (size_t t = 0; t < p.terms; t++, right += p.columns) {
          for (size_t r = 0; r < rows; r++) {
            const float a = p.left[(i + r) * p.row_stride + t * p.term_stride];
            acc[r][0] += a * *reinterpret_cast<const Lane*>(right);
            if (two) acc[r][1] += a * *reinterpret_cast<const Lane*>(right + kLane);
          }
        }
      }
      for (size_t r = 0; r < rows; r++) {
        for (size_t l = 0; l < (two ? 2u : 1u); l++) {
          Lane& out = *reinterpret_cast<Lane*>(p.sum + (i + r) * p.columns + j + l * kLane);
          out = p.adds ? out + acc[r][l] : acc[r][l];
        }
      }
    }
  }
}

#ifdef TRAINING_CLONES
__attribute__((target("arch=x86-64-v4"))) void run_v4(const Product& p) { multiply_blocks<16>(p); }
__attribute__((target("arch=x86-64-v3"))) void run_v3(const Product& p) { multiply_blocks<8>(p); }
#endif

void run(const Product& p) {
#ifdef TRAINING_CLONES
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return run_v4(p);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return run_v3(p);
#endif
  multiply_blocks<4>(p);
}

Floats transposed(const Weight& w) {
  Floats t(w.rows * w.columns);
  constexpr size_t kBlock = 16;
  for (size_t i = 0; i < w.rows; i += kBlock)
    for (size_t j = 0; j < w.columns; j += kBlock)
      for (size_t a = i; a < std::min(w.rows, i + kBlock); a++)
        for (size_t b = j; b < std::min(w.columns, j + kBlock); b++) t[b * w.rows + a] = w.value[a * w.columns + b];
  return t;
}

// The mean, and one over the standard deviation.
struct Moments {
  float mean, scale;
};
TRAINING_FAST Moments moments(const float* x, size_t width) {
  float sum = 0, squares = 0;
  for (size_t i = 0; i < width; i++) sum += x[i];
  const float mean = sum / static_cast<float>(width);
  for (size_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<float>(width) + 1e-5f)};
}

}  // namespace

void multiply(size_t n, const float* in, const Weight& w, float* out) {
  run({n, w.columns, w.rows, in, w.rows, 1, w.value, out, false});
}

void multiply_backward(size_t n, const float* in, const float* dout, const Weight& w, float* din) {
  if (n == 0) return;
  run({w.rows, w.columns, n, in, 1, w.rows, dout, w.grad, true});
  const Floats back = transposed(w);
  run({n, w.rows, w.columns, dout, w.columns, 1, back.data(), din, true});
}

TRAINING_FAST void norm(size_t n, const Norm& m, const float* x, float* y) {
  const size_t width = m.gain.columns;
  for (size_t row = 0; row < n; row++, x += width, y += width) {
    const Moments s = moments(x, width);
    for (size_t i = 0; i < width; i++) y[i] = (x[i] - s.mean) * s.scale * m.gain.value[i] + m.bias.value[i];
  }
}

TRAINING_FAST void norm_backward(size_t n, const Norm& m, const float* x, const float* dy, float* dx) {
  const size_t width = m.gain.columns;
  const float part = 1 / static_cast<float>(width);
  for (size_t row = 0; row < n; row++, x += width, dy += width, dx += width) {
    const Moments s = moments(x, width);
    float sum = 0, along = 0;
    for (size_t i = 0; i < width; i++) {
      const float normed = (x[i] - s.mean) * s.scale, d = dy[i] * m.gain.value[i];
      m.gain.grad[i] += dy[i] * normed;
      m.bias.grad[i] += dy[i];
      sum += d, along += d * normed;
    }
    for (size_t i = 0; i < width; i++) {
      const float normed = (x[i] - s.mean) * s.scale;
      dx[i] += s.scale * (dy[i] * m.gain.value[i] - part * (sum + normed * along));
    }
  }
}

void mlp(size_t n, const Mlp& m, const float* z, float* inner, float* y) {
  multiply(n, z, m.up, inner);
  for (size_t i = 0; i < n * m.up.columns; i++) inner[i] = std::max(inner[i], 0.0f);
  multiply(n, inner, m.down, y);
}

void mlp_backward(size_t n, const Mlp& m, const float* z, const float* inner, const float* dy, float* dz) {
  Floats dinner(n * m.up.columns, 0.0f);
  multiply_backward(n, inner, dy, m.down, dinner.data());
  for (size_t i = 0; i < dinner.size(); i++)
    if (inner[i] <= 0) dinner[i] = 0;
  multiply_backward(n, z, dinner.data(), m.up, dz);
}

TRAINING_FAST void adam(const Adam& a, size_t n, float* weight, float* grad, float* first, float* second) {
  const auto t = static_cast<float>(a.t);
  const float c1 = a.rate / (1 - std::pow(0.9f, t)), c2 = 1 / (1 - std::pow(0.999f, t));
  for (size_t i = 0; i < n; i++) {
    const float g = grad[i];
    first[i] = 0.9f * first[i] + 0.1f * g;
    second[i] = 0.999f * second[i] + 0.001f * g * g;
    weight[i] -= c1 * first[i] / (std::sqrt(c2 * second[i]) + 1e-6f);
    grad[i] = 0;
  }
}

TRAINING_FAST void add(size_t n, const float* from, float* to) {
  for (size_t i = 0; i < n; i++) to[i] += from[i];
}

}  // namespace training
