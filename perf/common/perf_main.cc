// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "perf/common/bench.h"
#include "perf/common/fail.h"
#include "perf/common/report.h"
#include "perf/common/text.h"

namespace perf {
namespace {

std::vector<size_t> sizes(const Options& o, const Collective& collective) {
  if (collective.fixed_size != nullptr && collective.fixed_size()) return {o.max_bytes};
  std::vector<size_t> list;
  for (size_t size = o.min_bytes; size <= o.max_bytes;) {
    list.push_back(size);
    const size_t next = o.step_factor > 1 ? size * static_cast<size_t>(o.step_factor) : size + o.step_bytes;
    if (next <= size) break;  // -b 0 with -f, or no step
    size = next;
  }
  return list;
}

// Returns the most bytes that any size, in any type, needs in one buffer.
size_t buffer_bytes(const Options& o, const Collective& collective, int n_ranks) {
  size_t bytes = o.max_bytes;
  if (collective.fixed_size == nullptr || !collective.fixed_size()) return bytes;
  const Shape s = collective.shape(o.max_bytes, 1, n_ranks);
  return std::max({bytes, s.send, s.recv});
}

std::string explain(const Collective& collective, const Team& team, const Case& c, size_t count) {
  return explained([&](char* text, size_t bytes, size_t* needed) {
    check(moecclPlanExplain(team.comm(0), collective.op, count, c.type, text, bytes, needed), "moecclPlanExplain",
          team.rank(0), team.comm(0));
  });
}

std::vector<Device> gather_devices(const Options& o, const Team& team, int thread) {
  std::vector<char> mine(team.size() * sizeof(Device));
  for (size_t i = 0; i < team.size(); i++) {
    Device device = this_device(team.job_rank(i), thread);
    device.group = o.job.grouping.color(device.rank);
    std::memcpy(mine.data() + i * sizeof device, &device, sizeof device);
  }
  const std::vector<char> all = team.gather(mine, sizeof(Device));
  std::vector<Device> devices(static_cast<size_t>(team.n_job_ranks()));
  std::memcpy(devices.data(), all.data(), all.size());
  return devices;
}

// Runs one type, operator and root over all sizes.
void run_sizes(const Options& o, const Collective& collective, const Team& team, Case c, Bench& bench, Report* report) {
  const std::vector<size_t> list = sizes(o, collective);
  for (const size_t size : list) {
    c.size = size;
    bench.warm_up(c);
  }
  for (int cycle = 0; o.run_cycles <= 0 || cycle < o.run_cycles; cycle++)
    for (const size_t size : list) {
      c.size = size;
      Line line = bench.describe(c);
      if (report != nullptr && o.explain) report->remark(explain(collective, team, c, line.count));
      if (report != nullptr) report->start(line);
      line.placements[0] = bench.measure(c, false);
      if (collective.in_place != InPlace::kNone) line.placements[1] = bench.measure(c, true);
      if (report != nullptr) report->finish(line);
    }
}

void report_memory(const Team& team, Report* report) {
  std::vector<uint64_t> bytes;
  for (size_t i = 0; i < team.size(); i++) {
    size_t held = 0;
    check(moecclCommMemoryUsage(team.comm(i), &held), "moecclCommMemoryUsage", team.rank(i), team.comm(i));
    bytes.push_back(held);
  }
  const uint64_t all = team.sum(bytes);
  if (report != nullptr)
    report->remark("Communicator memory  : " + std::to_string(bytes[0]) + " bytes on rank 0, " + std::to_string(all) +
                   " on all ranks");
}

// Runs the part of one thread. Only thread 0 has a report.
void run_thread(const Options& o, const Collective& collective, const Team& team, int thread, Report* report) {
  std::vector<Device> devices = gather_devices(o, team, thread);
  const bool leads = team.job_rank(0) == 0;
  if (report != nullptr) report->header(std::move(devices));
  if (!o.plan.empty())
    for (size_t i = 0; i < team.size(); i++)
      check(moecclPlanForce(team.comm(i), collective.op, o.plan.c_str()), "moecclPlanForce", team.rank(i),
            team.comm(i));

  Progress progress(leads);
  Bench bench(o, collective, team, buffer_bytes(o, collective, team.n_ranks()), leads ? &progress : nullptr);
  const std::vector<RedOp> ops = collective.reduces ? o.ops : std::vector<RedOp>{RedOp::kSum};
  std::vector<int> roots = {collective.rooted ? o.root : 0};
  if (collective.rooted && o.root < 0) {
    roots.clear();
    for (int r = 0; r < team.n_ranks(); r++) roots.push_back(r);
  }
  for (const moecclDataType_t type : o.types)
    for (const RedOp op : ops)
      for (const int root : roots) run_sizes(o, collective, team, {type, op, root, 0}, bench, report);
  if (o.memory_report) report_memory(team, report);
}

}  // namespace

int perf_main(int argc, char** argv, const Collective& collective) {
  Options options = parse_options(argc, argv, collective.program, collective.op == moecclOpAllToAllv);
  Job job(options.job);
  const int n_ranks = group_size(options.job.grouping, job.n_ranks());
  if (collective.prepare != nullptr) collective.prepare(options, n_ranks);
  if (collective.rooted && options.root >= n_ranks)
    fail("root " + std::to_string(options.root) + " of " + counted(static_cast<size_t>(n_ranks), "rank"));
  if (options.job.grouping.op != 0)
    options.notes.push_back("NCCL_TESTS_SPLIT " + options.job.grouping.text + ": groups of " +
                            counted(static_cast<size_t>(n_ranks), "rank") +
                            " run side by side; sizes and bandwidths are those of one group");
  Report report(options, collective, {argv, argv + argc}, job.leads());
  on_failure([&report](const std::string& sentence) { report.failed(sentence); });
  const bool apart = options.job.pace || !options.plan.empty();
  job.run(apart, [&](int thread, const Team& team) {
    run_thread(options, collective, team, thread, thread == 0 ? &report : nullptr);
  });
  return report.footer();
}

}  // namespace perf
