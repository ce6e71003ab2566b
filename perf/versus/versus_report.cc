// SPDX-License-Identifier: Apache-2.0
// The command line and the output of the comparisons.
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "perf/common/shared_options.h"
#include "perf/common/text.h"
#include "perf/versus/versus.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

constexpr VersusOp kAll[] = {VersusOp::kAllReduce, VersusOp::kReduceScatter, VersusOp::kAllGather, VersusOp::kAllToAll,
                             VersusOp::kAllToAllv};

std::string op_names() {
  std::string names;
  for (const VersusOp op : kAll) names += std::string(names.empty() ? "" : ",") + op_name(op);
  return names;
}

// Returns the geometric mean of the ratios, or NaN, which JSON has as null, when there are none.
double geometric_mean(const std::vector<VersusPoint>& points, const VersusOp* op) {
  double sum = 0;
  int n = 0;
  for (const VersusPoint& p : points)
    if (op == nullptr || p.op == *op) {
      sum += std::log(p.ratio());
      n++;
    }
  return n == 0 ? std::nan("") : std::exp(sum / n);
}
std::string mean_text(double mean) {
  char text[32] = "-";
  if (!std::isnan(mean)) std::snprintf(text, sizeof text, "%.2fx", mean);
  return text;
}

const VersusPoint& worst_point(const std::vector<VersusPoint>& points) {
  const VersusPoint* worst = &points[0];
  for (const VersusPoint& p : points)
    if (p.ratio() < worst->ratio()) worst = &p;
  return *worst;
}

Json point_json(const VersusPoint& p) {
  return {{"op", op_name(p.op)},    {"size", p.bytes},          {"count", p.count},
          {"rival_us", p.rival_us}, {"moeccl_us", p.moeccl_us}, {"ratio", p.ratio()}};
}

std::string versus_json(const VersusOptions& options, const Rival& rival, const std::vector<VersusPoint>& points) {
  Json j;
  j["rival"] = rival.name();
  j["ranks"] = rival.n_ranks();
  j["memory"] = memory_name(options.memory);
  j["rival_memory"] = options.memory == Memory::kHeap && options.rival_on_heap ? "heap" : "malloc";
  j["results"] = Json::array();
  for (const VersusPoint& p : points) j["results"].push_back(point_json(p));
  for (const VersusOp& op : options.ops) j["geomean"][op_name(op)] = geometric_mean(points, &op);
  j["geomean"]["all"] = geometric_mean(points, nullptr);
  if (!points.empty()) j["worst"] = point_json(worst_point(points));
  return j.dump(1) + "\n";
}

}  // namespace

VersusOptions parse_versus_options(int argc, char** argv, const char* program, bool forks) {
  VersusOptions o;
  std::vector<std::string> ops;
  App app("Times MoECCL beside another library, in turns", program);
  add_size(app, "-b,--minbytes", o.min_bytes, "smallest nccl-tests size (8)");
  add_size(app, "-e,--maxbytes", o.max_bytes, "largest size (64M)");
  app.add_option("-f,--stepfactor", o.step_factor, "from size to size")
      ->check(range(2, 1 << 20))
      ->capture_default_str();
  app.add_option("--ops", ops, "comma list of " + op_names())->delimiter(',')->check([](const std::string& name) {
    const bool known = std::any_of(std::begin(kAll), std::end(kAll), [&](VersusOp op) { return name == op_name(op); });
    return known ? "" : "\"" + name + "\" is not one of " + op_names();
  });
  add_one_of<Memory>(&app, "--mem", o.memory, {{"malloc", Memory::kMalloc}, {"heap", Memory::kHeap}},
                     "where buffers come from (default: malloc; heap is moecclMemAlloc)");
  app.add_flag("--rival-heap", o.rival_on_heap,
               "with --mem heap: the other library uses the same buffers, not malloc's");
  add_one_of<Split>(&app, "--split", o.split,
                    {{"distance", Split::kDistance}, {"uniform", Split::kUniform}, {"zipf", Split::kZipf}},
                    "alltoallv's blocks (default: distance, as nccl-tests)");
  app.add_option("--repetitions", o.repetitions, "turns of each library")->check(positive())->capture_default_str();
  add_output(app, "-J,--output_file", o.output_file, "write results as JSON");
  app.add_flag("--quick", o.quick, "3 short turns");
  if (!forks)
    app.add_flag("--tuned", o.tuned, "Open MPI with the shared-memory settings of its experts (see compare_mpi.cc)");
  if (forks) app.add_option("--procs", o.procs, "ranks to fork (4)")->check(whole_number(2));
  parse_or_exit(app, argc, argv);
  if (o.quick) {
    o.repetitions = 3;
    o.turn_us = 5000;
  }
  if (!ops.empty()) o.ops.clear();
  for (const std::string& name : ops)
    for (const VersusOp op : kAll)
      if (name == op_name(op)) o.ops.push_back(op);
  if (o.ops.empty() || o.min_bytes == 0 || o.min_bytes > o.max_bytes) {
    std::fprintf(stderr, "--ops takes %s; sizes are 1 byte at least, -b at most -e\n", op_names().c_str());
    std::exit(1);
  }
  return o;
}

namespace {

void print_table(const VersusOptions& options, const Rival& rival, const std::vector<VersusPoint>& points) {
  if (points.empty()) {
    std::printf("# nothing was measured: at these sizes no rank's block has 16 bytes\n");
    return;
  }
  const bool heap = options.memory == Memory::kHeap;
  std::printf("# MoECCL and %s, %d ranks, buffers from %s%s: medians of %d turns, slowest rank\n", rival.name(),
              rival.n_ranks(), heap ? "moecclMemAlloc" : "malloc",
              !heap                   ? ""
              : options.rival_on_heap ? " for both"
                                      : ", the other's from malloc",
              options.repetitions);
  std::printf("# %-14s  %12s  %12s  %12s  %12s\n", "operation", "size(B)", rival.name(), "MoECCL(us)", "ratio");
  for (const VersusPoint& p : points)
    std::printf("  %-14s  %12zu  %12.2f  %12.2f  %11.2fx\n", op_name(p.op), p.bytes, p.rival_us, p.moeccl_us,
                p.ratio());
  for (const VersusOp& op : options.ops)
    std::printf("# geometric mean %-14s  %s\n", op_name(op), mean_text(geometric_mean(points, &op)).c_str());
  const VersusPoint& worst = worst_point(points);
  std::printf("# geometric mean of all: %.2fx; worst: %s of %zu bytes, %.2fx\n", geometric_mean(points, nullptr),
              op_name(worst.op), worst.bytes, worst.ratio());
}

}  // namespace

int report_versus(const VersusOptions& options, const Rival& rival, const std::vector<VersusPoint>& points) {
  if (rival.rank() != 0) return 0;
  print_table(options, rival, points);
  write_or_fail({{options.output_file, versus_json(options, rival, points)}});
  return 0;
}

}  // namespace perf
