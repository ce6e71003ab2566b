// SPDX-License-Identifier: Apache-2.0
// More ranks than the persistent kernel serves.
#include "kernels/cuda/args.h"
#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

TEST(CudaManyRanks, AreToldOnceWhatRunsInstead) {
  constexpr int kRanks = cuda::kMaxSources + 1;
  const Setting staging("MOECCL_STAGING_BYTES", "256K"), device("MOECCL_CUDA_STAGING_BYTES", "256K"),
      messages("MOECCL_CUDA_MESSAGE_BYTES", "0");
  ::testing::internal::CaptureStderr();
  run_on_devices(
      kRanks, device_options(RankMode::kThreads), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        DeviceBuffer x(device, 100 * sizeof(float));
        x.put(floats(100, static_cast<float>(rank)));
        MOECCL_ASSERT_OK(moecclAllReduce(x.data(), x.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
        EXPECT_EQ(x.get(stream), floats(100, kRanks * (kRanks - 1) / 2.0f));
      });
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string warning = "65 ranks with CUDA buffers: the persistent kernel serves at most 64";
  const size_t at = log.find(warning);
  EXPECT_NE(at, std::string::npos) << log;
  EXPECT_EQ(log.find(warning, at + 1), std::string::npos) << log;
}

}  // namespace
}  // namespace moeccl::testing
