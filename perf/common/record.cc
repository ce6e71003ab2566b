// SPDX-License-Identifier: Apache-2.0
#include "perf/common/record.h"

#include <moeccl/version.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "perf/common/stats.h"
#include "perf/common/svg.h"
#include "perf/common/text.h"

extern char** environ;

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kJsonVersion = 3;
constexpr const char* kEnvironment[] = {"MOECCL_",    "NCCL_", "RANK=",  "WORLD_SIZE=", "LOCAL_RANK=",  "MASTER_",
                                        "OMPI_COMM_", "PMI_",  "SLURM_", "OMP_",        "CUDA_VISIBLE_"};

// nccl-tests writes truth values as words.
const char* word(bool value) { return value ? "true" : "false"; }

// Results are published, so a variable that may be a secret is only said to be set.
std::string without_secret(const char* variable) {
  const std::string text(variable), name = text.substr(0, text.find('='));
  for (const char* word : {"SECRET", "TOKEN", "PASSWORD", "KEY"})
    if (name.find(word) != std::string::npos) return name + "=(set)";
  return text;
}

Json environment() {
  Json list = Json::array();
  for (char** e = environ; *e != nullptr; e++)
    for (const char* prefix : kEnvironment)
      if (std::strncmp(*e, prefix, std::strlen(prefix)) == 0) list.push_back(without_secret(*e));
  return list;
}

Json config_json(const Record& record, const Options& o) {
  Json c;
  c["nthreads"] = o.job.threads;
  c["ngpus"] = o.job.per_thread;
  c["minimum_bytes"] = o.min_bytes;
  c["maximum_bytes"] = o.max_bytes;
  if (o.step_factor > 1)
    c["step_factor"] = o.step_factor;
  else
    c["step_bytes"] = o.step_bytes;
  c["warmup_iters"] = o.warmup_iters;
  c["iterations"] = o.iters;
  c["aggregated_iterations"] = o.agg_iters;
  c["validation"] = o.check;
  c["graph"] = o.cuda_graph;
  c["blocking_collectives"] = word(o.blocking != 0);
  c["per_iter_timing"] = word(o.per_iter_timing);
  c["per_iter_skip"] = o.per_iter_skip;
  c["parallel_init"] = word(o.job.parallel_init);
  c["ranks"] = record.devices.size();
  c["topology"] = o.job.topology;
  c["emulated"] = o.job.pace;
  c["deterministic"] = o.job.deterministic;
  c["memory"] = memory_name(o.job.memory);
  c["plan"] = o.plan.empty() ? "auto" : o.plan;
  for (const Device& d : record.devices)
    c["devices"].push_back({{"rank", d.rank},
                            {"group", d.group},
                            {"pid", d.pid},
                            {"hostname", d.host},
                            {"device", d.thread},
                            {"device_hex", "host"},
                            {"device_info", d.processor}});
  return c;
}

Json measured_json(const Measured& m, bool cpu_time) {
  Json j;
  j[cpu_time ? "cpu_time" : "time"] = m.time_us;
  j["alg_bw"] = m.alg_bw;
  j["bus_bw"] = m.bus_bw;
  j["nwrong"] = m.n_wrong ? Json(*m.n_wrong) : Json();
  return j;
}

Json iterations_json(const Measured& m, int skip) {
  const std::vector<double>& times = m.iteration_us;
  const Stats s = summarize({times.begin() + skip, times.end()});
  Json j;
  j["skipped_iterations"] = skip;
  j["min_us"] = s.min;
  j["max_us"] = s.max;
  j["avg_us"] = s.mean;
  j["p50_us"] = s.p50;
  j["p95_us"] = s.p95;
  j["p99_us"] = s.p99;
  j["stdev_us"] = s.stdev;
  j["cv_pct"] = s.mean > 0 ? s.stdev / s.mean * 100 : 0;
  j["times_us"] = times;
  if (!m.process_us.empty()) j["per_process_max_times_us"] = m.process_us;
  return j;
}

