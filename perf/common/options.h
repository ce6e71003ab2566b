// SPDX-License-Identifier: Apache-2.0
// The command line of the nccl-tests-compatible binaries: nccl-tests' options, meanings and defaults, and MoECCL's own.
#ifndef PERF_COMMON_OPTIONS_H_
#define PERF_COMMON_OPTIONS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "perf/common/data_types.h"
#include "perf/common/job.h"

namespace perf {

enum class Average { kRank0 = 0, kAverage = 1, kMin = 2, kMax = 3 };

struct Options {
  JobOptions job;

  size_t min_bytes = size_t{32} << 20, max_bytes = size_t{32} << 20, step_bytes = size_t{1} << 20;
  int step_factor = 1;
  int iters = 20, agg_iters = 1, warmup_iters = 1, run_cycles = 1;
  int check = 1;
  std::vector<RedOp> ops = {RedOp::kSum};
  std::vector<moecclDataType_t> types = {moecclFloat32};
  int root = 0;      // -1: every rank in turn
  int blocking = 0;  // -z
  Average average = Average::kAverage;
  bool cpu_time = false, timestamps = false, memory_report = false;
  int local_register = 0;
  int cuda_graph = 0;  // -G: replays of a graph of all iterations; 0: none
  int unalign = 0;
  bool per_iter_timing = false;
  int per_iter_skip = 0;
  std::string output_file;

  // Options that nccl-tests does not have.
  bool on_stream = false;      // issue to a moecclStream_t rather than block in each call
  bool report_median = false;  // the time column is the median of the slowest rank rather than the mean
  std::string matrix_file;     // alltoallv
  std::string plan;            // moecclPlanForce
  std::string plot_file;
  bool explain = false;
  std::vector<std::string> notes;  // options that are accepted and have no effect here

  // True if each iteration has to be timed.
  bool samples() const { return per_iter_timing || report_median; }
};

// Parses the command line. Exits with 0 after --help, and with 1 and a sentence on stderr when an option is wrong.
Options parse_options(int argc, char** argv, const char* program, bool takes_matrix);

}  // namespace perf

#endif  // PERF_COMMON_OPTIONS_H_
