// SPDX-License-Identifier: Apache-2.0
// Hosts for one test, and ranks as processes on them.
#pragma once

#include <gtest/gtest.h>

#include "moeccl/moeccl.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

// Defines const std::unique_ptr<TestHosts> name. Skips the test, with the reason, where hosts cannot be made.
#define MAKE_HOSTS(name, ...)                                               \
  std::string why_not;                                                      \
  const auto name = TestHosts::create(HostsOptions{__VA_ARGS__}, &why_not); \
  if (name == nullptr) GTEST_SKIP() << why_not

namespace moeccl::testing {

inline RankOptions on(const TestHosts& hosts) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = const_cast<TestHosts*>(&hosts);
  return options;
}

// Checks a sum that only correct data from all ranks gives.
inline void check_all_reduce(int rank, int n, moecclComm_t comm, size_t count) {
  std::vector<int32_t> in(count), out(count);
  for (size_t i = 0; i < count; ++i) in[i] = static_cast<int32_t>(i) * (rank + 1);
  MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, moecclInt32, moecclSum, comm, nullptr), comm);
  for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], static_cast<int32_t>(i) * n * (n + 1) / 2) << i;
}

// Returns the page of moecclPlanExplain.
inline std::string explain(moecclComm_t comm, moecclOp_t op = moecclOpAllReduce, size_t count = 1024,
                           moecclDataType_t type = moecclFloat32) {
  char text[16384] = {};
  size_t needed = 0;
  EXPECT_EQ(moecclPlanExplain(comm, op, count, type, text, sizeof(text), &needed), moecclSuccess);
  return text;
}

}  // namespace moeccl::testing