Json line_json(const Line& line, const Options& o) {
  char root[16];
  std::snprintf(root, sizeof root, "%6i", line.root);  // nccl-tests pads it
  Json j;
  j["size"] = line.bytes;
  j["count"] = line.count;
  j["type"] = line.type;
  j["redop"] = line.op;
  j["root"] = root;
  const char* names[] = {"out_of_place", "in_place"};
  for (size_t i = 0; i < 2; i++) {
    const std::optional<Measured>& m = line.placements[i];
    j[names[i]] = m ? measured_json(*m, o.cpu_time) : Json();
    if (m && o.per_iter_timing) j[std::string(names[i]) + "_per_iter"] = iterations_json(*m, o.per_iter_skip);
  }
  j["actual_iterations"] = o.iters;
  j["experiment_name"] = "";
  return j;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
  utsname system = {};
  return uname(&system) == 0 ? system.machine : "unknown processor";
}

}  // namespace

std::string time_of_day() {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

Device this_device(int rank, int thread) {
  Device d;
  d.rank = rank;
  d.pid = getpid();
  d.thread = thread;
  gethostname(d.host, sizeof d.host - 1);
  std::snprintf(d.processor, sizeof d.processor, "%s", processor_name().c_str());
  return d;
}

std::string record_json(const Record& record, const Options& options) {
  Json j;
  j["version"] = kJsonVersion;
  j["start_time"] = record.start_time;
  j["args"] = record.arguments;
  j["env"] = environment();
  j["nccl_version"] = MOECCL_VERSION;
  j["config"] = config_json(record, options);
  j["results"] = Json::array();
  for (const Line& line : record.lines) j["results"].push_back(line_json(line, options));
  j["out_of_bounds"] = {{"count", record.n_wrong}, {"okay", word(record.n_wrong == 0)}};
  j["average_bus_bandwidth"] = {{"bandwidth", record.bus_bw()},
                                {"okay", record.required_bus_bw < 0 ? "unchecked" : word(record.fast_enough())}};
  j["errors"] = record.errors;
  j["end_time"] = time_of_day();
  return j.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string record_plot(const Record& record, const std::string& program, const std::string& note) {
  struct Samples {
    std::vector<double> time_us, bus_bw;
  };
  std::vector<std::pair<std::string, std::map<double, Samples>>> all;  // of each series, by size
  const char* names[] = {"out of place", "in place"};
  for (const Line& line : record.lines)
    for (size_t i = 0; i < 2; i++) {
      if (!line.placements[i]) continue;
      std::string name = line.type + (line.op == "none" ? "" : " " + line.op);
      if (line.root >= 0) name += " root " + std::to_string(line.root);
      name += std::string(", ") + names[i];
      auto at = std::find_if(all.begin(), all.end(), [&](const auto& known) { return known.first == name; });
      if (at == all.end()) at = all.insert(all.end(), {name, {}});
      Samples& samples = at->second[static_cast<double>(line.bytes)];
      samples.time_us.push_back(line.placements[i]->time_us);
      samples.bus_bw.push_back(line.placements[i]->bus_bw);
    }
  LineChart time = {.title = "Time", .x_label = "size (bytes)", .y_label = "time (us)", .series = {}};
  LineChart bandwidth = {.title = "Bus bandwidth", .x_label = "size (bytes)", .y_label = "busbw (GB/s)", .series = {}};
  // A size that several cycles measured (-N) has their median.
  for (const auto& [name, sizes] : all) {
    Series& us = time.series.emplace_back(Series{name, {}, {}});
    Series& rate = bandwidth.series.emplace_back(Series{name, {}, {}});
    for (const auto& [size, samples] : sizes) {
      us.x.push_back(size), us.y.push_back(median(samples.time_us));
      rate.x.push_back(size), rate.y.push_back(median(samples.bus_bw));
    }
  }
  return svg_page(program + ", " + counted(record.devices.size(), "rank"), note, {time, bandwidth}, {});
}

}  // namespace perf
