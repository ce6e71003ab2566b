// SPDX-License-Identifier: Apache-2.0
// NCCL programs on CUDA memory, served by MoECCL itself: with the driver that MOECCL_CUDA_DRIVER names (here the
// emulated one, which runs MoECCL's kernels on the CPU), or with the real one.
#include "tests/shim/nccl_ranks.h"
#include "tests/support/cuda_device.h"

namespace moeccl::testing {
namespace {

// Asks in another process: this one's children could not use the device after it has.
bool has_device() {
  const pid_t child = fork();
  if (child == 0) _exit(CudaDevice().ok() ? 0 : 1);
  int status = 1;
  return waitpid(child, &status, 0) == child && status == 0;
}

TEST(ShimDevice, CollectivesOnDeviceMemoryAndStreams) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
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

// NCCL does not use the device before a rank joins, and neither may its children find it used.
TEST(ShimDevice, AProcessMayForkItsRanksAfterItHasMadeTheirId) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  in_processes(1, [](int) {
    constexpr int kRanks = 2;
    int version = 0;
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetVersion(&version));
    ASSERT_NCCL(ncclGetUniqueId(&id));
    in_processes(kRanks, [&](int rank) {
      CudaDevice device;
      ASSERT_TRUE(device.ok()) << "the parent has initialised CUDA";
      ncclComm_t comm = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, kRanks, id, rank));
      auto* stream = static_cast<cudaStream_t>(device.make_stream());
      const float in = 3;
      float out = 0;
      void* const memory = device.allocate(sizeof in);
      device.upload(memory, &in, sizeof in, stream);
      ASSERT_NCCL(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, comm, stream));
      device.download(&out, memory, sizeof out, stream);
      EXPECT_EQ(out, 2 * in);
      ASSERT_NCCL(ncclCommDestroy(comm));
      device.release(memory);
      device.end_stream(stream);
    });
  });
}

// In this mode, whether MoECCL serves the device decides nothing before the first call on device memory.
TEST(ShimDevice, AGroupMayBeTheFirstCall) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    setenv("MOECCL_SHIM_MODE", "moeccl", 1);
    const ncclUniqueId id = meet(*board, rank);
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, id, rank));
    auto* stream = static_cast<cudaStream_t>(device.make_stream());
    const int32_t mine = rank + 5;
    int32_t got = 0;
    void *a = device.allocate(sizeof mine), *b = device.allocate(sizeof got);
    device.upload(a, &mine, sizeof mine, stream);
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclSend(a, 1, ncclInt32, 1 - rank, comm, stream));
    EXPECT_NCCL(ncclRecv(b, 1, ncclInt32, 1 - rank, comm, stream));
    ASSERT_NCCL(ncclGroupEnd());
    device.download(&got, b, sizeof got, stream);
    EXPECT_EQ(got, 6 - rank);
    EXPECT_NCCL(ncclCommDestroy(comm));
    device.release(a);
    device.release(b);
    device.end_stream(stream);
  });
}

// Puts from device memory into a window of device memory. The peer fetches the data when it waits.
TEST(ShimDevice, PutsReachWindowsOfDeviceMemory) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
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

// One thread drives both ranks. Its puts into device memory are left for the other rank, which has room for 256 of them
// and is served only by this thread.
TEST(ShimDevice, AThreadPutsMoreThanThereIsRoomForToItsOtherRank) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  in_processes(1, [](int) {
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    constexpr size_t kPuts = 600;
    ncclUniqueId id;
    ncclComm_t comms[2];
    void* memory[2];
    ncclWindow_t windows[2];
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < 2; ++r) ASSERT_NCCL(ncclCommInitRank(&comms[r], 2, id, r));
    ASSERT_NCCL(ncclGroupEnd());
    for (int r = 0; r < 2; ++r) {
      ASSERT_NCCL(ncclMemAlloc(&memory[r], kPuts));
      ASSERT_NCCL(ncclCommWindowRegister(comms[r], memory[r], kPuts, &windows[r], NCCL_WIN_COLL_SYMMETRIC));
    }
    auto* stream = static_cast<cudaStream_t>(device.make_stream());
    std::vector<unsigned char> values(kPuts), got(kPuts);
    for (size_t i = 0; i < kPuts; ++i) values[i] = static_cast<unsigned char>(3 + i * 7);
    ncclWaitSignalDesc_t wanted = {kPuts, 0, 0, 0};
    for (const bool grouped : {true, false}) {
      if (grouped) {
        ASSERT_NCCL(ncclGroupStart());
      }
      for (size_t i = 0; i < kPuts; ++i)
        EXPECT_NCCL(ncclPutSignal(&values[i], 1, ncclUint8, 1, windows[0], i, 0, 0, 0, comms[0], stream));
      EXPECT_NCCL(ncclWaitSignal(1, &wanted, comms[1], stream));
      if (grouped) {
        ASSERT_NCCL(ncclGroupEnd());
      }
      device.download(got.data(), memory[1], kPuts, stream);
      EXPECT_EQ(got, values);
    }
    for (int r = 0; r < 2; ++r) {
      EXPECT_NCCL(ncclCommWindowDeregister(comms[r], windows[r]));
      EXPECT_NCCL(ncclMemFree(memory[r]));
      EXPECT_NCCL(ncclCommDestroy(comms[r]));
    }
    device.end_stream(stream);
  });
}

