// Kinds of device memory: what processes open of each other, and what callers may give.
#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 3;
constexpr size_t kCount = 70'000;

// An AllReduce and an AllGather over buffers `in` and `out` of kRanks * kCount floats.
void sum_and_gather(CudaDevice& device, moecclComm_t comm, int rank, void* in, void* out) {
  std::vector<float> values(kCount), got(kRanks * kCount);
  for (size_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(rank * 100 + static_cast<int>(i % 50));
  device.upload(in, values.data(), kCount * 4);
  MOECCL_ASSERT_OK(moecclAllReduce(in, out, kCount, moecclFloat32, moecclSum, comm, nullptr));
  device.download(got.data(), out, kCount * 4);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(got[i], static_cast<float>(300 + 3 * static_cast<int>(i % 50))) << i;
  MOECCL_ASSERT_OK(moecclAllGather(in, out, kCount, moecclFloat32, comm, nullptr));
  device.download(got.data(), out, kRanks * kCount * 4);
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(got[i], static_cast<float>(static_cast<int>(i / kCount) * 100 + static_cast<int>(i % kCount % 50))) << i;
}

// by_descriptor: what is expected of processes that share memory.
void run_world(RankMode mode, bool by_descriptor, bool mapped_buffers) {
  RankOptions options{.mode = mode, .deadline_ms = 90'000, .init = false};
  options.config.timeout_ms = 40'000;
  options.config.init_timeout_ms = 60'000;
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        ASSERT_TRUE(device.ok());
        const int before = device.emulated() ? device.opened_by_descriptor() : 0;
        moecclComm_t comm = join(rank, kRanks, device, options);
        ASSERT_NE(comm, nullptr);
        if (device.emulated()) {
          EXPECT_EQ(device.opened_by_descriptor() - before, by_descriptor ? kRanks - 1 : 0);
        }
        const size_t bytes = kRanks * kCount * 4;
        // One size for both, so that one number tells how much is to be released.
        void* in = mapped_buffers ? device.allocate_mapped(bytes) : device.allocate(bytes);
        void* out = mapped_buffers ? device.allocate_mapped(bytes) : device.allocate(bytes);
        sum_and_gather(device, comm, rank, in, out);
        for (void* p : {in, out}) mapped_buffers ? device.release_mapped(p) : device.release(p);
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
      },
      options);
}

TEST(CudaMemory, ProcessesOpenEachOthersStagingByDescriptors) { run_world(RankMode::kProcesses, true, false); }

TEST(CudaMemory, IpcHandlesServeWhereThereAreNoDescriptors) {
  setenv("MOECCL_TEST_CUDA_NO_VMM", "1", 1);
  run_world(RankMode::kProcesses, false, false);
  unsetenv("MOECCL_TEST_CUDA_NO_VMM");
}

// Memory of which no IPC handle exists, such as that of PyTorch's expandable segments.
TEST(CudaMemory, BuffersOfMappedMemoryServeProcesses) { run_world(RankMode::kProcesses, true, true); }
TEST(CudaMemory, BuffersOfMappedMemoryServeThreads) { run_world(RankMode::kThreads, false, true); }

}  // namespace
}  // namespace moeccl::testing
