// SPDX-License-Identifier: Apache-2.0
// The command-line options that all perf programs share.
#ifndef PERF_COMMON_SHARED_OPTIONS_H_
#define PERF_COMMON_SHARED_OPTIONS_H_

#include <cstddef>
#include <string>

#include "perf/common/cli.h"
#include "perf/common/job.h"

namespace perf {

// Adds an option for a file that rank 0 writes at the end. Refuses one that cannot be written, because a long run must
// not end with that.
void add_output(App& app, const std::string& names, std::string& path, const std::string& help);
// Adds an option whose value is a size such as 64M.
void add_size(App& app, const std::string& names, size_t& bytes, const std::string& help);
// Adds the options for the number of ranks, where they run and how they are configured. `memories`: what --mem offers.
enum class Memories { kNone, kOfHost, kAll };
void add_job_options(App& app, JobOptions& job, Memories memories);
// Refuses a smallest size above the largest one, with which nothing would be measured.
void check_sizes(size_t least, size_t most);
// Parses the command line. Exits after --help and, with a sentence, when an option is wrong. From then on, sizes that
// memory cannot hold end the program with a sentence.
void parse_or_exit(App& app, int argc, char** argv);

}  // namespace perf

#endif  // PERF_COMMON_SHARED_OPTIONS_H_
