// SPDX-License-Identifier: Apache-2.0
// Everything that one run of a *_perf binary measured, as plain data, and its JSON.
#ifndef PERF_COMMON_RECORD_H_
#define PERF_COMMON_RECORD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "perf/common/options.h"

namespace perf {

// One placement (out of place or in place) of one line.
struct Measured {
  double time_us = 0, alg_bw = 0, bus_bw = 0;  // us, GB/s
  std::optional<uint64_t> n_wrong;             // none: not checked
  std::vector<double> iteration_us;            // of the slowest rank; empty without -I
  // [processes]: the same of each process's slowest rank; empty with one process.
  std::vector<std::vector<double>> process_us;
};

struct Line {
  size_t bytes = 0, count = 0;
  std::string type, op;
  int root = -1;
  std::optional<Measured> placements[2];  // out of place, in place; none: the operation has no such form
};

// The data about itself that each rank sends to rank 0, as bytes.
struct Device {
  int32_t rank = 0, group = 0, pid = 0, thread = 0;
  char host[64] = {};
  char processor[128] = {};
};
Device this_device(int rank, int thread);

struct Record {
  std::vector<std::string> arguments;
  std::string start_time;
  std::vector<Device> devices;
  std::vector<Line> lines;
  uint64_t n_wrong = 0;
  double bus_bw_sum = 0;
  size_t n_bus_bw = 0;
  double required_bus_bw = -1;  // NCCL_TESTS_MIN_BW; negative: none
  std::vector<std::string> errors;

  double bus_bw() const { return n_bus_bw == 0 ? 0 : bus_bw_sum / static_cast<double>(n_bus_bw); }
  // nccl-tests tolerates a tenth less.
  bool fast_enough() const { return bus_bw() >= required_bus_bw * 0.9; }
};

// "2026-11-21 05:01:07"
std::string time_of_day();

// Returns nccl-tests' JSON, version 3. It holds only those environment variables that bear on the run, because a result
// file may be published.
std::string record_json(const Record& record, const Options& options);

// Draws time and bus bandwidth over size.
std::string record_plot(const Record& record, const std::string& program, const std::string& note);

}  // namespace perf

#endif  // PERF_COMMON_RECORD_H_