// Expects the sum 1 + 2 + .. over the communicator's ranks, in memory of the current device.
void expect_device_sum(CudaDevice& device, ncclComm_t comm) {
  int n = 0, rank = -1;
  ASSERT_NCCL(ncclCommCount(comm, &n));
  ASSERT_NCCL(ncclCommUserRank(comm, &rank));
  auto* stream = static_cast<cudaStream_t>(device.make_stream());
  const int32_t mine = rank + 1;
  int32_t sum = 0;
  void* word = device.allocate(sizeof mine);
  device.upload(word, &mine, sizeof mine, stream);
  EXPECT_NCCL(ncclAllReduce(word, word, 1, ncclInt32, ncclSum, comm, stream));
  device.download(&sum, word, sizeof sum, stream);
  EXPECT_EQ(sum, n * (n + 1) / 2);
  device.release(word);
  device.end_stream(stream);
}

// Helper threads create these communicators, at the end of a group and in the background.
TEST(ShimDevice, WhatHelperThreadsMakeServesDeviceMemory) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int kRanks = 3;
  Board* board = new_board();
  in_processes(kRanks, [&](int rank) {
    const ncclUniqueId id = meet(*board, rank);
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr, pair = nullptr, shrunk = nullptr, grouped = nullptr;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, kRanks, id, rank, &config), ncclInProgress);
    ASSERT_EQ(wait_ready(comm), ncclSuccess);
    expect_device_sum(device, comm);

    // What is made from the pair is made where its caller waits.
    ncclConfig_t blocking = NCCL_CONFIG_INITIALIZER;
    EXPECT_EQ(ncclCommSplit(comm, rank == 2 ? NCCL_SPLIT_NOCOLOR : 0, 0, &pair, &blocking), ncclInProgress);
    ASSERT_EQ(wait_ready(comm), ncclSuccess);
    EXPECT_EQ(pair == nullptr, rank == 2);
    if (rank < 2) {
      ASSERT_EQ(wait_ready(pair), ncclSuccess);
      expect_device_sum(device, pair);
      int excluded = 2;
      EXPECT_EQ(ncclCommShrink(comm, &excluded, 1, &shrunk, &config, NCCL_SHRINK_DEFAULT), ncclInProgress);
      ASSERT_EQ(wait_ready(comm), ncclSuccess);
      ASSERT_EQ(wait_ready(shrunk), ncclSuccess);
      expect_device_sum(device, shrunk);
      ASSERT_NCCL(ncclGroupStart());
      ASSERT_NCCL(ncclCommSplit(pair, 0, -rank, &grouped, nullptr));
      ASSERT_NCCL(ncclGroupEnd());
      expect_device_sum(device, grouped);
    }
    for (ncclComm_t c : {grouped, shrunk, pair, comm}) EXPECT_NCCL(ncclCommDestroy(c));
  });
}

// Page-locked buffers and the NULL stream: a copy in the default stream brings the input.
TEST(ShimDevice, PageLockedBuffersComeAfterTheDefaultStream) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  const auto rank_of = [](Board& board, int rank) {
    const ncclUniqueId id = meet(board, rank);
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, id, rank));
    const int32_t mine = rank + 5;
    auto* in = static_cast<int32_t*>(device.lock(sizeof mine));
    auto* out = static_cast<int32_t*>(device.lock(sizeof mine));
    void* source = device.allocate(sizeof mine);
    device.upload(source, &mine, sizeof mine);
    *in = *out = 0;
    device.keep_busy(nullptr);
    device.copy(in, source, sizeof mine, nullptr);
    EXPECT_NCCL(ncclAllReduce(in, out, 1, ncclInt32, ncclSum, comm, nullptr));
    device.synchronize(nullptr);
    EXPECT_EQ(*out, 11);
    EXPECT_NCCL(ncclCommDestroy(comm));
    device.release(source);
    device.end_lock(in);
    device.end_lock(out);
  };
  Board* board = new_board();
  in_processes(2, [&](int rank) { rank_of(*board, rank); });
  Board* shared = new_board();
  in_threads(2, [&](int rank) { rank_of(*shared, rank); });
}

// Calls of a communicator are for its own device, and memory is for the one that it was allocated on.
TEST(ShimDevice, AThreadWithoutADevicePutsWaitsAndFrees) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    const ncclUniqueId id = meet(*board, rank);
    CudaDevice device;
    ASSERT_TRUE(device.ok());
    ncclComm_t comm = nullptr;
    ncclWindow_t window = nullptr;
    void *memory = nullptr, *source = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, id, rank));
    ASSERT_NCCL(ncclMemAlloc(&memory, 64));
    ASSERT_NCCL(ncclMemAlloc(&source, 64));
    ASSERT_NCCL(ncclCommWindowRegister(comm, memory, 64, &window, NCCL_WIN_COLL_SYMMETRIC));
    const int32_t mine = rank + 5;
    int32_t got = 0;
    device.upload(source, &mine, sizeof mine);
    std::thread([&] {
      ncclWaitSignalDesc_t wanted = {1, 1 - rank, 0, 0};
      EXPECT_NCCL(ncclPutSignal(source, 1, ncclInt32, 1 - rank, window, 0, 0, 0, 0, comm, nullptr));
      EXPECT_NCCL(ncclWaitSignal(1, &wanted, comm, nullptr));
    }).join();
    device.download(&got, memory, sizeof got);
    EXPECT_EQ(got, 6 - rank);
    EXPECT_NCCL(ncclCommWindowDeregister(comm, window));
    EXPECT_NCCL(ncclCommDestroy(comm));
    std::thread([&] { EXPECT_NCCL(ncclMemFree(memory)); }).join();
    EXPECT_EQ(ncclMemFree(memory), ncclInvalidArgument) << "freed before";
    EXPECT_NCCL(ncclMemFree(source));
  });
}

}  // namespace
}  // namespace moeccl::testing
