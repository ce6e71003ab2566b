// NCCL programs on CUDA memory, served by MoECCL itself: with the driver that MOECCL_CUDA_DRIVER names (here the
// emulated one, which runs MoECCL's kernels on the CPU), or the real one.
#include "tests/shim/nccl_ranks.h"
#include "tests/support/cuda_device.h"

namespace moeccl::testing {
namespace {

TEST(ShimDevice, CollectivesOnDeviceMemoryAndStreams) {
  if (!CudaDevice().ok()) GTEST_SKIP() << "no CUDA device";
  constexpr int kRanks = 2;
  constexpr size_t kCount = 1003;
  Board* board = new_board();
  in_processes(kRanks, [&](int rank) {
    const ncclUniqueId id = meet(*board, rank);  // before a device is chosen, as in NCCL's own example
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, kRanks, id, rank));
    int ordinal = -1;
    EXPECT_NCCL(ncclCommCuDevice(comm, &ordinal));
    EXPECT_EQ(ordinal, 0);
    auto* stream = static_cast<cudaStream_t>(device.make_stream());
    std::vector<float> in(kCount), out(kCount);
    for (size_t i = 0; i < kCount; ++i) in[i] = static_cast<float>(i + static_cast<size_t>(rank));
    const size_t bytes = kCount * sizeof(float);
    void *a = device.allocate(bytes), *b = device.allocate(bytes);
    device.upload(a, in.data(), bytes, stream);
    ASSERT_NCCL(ncclAllReduce(a, b, kCount, ncclFloat32, ncclSum, comm, stream));
    ncclRedOp_t half = ncclSum;
    const float scalar = 0.5f;
    void* word = device.allocate(sizeof scalar);
    device.upload(word, &scalar, sizeof scalar, stream);
    ASSERT_NCCL(ncclRedOpCreatePreMulSum(&half, word, ncclFloat32, ncclScalarDevice, comm));
    ASSERT_NCCL(ncclAllReduce(b, b, kCount, ncclFloat32, half, comm, stream));
    ASSERT_NCCL(ncclGroupStart());
    ASSERT_NCCL(ncclSend(b, kCount, ncclFloat32, 1 - rank, comm, stream));
    ASSERT_NCCL(ncclRecv(a, kCount, ncclFloat32, 1 - rank, comm, stream));
    ASSERT_NCCL(ncclGroupEnd());
    device.download(out.data(), a, bytes, stream);
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(out[i], static_cast<float>(2 * i + 1)) << i;
    EXPECT_NCCL(ncclRedOpDestroy(half, comm));
    EXPECT_NCCL(ncclCommDestroy(comm));
    for (void* p : {a, b, word}) device.release(p);
    device.end_stream(stream);
  });
}

// Puts from device memory into a window of device memory, which the peer fetches when it waits.
TEST(ShimDevice, PutsReachWindowsOfDeviceMemory) {
  if (!CudaDevice().ok()) GTEST_SKIP() << "no CUDA device";
  constexpr int kRanks = 2;
  constexpr size_t kCount = 1003;
  Board* board = new_board();
  in_processes(kRanks, [&](int rank) {
    const ncclUniqueId id = meet(*board, rank);
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, kRanks, id, rank));
    auto* stream = static_cast<cudaStream_t>(device.make_stream());
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    const size_t bytes = kCount * sizeof(float);
    ASSERT_NCCL(ncclMemAlloc(&memory, 2 * bytes));
    ASSERT_NCCL(ncclCommWindowRegister(comm, memory, 2 * bytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    std::vector<float> in(kCount), out(kCount);
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < kCount; ++i)
        in[i] = static_cast<float>(i) + 1000.0f * static_cast<float>(round + 3 * rank);
      void* source = device.allocate(bytes);
      device.upload(source, in.data(), bytes, stream);
      ASSERT_NCCL(ncclPutSignal(source, kCount, ncclFloat32, 1 - rank, window, bytes, 0, 0, 0, comm, stream));
      ncclWaitSignalDesc_t wanted = {1, 1 - rank, 0, 0};
      ASSERT_NCCL(ncclWaitSignal(1, &wanted, comm, stream));
      device.download(out.data(), static_cast<char*>(memory) + bytes, bytes, stream);
      for (size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(out[i], static_cast<float>(i) + 1000.0f * static_cast<float>(round + 3 * (1 - rank))) << i;
      }
      device.release(source);
      ASSERT_NCCL(ncclSignal(1 - rank, 1, 0, 0, comm, stream));
      wanted.sigIdx = 1;
      ASSERT_NCCL(ncclWaitSignal(1, &wanted, comm, stream));
    }
    EXPECT_NCCL(ncclCommWindowDeregister(comm, window));
    EXPECT_NCCL(ncclMemFree(memory));
    EXPECT_NCCL(ncclCommDestroy(comm));
    device.end_stream(stream);
  });
}

}  // namespace
}  // namespace moeccl::testing
