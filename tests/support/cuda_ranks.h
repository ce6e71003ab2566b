// Ranks of a communicator whose buffers lie on a device.
#pragma once

#include "tests/support/cuda_device.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

// Joins the test's communicator on a device; null when it failed. A device that is missing is a failure of the machine
// that runs the test.
inline moecclComm_t join(int rank, int n, const CudaDevice& device, const RankOptions& options) {
  moecclComm_t comm = nullptr;
  EXPECT_TRUE(device.ok()) << "no CUDA device";
  EXPECT_EQ(moecclCommInitRankConfig(&comm, n, unique_id(), rank, &options.config), moecclSuccess)
      << moecclGetLastError(nullptr);
  return comm;
}

}  // namespace moeccl::testing
