// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a Transformer: matrix products, layer norm, two-layer perceptrons and Adam, each with its backward
// pass. Matrices are row-major floats, and column counts are multiples of 16. Gradients are always added to the
// previous contents. A row's result does not depend on the other rows, so a token gives the same bits on every rank.
#pragma once

#include <cstddef>

#include "../training/common.h"

namespace training {

// A trainable matrix and its gradient. Its creator owns both.
struct Weight {
  float* value = nullptr;  // [rows][columns]
  float* grad = nullptr;
  size_t rows = 0, columns = 0;
};
// out[n][columns] = in[n][rows] w
void multiply(size_t n, const float* in, const Weight& w, float* out);
// The backward pass: adds to the gradient of w, and computes din[n][rows] += dout[n][columns] w^T.
void multiply_backward(size_t n, const float* in, const float* dout, const Weight& w, float* din);

// y = (x - mean) / deviation * gain + bias for each row.
struct Norm {
  Weight gain, bias;  // [1][width]
};
void norm(size_t n, const Norm& m, const float* x, float* y);
// dx[n][width] += the gradient. x is the input of the forward pass.
void norm_backward(size_t n, const Norm& m, const float* x, const float* dy, float* dx);

// y = relu(z up) down
struct Mlp {
  Weight up, down;
};
// Keeps inner[n][up.columns] for the backward pass.
void mlp(size_t n, const Mlp& m, const float* z, float* inner, float* y);
// dz[n][up.rows] += the gradient.
void mlp_backward(size_t n, const Mlp& m, const float* z, const float* inner, const float* dy, float* dz);

// The Adam optimizer at step number `t`, counted from 1. adam() updates `n` weights and their two moments, [n] each,
// and sets the gradients to zero.
struct Adam {
  float rate = 0.001f;
  int t = 1;
};
void adam(const Adam& a, size_t n, float* weight, float* grad, float* first_moment, float* second_moment);

void add(size_t n, const float* from, float* to);

}  // namespace training
