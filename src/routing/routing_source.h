// SPDX-License-Identifier: Apache-2.0
// Routings to simulate with: generated from a seed, or one step of a recorded trace (perf/TRACE.md). The code is pure:
// the caller passes the bytes of a trace.
#pragma once

#include <string_view>

#include "src/routing/moe_traffic.h"

namespace moeccl::algo {

struct RoutingRequest {
  uint32_t n_ranks = 1, n_experts = 1, top_k = 1;
  uint64_t tokens_per_rank = 0;  // at most this many tokens of each rank of a trace; 0: all of them
  uint64_t seed = 1;
};

struct RoutingKind {
  enum { kUniform, kZipf, kTrace } kind = kUniform;
  double exponent = 0;  // zipf
  std::string path;     // trace
  uint32_t layer = 0, step = 0;
};
// Parses "uniform", "zipf:1.2", "trace:PATH" or "trace:PATH:LAYER:STEP". Errors name the position, counted from 1, and
// what is accepted.
Result<RoutingKind> parse_routing_kind(std::string_view text);

// Draws k distinct experts for each token. Expert popularity is ~ 1 / place^exponent with shuffled places; with
// exponent 0 all experts are equally popular.
Result<GlobalRouting> make_routing(const RoutingRequest& request, double exponent);

struct TraceShape {
  uint32_t n_layers = 0, n_steps = 0, n_tokens = 0, top_k = 0, n_experts = 0;
};
// Reads one step. *shape describes the file, also for a caller that must know the number of experts first. Errors name
// the byte offset.
Result<GlobalRouting> read_trace(std::span<const std::byte> file, const RoutingKind& kind,
                                 const RoutingRequest& request, TraceShape* shape);

}  // namespace moeccl::algo
