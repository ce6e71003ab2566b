// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/moe_report.h"

#include <moeccl/version.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "perf/common/record.h"
#include "perf/common/stats.h"
#include "perf/common/svg.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

const MoeResult* find_flat(const std::vector<MoeResult>& results) {
  for (const MoeResult& r : results)
    if (r.algorithm == "flat") return &r;
  return nullptr;
}

std::string megabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", bytes / 1e6);
  return text;
}

uint64_t whole(double sum) { return static_cast<uint64_t>(sum); }

Json percentiles(const std::vector<double>& samples) {
  const Stats s = summarize(samples);
  return {{"p50", s.p50}, {"p95", s.p95}, {"p99", s.p99}, {"min", s.min}};
}

Json result_json(const MoeResult& r) {
  Json j;
  j["algo"] = r.algorithm;
  j["plan"] = r.plan;
  j["emulated"] = r.emulated;
  j["nwrong"] = r.n_wrong;
  j["time_us"] = percentiles(r.total_us());
  j["dispatch_us"] = percentiles(r.dispatch_us);
  j["combine_us"] = percentiles(r.combine_us);
  if (!r.dispatch_backward_us.empty()) {
    j["dispatch_backward_us"] = percentiles(r.dispatch_backward_us);
    j["combine_backward_us"] = percentiles(r.combine_backward_us);
  }
  j["predicted_us"] = r.predicted_us > 0 ? Json(r.predicted_us) : Json();
  j["logical_bytes"] = whole(r.logical_bytes);
  j["levels"] = Json::array();
  for (const LevelTotal& level : r.levels)
    j["levels"].push_back({{"name", level.name},
                           {"rows", whole(level.rows)},
                           {"bytes", whole(level.bytes)},
                           {"metadata_bytes", whole(level.metadata_bytes)}});
  return j;
}

void print_levels(const std::vector<MoeResult>& results) {
  std::printf(
      "#\n# Sent across each level in one dispatch, all ranks (MB = 10^6 bytes); logical: tokens x top-k x row\n");
  std::printf("# %-10s  %12s  %-12s  %10s  %12s  %14s\n", "algo", "logical(MB)", "level", "rows", "payload(MB)",
              "metadata(MB)");
  for (const MoeResult& r : results)
    for (size_t l = 0; l < r.levels.size(); l++) {
      const LevelTotal& level = r.levels[l];
      std::printf("  %-10s  %12s  %-12s  %10.0f  %12s  %14s\n", l == 0 ? r.algorithm.c_str() : "",
                  l == 0 ? megabytes(r.logical_bytes).c_str() : "", level.name.c_str(), level.rows,
                  megabytes(level.bytes).c_str(), megabytes(level.metadata_bytes).c_str());
    }
}

void print_backward(const std::vector<MoeResult>& results) {
  std::printf("#\n# Backward, slowest rank (us)\n# %-10s  %14s  %14s\n", "algo", "combine p50", "dispatch p50");
  for (const MoeResult& r : results)
    std::printf("  %-10s  %14.1f  %14.1f\n", r.algorithm.c_str(), median(r.combine_backward_us),
                median(r.dispatch_backward_us));
}

}  // namespace

void print_moe_table(const MoeOptions& options, const std::string& description, const std::vector<MoeResult>& results) {
  std::printf("# dispatch_combine_perf: %s\n", description.c_str());
  if (!options.job.topology.empty()) std::printf("# topology: %s\n", options.job.topology.c_str());
  if (std::any_of(results.begin(), results.end(), [](const MoeResult& r) { return r.emulated; }))
    std::printf("# EMULATED: links are slowed to the topology's figures; times are not this machine's\n");
  for (const MoeResult& r : results) {
    std::istringstream lines(r.explanation);
    for (std::string line; std::getline(lines, line);) std::printf("# %s\n", line.c_str());
  }
  const MoeResult* flat = find_flat(results);
  std::printf("#\n# Times of the slowest rank over %d iterations (us); total: dispatch + combine\n", options.iters);
  std::printf("# %-10s  %-12s  %8s  %12s  %12s  %12s  %12s  %12s  %8s\n", "algo", "plan", "#wrong", "dispatch p50",
              "combine p50", "total p50", "total p99", "predicted", "speed-up");
  for (const MoeResult& r : results) {
    const Stats total = summarize(r.total_us());
    char predicted[32] = "-", faster[32] = "-";
    if (r.predicted_us > 0) std::snprintf(predicted, sizeof predicted, "%.1f", r.predicted_us);
    if (flat != nullptr) std::snprintf(faster, sizeof faster, "%.2fx", median(flat->total_us()) / total.p50);
    std::printf("  %-10s  %-12s  %8llu  %12.1f  %12.1f  %12.1f  %12.1f  %12s  %8s%s\n", r.algorithm.c_str(),
                r.plan.c_str(), static_cast<unsigned long long>(r.n_wrong), median(r.dispatch_us), median(r.combine_us),
                total.p50, total.p99, predicted, faster, r.emulated ? "  EMULATED" : "");
  }
  for (const MoeResult& r : results)
    if (r.steps_to_settle > 0)
      std::printf("#\n# auto ran %d steps with moecclRoutingUpdate before its warm-up, in which it tried plans\n",
                  r.steps_to_settle);
  if (options.backward) print_backward(results);
  print_levels(results);
}

