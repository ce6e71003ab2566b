// SPDX-License-Identifier: Apache-2.0
// Times MoE dispatch and combine with several algorithms in turn, after checking every row and value.
#include "perf/common/text.h"
#include "perf/moe/moe_bench.h"
#include "perf/moe/moe_report.h"

namespace perf {
namespace {

int dispatch_combine_main(int argc, char** argv) {
  MoeOptions options = parse_moe_options(argc, argv);
  Job job(options.job);
  const std::vector<RankRouting> routing = make_routing(options, job.n_ranks());
  const std::vector<int32_t> expert_rank = contiguous_owners(options.n_experts, job.n_ranks());
  const std::string description = describe(options, routing);
  const auto results = job.run<std::vector<MoeResult>>(options.job.pace, [&](int thread, const Team& team) {
    const bool leads = job.leads() && thread == 0;
    Progress progress(leads);
    MoeBench bench(options, routing, expert_rank, team, leads ? &progress : nullptr);
    return bench.run();
  });
  uint64_t wrong = 0;
  for (const MoeResult& r : results) wrong += r.n_wrong;
  if (job.leads()) {
    print_moe_table(options, description, results);
    write_or_fail({{options.output_file, moe_json(options, routing, results)},
                   {options.plot_file, moe_plot(description, results)}});
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::dispatch_combine_main(argc, argv); }
