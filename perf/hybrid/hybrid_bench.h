// SPDX-License-Identifier: Apache-2.0
// One rank's part of hybrid_perf: checks and times a step of a MoE layer whose experts travel inside domains and whose
// tokens travel between them, and counts the messages of the step.
#ifndef PERF_HYBRID_HYBRID_BENCH_H_
#define PERF_HYBRID_HYBRID_BENCH_H_

#include <moeccl/moeccl.h>

#include <cstdint>
#include <vector>

#include "perf/common/team.h"

namespace perf {

struct HybridShape {
  size_t data_bytes = 2 << 20;     // D, of a rank
  size_t expert_bytes = 64 << 10;  // of one expert
  int experts_per_rank = 1;
  size_t row_bytes = 4096;
  double pre_expert_s = 0;
  int top_k = 1;
  bool forward_only = false;  // false: also both backward passes and the return of gradients, beside twice pre_expert_s
};

struct HybridTime {
  std::vector<int32_t> domain;
  double model_us = 0;                  // the stream model's time of a step
  double measured_us = 0;               // of a step, median over iterations of the slowest rank
  double gather_us = 0, tokens_us = 0;  // until the experts have arrived; all AlltoAlls
  double return_us = 0;                 // of gradients, with the computation that hides it
  uint64_t wrong = 0;
};

struct HybridChoice {
  std::vector<int32_t> domain;     // empty: the model chooses
  const char* algorithm = "auto";  // of dispatch and combine
};

class HybridBench {
 public:
  // Experts move on a separate stream. The team has one rank.
  HybridBench(const Team& team, const HybridShape& shape);
  ~HybridBench();
  HybridBench(const HybridBench&) = delete;
  HybridBench& operator=(const HybridBench&) = delete;

  // Runs all choices in turn, so that they see the same machine.
  std::vector<HybridTime> run(const std::vector<HybridChoice>& choices, int iters, int warmup);
  // Counts the messages of all ranks in one gather and one dispatch in which every rank has a token for every expert.
  struct Messages {
    uint64_t gather = 0, tokens = 0;
  };
  Messages count(const std::vector<int32_t>& domain);

 private:
  struct Layer;
  Layer create(const HybridChoice& choice);
  void destroy(Layer& layer);
  uint64_t verify(Layer& layer);
  void gather(Layer& layer, moecclStream_t stream);
  void give_back(Layer& layer, moecclStream_t stream);
  void tokens(Layer& layer);
  void tokens_back(Layer& layer);
  void compute(double seconds) const;
  struct Parts {
    double gather_us = 0, tokens_us = 0, return_us = 0;
  };
  Parts step(Layer& layer);
  uint64_t sent() const;

  const Team& team_;
  HybridShape shape_;
  int rank_, n_;
  int32_t n_experts_;
  size_t n_tokens_;
  moecclStream_t stream_ = nullptr;
  std::vector<float> in_, out_;
  std::vector<unsigned char> own_;
};

// Returns all combinations of domain sizes that divide an even topology's levels. sizes[level]: groups in a group of
// the level above.
std::vector<std::vector<int32_t>> domains_of(const std::vector<int32_t>& sizes);

}  // namespace perf

#endif  // PERF_HYBRID_HYBRID_BENCH_H_