std::string moe_json(const MoeOptions& options, const std::vector<RankRouting>& routing,
                     const std::vector<MoeResult>& results) {
  Json j;
  j["version"] = 1;
  j["moeccl_version"] = MOECCL_VERSION;
  j["time"] = time_of_day();
  j["description"] = describe(options, routing);
  j["config"] = {{"ranks", routing.size()},
                 {"tokens", most_tokens(routing)},
                 {"hidden", options.hidden},
                 {"dtype", data_type(options.type).name()},
                 {"topk", options.top_k},
                 {"experts", options.n_experts},
                 {"layout", options.layout == moecclLayoutRows ? "rows" : "expert"},
                 {"routing", options.routing},
                 {"align", options.align_rows},
                 {"capacity", options.capacity},
                 {"mem", memory_name(options.job.memory)},
                 {"backward", options.backward},
                 {"update", options.update},
                 {"seed", options.seed},
                 {"topology", options.job.topology},
                 {"paced", options.job.pace},
                 {"iters", options.iters},
                 {"model", options.model}};
  j["results"] = Json::array();
  for (const MoeResult& r : results) j["results"].push_back(result_json(r));
  return j.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string moe_plot(const std::string& description, const std::vector<MoeResult>& results) {
  const bool predicted =
      std::any_of(results.begin(), results.end(), [](const MoeResult& r) { return r.predicted_us > 0; });
  BarChart time = {.title = "Time, median of the slowest rank",
                   .y_label = "ms",
                   .categories = {},
                   .series = {"dispatch", "combine"},
                   .values = {{}, {}}};
  if (predicted) {
    time.series.insert(time.series.end(), {"total", "predicted total"});
    time.values.resize(4);
  }
  BarChart bytes = {.title = "Payload sent in one dispatch, all ranks",
                    .y_label = "MB",
                    .categories = {},
                    .series = {"logical"},
                    .values = {{}}};
  for (const MoeResult& r : results) {
    const std::string name = r.algorithm == r.plan ? r.algorithm : r.algorithm + " (" + r.plan + ")";
    time.categories.push_back(name);
    bytes.categories.push_back(name);
    time.values[0].push_back(median(r.dispatch_us) / 1e3);
    time.values[1].push_back(median(r.combine_us) / 1e3);
    if (predicted) {
      time.values[2].push_back(median(r.total_us()) / 1e3);
      time.values[3].push_back(r.predicted_us / 1e3);
    }
    for (const LevelTotal& level : r.levels)
      if (std::find(bytes.series.begin(), bytes.series.end(), level.name) == bytes.series.end())
        bytes.series.push_back(level.name);
  }
  bytes.values.assign(bytes.series.size(), std::vector<double>(results.size()));
  for (size_t c = 0; c < results.size(); c++) {
    bytes.values[0][c] = results[c].logical_bytes / 1e6;
    for (const LevelTotal& level : results[c].levels) {
      const auto at = std::find(bytes.series.begin(), bytes.series.end(), level.name) - bytes.series.begin();
      bytes.values[static_cast<size_t>(at)][c] += level.bytes / 1e6;
    }
  }
  const bool emulated = std::any_of(results.begin(), results.end(), [](const MoeResult& r) { return r.emulated; });
  return svg_page("MoE dispatch and combine", (emulated ? "EMULATED links. " : "") + description, {}, {time, bytes});
}

}  // namespace perf
