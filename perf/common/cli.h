// SPDX-License-Identifier: Apache-2.0
// The command-line options that all perf programs share. Includes CLI11, so include it only in files that parse
// options.
#ifndef PERF_COMMON_CLI_H_
#define PERF_COMMON_CLI_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "perf/common/job.h"
#include "perf/common/one_of.h"

namespace perf {

// Accepts whole numbers from `least` to `most`. CLI11's own checks name 1.8e308 in full as the largest number.
std::function<std::string(const std::string&)> whole_number(int64_t least, int64_t most = INT32_MAX);
// As with getopt, the last value of a repeated option counts.
class App : public CLI::App {
 public:
  explicit App(const std::string& description, const std::string& name = "") : CLI::App(description, name) {
    option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
};

// Adds an option for a file that rank 0 writes at the end. Refuses one that cannot be written, because a long run must
// not end with that.
void add_output(CLI::App& app, const std::string& names, std::string& path, const std::string& help);
// Adds an option whose value is a size such as 64M.
void add_size(CLI::App& app, const std::string& names, size_t& bytes, const std::string& help);
// Adds the options for the number of ranks, where they run and how they are configured. `memories`: what --mem offers.
enum class Memories { kNone, kOfHost, kAll };
void add_job_options(CLI::App& app, JobOptions& job, Memories memories);
// Refuses a smallest size above the largest one, with which nothing would be measured.
void check_sizes(size_t least, size_t most);
// Parses the command line. Exits after --help and, with a sentence, when an option is wrong. From then on, sizes that
// memory cannot hold end the program with a sentence.
void parse_or_exit(CLI::App& app, int argc, char** argv);

}  // namespace perf

#endif  // PERF_COMMON_CLI_H_
