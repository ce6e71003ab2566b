// SPDX-License-Identifier: Apache-2.0
// nccl-tests' groups of processes that measure side by side, which NCCL_TESTS_SPLIT describes: "AND 0x3", "OR 7",
// "MOD 2", "DIV 4", or with &, |, % and /. NCCL_TESTS_SPLIT_MASK=3, which is hexadecimal, is the same as AND 0x3.
#pragma once

#include <cstdint>
#include <string>

namespace perf {

struct Grouping {
  char op = 0;  // one of & | % /; 0: all ranks are one group
  uint32_t value = 0;
  std::string text;  // as it was given
  int ranks_per_process = 1;

  // Returns the number of a rank's group.
  int color(int rank) const;
};

// Returns an empty sentence, or what is wrong with the text.
std::string parse_grouping(const std::string& text, Grouping& grouping);
// Reads the variables, or fails.
Grouping grouping_of_environment();
// Returns how many ranks each group has. Fails unless all have as many.
int group_size(const Grouping& grouping, int n_ranks);

}  // namespace perf
