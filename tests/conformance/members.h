// SPDX-License-Identifier: Apache-2.0
// What tests of shrink and grow ask of a communicator, and the time limits that they give to one.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/support/ranks_on_hosts.h"

namespace moeccl::testing {

inline bool says(moecclComm_t comm, const std::string& text) {
  return std::string(moecclGetLastError(comm)).find(text) != std::string::npos;
}

// Returns the sum over all ranks of the given values.
inline int32_t sum_of(int32_t mine, moecclComm_t comm) {
  int32_t sum = -1;
  MOECCL_EXPECT_COMM_OK(moecclAllReduce(&mine, &sum, 1, moecclInt32, moecclSum, comm, nullptr), comm);
  return sum;
}

inline void expect_place(moecclComm_t comm, int rank, int n) {
  int r = -1, count = -1;
  MOECCL_EXPECT_OK(moecclCommUserRank(comm, &r));
  MOECCL_EXPECT_OK(moecclCommCount(comm, &count));
  EXPECT_EQ(r, rank);
  EXPECT_EQ(count, n);
}

inline moecclConfig_t timeouts(int init_ms, int ms = 20'000) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.init_timeout_ms = static_cast<int32_t>(patient_ms(init_ms));
  config.timeout_ms = static_cast<int32_t>(patient_ms(ms));
  return config;
}

}  // namespace moeccl::testing
