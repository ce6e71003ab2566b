// SPDX-License-Identifier: Apache-2.0
#include "perf/common/report.h"

#include <fcntl.h>
#include <moeccl/version.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/stats.h"
#include "perf/common/text.h"

namespace perf {
namespace {

// Prints a number in `width` columns with as many decimals as fit.
std::string fit(double value, int width) {
  char text[64];
  for (int decimals = 2; decimals >= 0; decimals--)
    if (std::snprintf(text, sizeof text, "%*.*f", width, decimals, value) <= width) return text;
  std::snprintf(text, sizeof text, "%*.*e", width, width >= 7 ? 1 : 0, value);
  return text;
}

bool is_device(const std::string& path) {
  struct stat found = {};
  return stat(path.c_str(), &found) == 0 && !S_ISREG(found.st_mode);
}

// Creates the file, or PATH.0, PATH.1 and so on if there is one: nccl-tests never overwrites a result.
std::string new_file(const std::string& path) {
  std::string name = path;
  for (int n = 0; !is_device(name); name = path + "." + std::to_string(n++)) {
    const int file = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0 && errno == EEXIST) continue;
    if (file < 0) fail("cannot write " + name + ": " + std::strerror(errno));
    close(file);
    break;
  }
  return name;
}

std::string placement_text(const std::optional<Measured>& m, const Options& o) {
  if (!m) return std::string("      N/A     N/A     N/A     N/A") + (o.per_iter_timing ? std::string(36, ' ') : "");
  char wrong[16] = "   N/A";
  if (m->n_wrong) std::snprintf(wrong, sizeof wrong, "%6g", static_cast<double>(*m->n_wrong));
  std::string text = "  " + fit(m->time_us, 7) + "  " + fit(m->alg_bw, 6) + "  " + fit(m->bus_bw, 6) + "  " + wrong;
  if (!o.per_iter_timing) return text;
  const Stats s = summarize({m->iteration_us.begin() + o.per_iter_skip, m->iteration_us.end()});
  return text + "  " + fit(s.min, 7) + "  " + fit(s.max, 7) + "  " + fit(s.p99, 7) + "  " +
         fit(s.mean > 0 ? s.stdev / s.mean * 100 : 0, 7);
}

}  // namespace

Report::Report(const Options& options, const Collective& collective, std::vector<std::string> arguments, bool leads)
    : options_(options), collective_(collective), leads_(leads) {
  record_.arguments = std::move(arguments);
  record_.start_time = time_of_day();
  const char* required = std::getenv("NCCL_TESTS_MIN_BW");
  if (required != nullptr) record_.required_bus_bw = std::atof(required);
  if (!leads_ || options_.output_file.empty()) return;
  json_file_ = new_file(options_.output_file);
  std::printf("# Writing JSON output to %s\n", json_file_.c_str());
}

void Report::print_settings() const {
  const Options& o = options_;
  int version = 0;
  (void)moecclGetVersion(&version);
  std::printf("# moeccl perf version %d.%d.%d moeccl-headers=%d moeccl-library=%d\n", MOECCL_VERSION_MAJOR,
              MOECCL_VERSION_MINOR, MOECCL_VERSION_PATCH, MOECCL_VERSION, version);
  std::printf("# Collective test starting: %s\n", collective_.program);
  std::printf(
      "# nThread %d nGpus %d minBytes %zu maxBytes %zu step: %zu(%s) warmup iters: %d iters: %d agg iters: %d "
      "validation: %d graph: %d unalign: %d\n",
      o.job.threads, o.job.per_thread, o.min_bytes, o.max_bytes,
      o.step_factor > 1 ? static_cast<size_t>(o.step_factor) : o.step_bytes, o.step_factor > 1 ? "factor" : "bytes",
      o.warmup_iters, o.iters, o.agg_iters, o.check, o.cuda_graph, o.unalign);
  const char* blocking[] = {nullptr, "wait and barrier after each inner iteration (-m)",
                            "wait after each inner iteration (-m), no barrier",
                            "wait and barrier after each outer iteration (-n); time excludes barrier"};
  if (o.blocking > 0) std::printf("# Blocking Enabled: %s\n", blocking[o.blocking]);
  if (o.job.parallel_init) std::printf("# Parallel Init Enabled: threads join their ranks concurrently\n");
  if (o.report_median) std::printf("# time: the median iteration of the slowest rank\n");
  if (o.job.pace)
    std::printf("# EMULATED: links are slowed to the figures of the topology '%s'\n", o.job.topology.c_str());
  for (const std::string& note : o.notes) std::printf("# note: %s\n", note.c_str());
}

