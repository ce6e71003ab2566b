// SPDX-License-Identifier: Apache-2.0
// What all perf programs share on the command line. Includes CLI11: only files that parse options include this.
#ifndef PERF_COMMON_CLI_H_
#define PERF_COMMON_CLI_H_

#include <CLI/CLI.hpp>
#include <string>

#include "perf/common/job.h"

namespace perf {

// A size such as 64M.
void add_size(CLI::App& app, const std::string& names, size_t& bytes, const std::string& help);
// How many ranks, where they run and how they are configured.
void add_job_options(CLI::App& app, JobOptions& job);
// Exits after --help and, with a sentence, when an option is wrong.
void parse_or_exit(CLI::App& app, int argc, char** argv);

}  // namespace perf

#endif  // PERF_COMMON_CLI_H_
