// SPDX-License-Identifier: Apache-2.0
// The output of dispatch_combine_perf.
#ifndef PERF_MOE_MOE_REPORT_H_
#define PERF_MOE_MOE_REPORT_H_

#include <string>
#include <vector>

#include "perf/moe/moe_bench.h"

namespace perf {

void print_moe_table(const MoeOptions& options, const std::string& description, const std::vector<MoeResult>& results);
std::string moe_json(const MoeOptions& options, const std::vector<RankRouting>& routing,
                     const std::vector<MoeResult>& results);
std::string moe_plot(const std::string& description, const std::vector<MoeResult>& results);

}  // namespace perf

#endif  // PERF_MOE_MOE_REPORT_H_
