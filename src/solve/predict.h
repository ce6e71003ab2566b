// SPDX-License-Identifier: Apache-2.0
// Predicts the next layer's routing from statistics of pairs of experts that a token chose (NetMoE Section 3.3).
#pragma once

#include <cstdint>

#include "src/base/status.h"

namespace moeccl::solve {

struct TokenPairs {
  const int32_t* now = nullptr;   // [n_tokens][top_k], -1 for none
  const int32_t* next = nullptr;  // [n_tokens][top_k]
  int64_t n_tokens = 0;
  int32_t top_k = 0;
};
// Updates joint[n_now][n_next] = decay * joint + pairs of these tokens.
Status update_predictor(double* joint, int32_t n_now, int32_t n_next, double decay, const TokenPairs& tokens);
// Fills num_next[n_samples][n_next]; each sample keeps its number of tokens.
Status apply_predictor(const double* joint, int32_t n_now, int32_t n_next, const int32_t* num_now, int32_t n_samples,
                       int32_t* num_next);

}  // namespace moeccl::solve
