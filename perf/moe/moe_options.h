// SPDX-License-Identifier: Apache-2.0
// The command line of dispatch_combine_perf, and the routing of all ranks that it describes.
#ifndef PERF_MOE_MOE_OPTIONS_H_
#define PERF_MOE_MOE_OPTIONS_H_

#include <moeccl/moe.h>

#include <cstdint>
#include <string>
#include <vector>

#include "perf/common/data_types.h"
#include "perf/common/job.h"

namespace perf {

struct MoeOptions {
  JobOptions job;
  std::string model;
  size_t tokens = 0;  // per rank; 0: 512, or a trace's
  size_t hidden = 7168;
  int top_k = 8, n_experts = 256;
  bool top_k_given = false, n_experts_given = false;  // on the command line: then a trace must have them too
  moecclDataType_t type = moecclBfloat16;
  moecclMoeLayout_t layout = moecclLayoutExpertMajor;
  int align_rows = 1, capacity = 0;
  std::string routing = "uniform";
  int trace_layer = 0, trace_step = 0;
  uint64_t seed = 1;
  std::vector<std::string> algorithms = {};  // none: flat, 2dh where the ranks are on two levels, auto
  int iters = 10, warmup = 1;
  bool backward = false, explain = false, sequential = false;
  bool update = false;      // each timed iteration begins with moecclRoutingUpdate, which is not timed
  bool cuda_graph = false;  // each operation is captured once and replayed
  std::string output_file, plot_file;
};

// Parses the command line, or exits.
MoeOptions parse_moe_options(int argc, char** argv);

// Returns the owner of each expert, contiguously and as evenly as possible.
std::vector<int32_t> contiguous_owners(int n_experts, int n_ranks);
// Returns the layer that the options describe, which borrows the arguments.
moecclMoeConfig_t layer_config(const MoeOptions& options, const std::vector<int32_t>& expert_rank, size_t max_tokens,
                               const std::string& algorithm);

// One rank's tokens.
struct RankRouting {
  size_t n_tokens = 0;
  std::vector<int32_t> index;  // [n_tokens][k]
  std::vector<float> weight;   // [n_tokens][k]
};
size_t most_tokens(const std::vector<RankRouting>& routing);
// Makes the routing of every rank. May take k and the number of experts from a trace. Fails with a sentence.
std::vector<RankRouting> make_routing(MoeOptions& options, int n_ranks);

// Returns "8 ranks of 512 tokens, hidden 7168 bfloat16, top-8 of 256 experts, uniform routing, expert layout".
std::string describe(const MoeOptions& options, const std::vector<RankRouting>& routing);

}  // namespace perf

#endif  // PERF_MOE_MOE_OPTIONS_H_
