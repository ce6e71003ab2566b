// SPDX-License-Identifier: Apache-2.0
// What a *_perf binary prints and writes: nccl-tests' table, its JSON (version 3) and a plot. Processes that do not
// lead have one too, for the exit status; it is silent.
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
  // The part of a line that is known before it is measured, so that a reader sees what runs.
  void start(const Line& line);
  // Completes it. placements[0] is out of place, [1] in place.
  void finish(const Line& line);
  // A text for a person, each line behind '#'.
  void remark(const std::string& text);
  // Prints the footer and writes the files. 0, or 1 when a value was wrong, the bandwidth is below NCCL_TESTS_MIN_BW or
  // a file cannot be written.
  int footer();
  // A rank of this process failed: writes what there is.
  void failed(const std::string& sentence);

 private:
  void print_settings() const;
  void print_columns() const;
  void print_start(const Line& line) const;
  bool write_files();

  const Options& options_;
  const Collective& collective_;
  bool leads_;
  Record record_;
  std::mutex writing_;  // failed() may come from another thread
};

}  // namespace perf

#endif  // PERF_COMMON_REPORT_H_
