// SPDX-License-Identifier: Apache-2.0
// What NCCL's algorithms cost over measured links: an alpha-beta price of each, level by level (docs/plugins.md).
#pragma once

#include <span>

#include "plugins/tuner/abi.h"
#include "plugins/tuner/fabric.h"

namespace moeccl::tuner {

// Returns NCCL's own latencies, in microseconds: what its kernels and protocols take besides the wire.
const Constants& default_constants();

struct Shape {
  size_t n_ranks = 0, n_nodes = 0;
  bool nvlink = true;  // between the ranks of a host; else PCI
};

struct Ask {
  int function = kAllReduce;
  double bytes = 0;
  int n_ops = 1;  // fused into one launch
};

// Returns microseconds; below 0 where the model has no formula. Needs n_nodes >= 2 and crossings of at least one level.
double price_us(const Constants& nccl, const Shape& shape, std::span<const Crossing> crossings, const Ask& ask,
                int algorithm, int protocol);
// Returns the time that no algorithm of this kind can beat over these links, whatever a host does inside. Needs
// crossings of at least one level.
double floor_us(const Shape& shape, std::span<const Crossing> crossings, const Ask& ask, int algorithm);

}  // namespace moeccl::tuner
