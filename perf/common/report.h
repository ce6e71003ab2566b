// SPDX-License-Identifier: Apache-2.0
// The output of a *_perf binary: nccl-tests' table, its JSON (version 3) and a plot. Processes that do not lead have a
// report too, for the exit status, but it prints nothing.
#ifndef PERF_COMMON_REPORT_H_
#define PERF_COMMON_REPORT_H_

#include <mutex>
#include <string>
#include <vector>

#include "perf/common/collective.h"
#include "perf/common/record.h"

namespace perf {

class Report {
 public:
  Report(const Options& options, const Collective& collective, std::vector<std::string> arguments, bool leads);

  void header(std::vector<Device> devices);
  // Prints the part of a line that is known before it is measured, so that a reader sees what runs.
  void start(const Line& line);
  // Completes the line. placements[0] is out of place, [1] in place.
  void finish(const Line& line);
  // Prints a text for a person, each line after a '#'.
  void remark(const std::string& text);
  // Prints the footer and writes the files. Returns 0, or 1 when a value was wrong, the bandwidth is below
  // NCCL_TESTS_MIN_BW or a file cannot be written.
  int footer();
  // Writes the results so far, because a rank of this process failed.
  void failed(const std::string& sentence);

 private:
  void print_settings() const;
  void print_columns() const;
  void print_start(const Line& line) const;
  bool write_files();

  const Options& options_;
  const Collective& collective_;
  bool leads_;
  std::string json_file_;  // empty: none
  Record record_;
  std::mutex writing_;  // failed() may come from another thread
};

}  // namespace perf

#endif  // PERF_COMMON_REPORT_H_
