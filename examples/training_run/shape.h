// SPDX-License-Identifier: Apache-2.0
// The model's sizes, and which of the library's features each of its layers uses.
#pragma once

#include <string>
#include <vector>

#include "math.h"

namespace training {

// Column counts are multiples of 16.
struct Shape {
  size_t layers = 4, hidden = 512, attention = 64, heads = 2, shared_inner = 64, expert_inner = 64;
  int experts = 32, top_k = 4;
  size_t vocabulary = 256, sample_tokens = 32, samples = 4;  // samples of a rank in a step
  size_t tokens() const { return samples * sample_tokens; }
  size_t expert_size() const { return 2 * hidden * expert_inner; }
};

// How a layer brings tokens and experts together.
struct LayerFeature {
  enum Way {
    kTokens,    // dispatch and combine
    kReplaced,  // combine moves samples to other homes (replace.h)
    kReplicas,  // experts have replicas in slots with a capacity (experts.h)
    kDomains    // ranks of a domain share experts, which travel encoded (hybrid.h, migrate.h)
  };
  Way way = kTokens;
  bool swap = false;    // kTokens: experts trade places while the model trains (swap.h)
  bool places = true;   // kReplicas: place replicas anew in each step, by popularity; false: equally many each
  double capacity = 0;  // kReplicas: of a slot, relative to an even distribution of the tokens over slots; 0: no limit
  double ratio = 50;    // kDomains: compression ratio of the codec; 1: exact
};
struct Feature {
  std::string name, algorithm = "auto";
  std::vector<LayerFeature> layers;  // one for all layers, or one for each
  const LayerFeature& of(size_t layer) const { return layers[layer % layers.size()]; }
};

}  // namespace training
