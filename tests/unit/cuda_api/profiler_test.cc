// SPDX-License-Identifier: Apache-2.0
// What a profiler plugin is told of operations on CUDA memory.
#include "tests/support/cuda_ranks.h"
#include "tests/support/profiler_log.h"

namespace moeccl::testing {
namespace {

uint64_t number_after(const std::string& line, const std::string& key) {
  const size_t at = line.find(key);
  return at == std::string::npos ? 0 : std::stoull(line.substr(at + key.size()));
}

// The persistent kernel measures itself. The host's time would begin with the launch, after which the kernel waits for
// what is before it on the stream.
TEST(CudaProfiler, IsToldHowLongTheDeviceWorked) {
  if (std::getenv("MOECCL_TEST_PROFILERS") == nullptr) GTEST_SKIP() << "MOECCL_TEST_PROFILERS names no plugins";
  constexpr int kMessages = 40;
  const ProfilerLog log;
  run_on_devices(
      2, device_options(RankMode::kThreads), [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        void* const x = device.allocate(4000);
        device.upload(x, std::vector<float>(1000, 1).data(), 4000);
        device.keep_busy(stream);
        MOECCL_ASSERT_COMM_OK(moecclAllReduce(x, x, 1000, moecclFloat32, moecclSum, comm, as_stream(stream)), comm);
        device.synchronize(stream);
        MOECCL_ASSERT_OK(moecclGroupStart());
        for (int i = 0; i < kMessages; ++i) {
          char* const to = static_cast<char*>(x) + 100 + 28 * i;
          MOECCL_ASSERT_OK(moecclSend(x, 7, moecclFloat32, 1 - rank, comm, as_stream(stream)));
          MOECCL_ASSERT_OK(moecclRecv(to, 7, moecclFloat32, 1 - rank, comm, as_stream(stream)));
        }
        MOECCL_ASSERT_OK(moecclGroupEnd());
        device.synchronize(stream);
        all_have_ended(comm);
        device.release(x);
      });
  EXPECT_EQ(log.n("ERROR"), 0u) << log.all();
  EXPECT_EQ(log.n("init "), 2u) << "one context for host and CUDA memory: " << log.all();
  EXPECT_EQ(log.n("start Coll in=CollApi func=AllReduce count=1000 type=ncclFloat32"), 2u) << log.all();
  for (const char* func : {"Send", "Recv"})
    EXPECT_EQ(log.n(std::string("start P2p in=P2pApi func=") + func + " count=7 type=ncclFloat32"), 2u * kMessages)
        << log.all();
  // The first kernel's events of the two ranks come before all others.
  const auto began = log.lines_with("start KernelCh in=Coll"), ended = log.lines_with("record KernelCh");
  ASSERT_GE(ended.size(), 2u) << log.all();
  uint64_t last_begin = 0, first_end = ~uint64_t{0};
  for (size_t i = 0; i < 2; ++i) {
    last_begin = std::max(last_begin, number_after(began[i], " at="));
    first_end = std::min(first_end, number_after(ended[i], " at="));
  }
  // The host notices the two ends at different times.
  EXPECT_LT(static_cast<int64_t>(first_end - last_begin), 200'000'000) << log.all();
  EXPECT_EQ(log.warnings().size(), 0u);
}

}  // namespace
}  // namespace moeccl::testing
