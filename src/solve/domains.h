// SPDX-License-Identifier: Apache-2.0
// Expert domains: experts travel inside a domain (AllGather), and tokens travel between domains (AlltoAll). HybridEP,
// Sections III and IV.
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"
#include "src/solve/domain_step.h"

namespace moeccl::solve {

Result<moecclDomainProblem_t> checked(const moecclDomainProblem_t& problem);
Status check_domain(const moecclDomainProblem_t& problem, const int32_t* domain);

// For one even level: the p of Eq. 11 and 12 and the latency of Eq. 10, in seconds.
struct OneLevel {
  double workers, bandwidth, pre_expert_s, data_bytes, expert_bytes;
};
Status check(const OneLevel& level);
double best_proportion(const OneLevel& level);
double latency(const OneLevel& level, double p);

// These take checked problems.
DomainTime domain_time(const moecclDomainProblem_t& problem, const int32_t* domain);
// Writes the times of sizes that take `time` into the answer.
void tell(const DomainTime& time, moecclDomainAnswer_t* answer);
void solve_domains(const moecclDomainProblem_t& problem, int32_t* domain, moecclDomainAnswer_t* answer);
Status locate(const moecclDomainProblem_t& problem, int64_t gpu, int32_t* location);
Result<moecclDomainLink_t> link_at(const moecclDomainProblem_t& problem, const int32_t* domain, int32_t level,
                                   int64_t m, int64_t n);

}  // namespace moeccl::solve
