// SPDX-License-Identifier: Apache-2.0
// The smallest layer that sends rows to another rank.
#pragma once

#include "moeccl/moeccl.h"

namespace moeccl::testing {

// Rows of `width` floats go to one of two experts.
inline moecclMoeConfig_t two_experts(size_t max_tokens, size_t width, moecclMoeLayout_t layout) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = width * sizeof(float);
  config.type = moecclFloat32;
  config.top_k = 1;
  config.n_experts = 2;
  config.max_tokens = max_tokens;
  config.layout = layout;
  return config;
}

}  // namespace moeccl::testing
