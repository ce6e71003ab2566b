// SPDX-License-Identifier: Apache-2.0
// The time of a step with expert domains on this library (HybridEP, Section III). It follows Eq. 2 to 9 of the paper.
// If top_k is known, it follows the plans that run instead: rows deduplicated at each level, latencies, both backward
// passes, the return of gradients, the codec and the shared expert.
#pragma once

#include <cstdint>
#include <vector>

#include "moeccl/solve.h"

namespace moeccl::solve {

struct DomainTime {
  double total_s = 0;
  double all_gather_s = 0;  // on the links
  double all_to_all_s = 0;  // both AlltoAlls of the forward pass
  double backward_s = 0;    // both AlltoAlls of the backward pass
  double return_s = 0;      // the return of gradients to their owners, with the AllReduce of the shared expert
  double codec_s = 0;       // encoding, and decoding everything that a GPU holds
};

class DomainModel {
 public:
  // group_sizes[level] holds the distinct numbers of sub-workers of the level's parents, ascending. The problem must
  // have been checked and must outlive the model. n_gpus is the number on all levels.
  DomainModel(const moecclDomainProblem_t& problem, std::vector<std::vector<int32_t>> group_sizes, int64_t n_gpus);

  DomainTime time(const int32_t* domain) const;
  const std::vector<std::vector<int32_t>>& sizes() const { return sizes_; }

 private:
  // A level as the slowest worker sees it.
  struct Level {
    double domains = 1;          // in a group of the level above
    double size = 1;             // workers of the largest domain
    double own = 1;              // the share of the level's experts in the smallest domain
    std::vector<double> others;  // the shares of the other domains, seen from the smallest
    double gather_bytes = 0;     // experts that arrive in the level's AllGather, in units of a GPU's own
  };
  std::vector<Level> levels_of(const int32_t* domain) const;
  double latency(size_t level) const { return p_.latency_s == nullptr ? 0 : p_.latency_s[level]; }
  DomainTime paper_time(const std::vector<Level>& levels) const;
  DomainTime step_time(const std::vector<Level>& levels) const;
  double token_rows(double experts) const;
  double all_to_all(const std::vector<Level>& levels) const;
  double all_to_all(const std::vector<Level>& levels, size_t hops) const;
  double exchange(const std::vector<Level>& levels, double gpu_bytes) const;
  double encoded_return(const std::vector<Level>& levels, double gpu_bytes) const;
  double shared_all_reduce() const;

  const moecclDomainProblem_t& p_;
  std::vector<std::vector<int32_t>> sizes_;
  double n_gpus_;
};

}  // namespace moeccl::solve
