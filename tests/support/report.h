// SPDX-License-Identifier: Apache-2.0
// A rank's findings, on their way through a pipe to the test. One rank's report is one message, so ranks never
// interleave.
#pragma once

#include <gtest/gtest-spi.h>

#include <string>
#include <vector>

namespace moeccl::testing {

struct Finding {
  std::string file;
  int line = 0;
  std::string message;
};

struct Report {
  int rank = -1;
  std::vector<Finding> findings;
};

bool make_report_pipe(int fds[2]);  // [0] is read by the test, [1] written by the ranks
void send_report(int fd, int rank, const ::testing::TestPartResultArray& found);
bool receive_report(int fd, Report* report);  // false when all writers have ended

}  // namespace moeccl::testing