void Report::header(std::vector<Device> devices) {
  if (!leads_) return;
  record_.devices = std::move(devices);
  print_settings();
  std::printf("#\n# Using devices\n");
  for (const Device& d : record_.devices)
    std::printf("#  Rank %2d Group %2d Pid %6d on %10s device %2d [host] %s\n", d.rank, d.group, d.pid, d.host,
                d.thread, d.processor);
  print_columns();
  std::fflush(stdout);
}

void Report::print_columns() const {
  const bool each = options_.per_iter_timing;
  const char* time = options_.cpu_time ? "cputime" : "time";
  const char* stamp[] = {options_.timestamps ? "  timestamp" : "", options_.timestamps ? "  %Y-%m-%d %H:%M:%S" : ""};
  const char* extra[] = {each ? "    i_min    i_max    i_p99    i_cv%" : "",
                         each ? "     (us)     (us)     (us)      (%)" : ""};
  std::printf("#\n# %10s  %12s  %8s  %6s  %6s           out-of-place%*s in-place          \n", "", "", "", "", "",
              each ? 58 : 22, "");
  std::printf("# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %6s%s  %7s  %6s  %6s  %6s%s%s\n", "size", "count", "type",
              "redop", "root", time, "algbw", "busbw", "#wrong", extra[0], time, "algbw", "busbw", "#wrong", extra[0],
              stamp[0]);
  std::printf("# %10s  %12s  %8s  %6s  %6s  %7s  %6s  %6s  %6s%s  %7s  %6s  %6s  %6s%s%s\n", "(B)", "(elements)", "",
              "", "", "(us)", "(GB/s)", "(GB/s)", "", extra[1], "(us)", "(GB/s)", "(GB/s)", "", extra[1], stamp[1]);
}

void Report::start(const Line& line) {
  // On a terminal, the progress line is here in the meantime.
  if (!leads_ || isatty(STDERR_FILENO) != 0) return;
  print_start(line);
  std::fflush(stdout);
}

void Report::print_start(const Line& line) const {
  std::printf("%12zu  %12zu  %8s  %6s  %6d", line.bytes, line.count, line.type.c_str(), line.op.c_str(), line.root);
}

void Report::finish(const Line& line) {
  if (leads_) {
    if (isatty(STDERR_FILENO) != 0) print_start(line);
    std::string text;
    for (const std::optional<Measured>& m : line.placements) text += placement_text(m, options_);
    if (options_.timestamps) text += "  " + time_of_day();
    std::printf("%s\n", text.c_str());
    std::fflush(stdout);
  }
  const std::lock_guard lock(writing_);
  for (const std::optional<Measured>& m : line.placements) {
    if (!m) continue;
    record_.n_wrong += m->n_wrong.value_or(0);
    record_.bus_bw_sum += m->bus_bw;
    record_.n_bus_bw++;
  }
  // The record of an endless run (-N 0) must not grow.
  if (leads_ && options_.run_cycles > 0) record_.lines.push_back(line);
}

void Report::remark(const std::string& text) {
  if (!leads_) return;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) std::printf("# %s\n", line.c_str());
}

bool Report::write_files() {
  bool written = true;
  const auto write = [&](const std::string& path, const std::string& text) {
    const std::string why = path.empty() ? "" : write_text(path, text);
    if (why.empty()) return;
    std::fprintf(stderr, "# error: %s\n", why.c_str());
    written = false;
  };
  write(json_file_, json_file_.empty() ? "" : record_json(record_, options_));
  const std::string note = options_.job.pace ? "EMULATED: paced links, " + options_.job.topology : record_.start_time;
  write(options_.plot_file, options_.plot_file.empty() ? "" : record_plot(record_, collective_.program, note));
  return written;
}

int Report::footer() {
  const bool right = record_.n_wrong == 0 && record_.fast_enough();
  if (!leads_) return right ? 0 : 1;
  const bool checked = record_.required_bus_bw >= 0;
  std::printf("# %-20s : %llu %s\n", "Out of bounds values", static_cast<unsigned long long>(record_.n_wrong),
              record_.n_wrong == 0 ? "OK" : "FAILED");
  std::printf("# %-20s : %g %s\n", "Avg bus bandwidth", record_.bus_bw(),
              !checked                ? ""
              : record_.fast_enough() ? "OK"
                                      : "FAILED");
  std::printf("#\n# Collective test concluded: %s\n", collective_.program);
  std::fflush(stdout);
  const std::lock_guard lock(writing_);
  const bool written = write_files();
  return right && written ? 0 : 1;
}

void Report::failed(const std::string& sentence) {
  if (!leads_) return;
  const std::lock_guard lock(writing_);
  record_.errors.push_back(sentence);
  (void)write_files();
}

}  // namespace perf
