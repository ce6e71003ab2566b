// SPDX-License-Identifier: Apache-2.0
// What the driver says about devices that this process sees, and who is asked about the others.
#include "src/driver/cuda/peers.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/cuda_device.h"
#include "tests/support/cuda_ranks.h"

namespace moeccl::tests {
namespace {

namespace cuda = driver::cuda;

TEST(CudaPeers, DevicesThatAreHiddenAreAskedForElsewhere) {
  const testing::Setting links("MOECCL_TEST_CUDA_NVLINK", "1");
  const testing::CudaDevice device(0);
  cuda::Context context = nullptr;
  ASSERT_EQ(cuda::driver()->cuCtxGetCurrent(&context), 0);
  EXPECT_EQ(cuda::pci_address(context), "0000:01:00.0");
  EXPECT_EQ(cuda::pci_address(nullptr), "");
  cuda::Uuid own{}, other{};
  ASSERT_EQ(cuda::driver()->cuDeviceGetUuid_v2(own.data(), 0), 0);
  std::memset(other.data(), 77, other.size());
  const cuda::Uuid both[] = {own, other};
  for (const bool joined : {true, false}) {
    size_t asked = 0;
    const auto hidden = [&](size_t i) {
      asked = i;
      return joined;
    };
    EXPECT_EQ(cuda::joined_by_nvlink(0, both, hidden), joined);
    EXPECT_EQ(asked, 1u);
  }
  EXPECT_FALSE(cuda::joined_by_nvlink(0, {both, 1}, [](size_t) { return true; })) << "there is no other device";
}

}  // namespace
}  // namespace moeccl::tests
