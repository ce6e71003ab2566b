// SPDX-License-Identifier: Apache-2.0
// Times MoE dispatch and combine with several algorithms in turn, after checking every row and value.
#include <cstdio>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/svg.h"
#include "perf/moe/moe_bench.h"
#include "perf/moe/moe_report.h"

namespace perf {
namespace {

// Places experts contiguously and as evenly as possible.
std::vector<int32_t> place_experts(int n_experts, int n_ranks) {
  std::vector<int32_t> owner;
  for (int64_t e = 0; e < n_experts; e++) owner.push_back(static_cast<int32_t>(e * n_ranks / n_experts));
  return owner;
}

bool write_or_complain(const std::string& path, const std::string& text) {
  if (path.empty() || write_text(path, text)) return true;
  std::fprintf(stderr, "# error: cannot write %s\n", path.c_str());
  return false;
}

int report(const MoeOptions& options, const std::string& description, const std::vector<MoeResult>& results) {
  print_moe_table(options, description, results);
  bool good =
      options.output_file.empty() || write_or_complain(options.output_file, moe_json(options, description, results));
  good &= options.plot_file.empty() || write_or_complain(options.plot_file, moe_plot(description, results));
  return good ? 0 : 1;
}

int dispatch_combine_main(int argc, char** argv) {
  MoeOptions options = parse_moe_options(argc, argv);
  Job job(options.job);
  const std::vector<RankRouting> routing = make_routing(options, job.n_ranks());
  const std::vector<int32_t> expert_rank = place_experts(options.n_experts, job.n_ranks());
  const std::string description = describe(options, routing);
  std::vector<MoeResult> results;  // thread 0 writes them
  job.run([&](int thread, std::vector<moecclComm_t> comms) {
    const Team team(std::move(comms), job.first_rank() + thread, options.job.pace);
    const bool leads = job.leads() && thread == 0;
    Progress progress(leads);
    MoeBench bench(options, routing, expert_rank, team, leads ? &progress : nullptr);
    std::vector<MoeResult> mine = bench.run();
    if (thread == 0) results = std::move(mine);
  });
  uint64_t wrong = 0;
  for (const MoeResult& r : results) wrong += r.n_wrong;
  const int written = job.leads() ? report(options, description, results) : 0;
  return wrong == 0 ? written : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::dispatch_combine_main(argc, argv); }
