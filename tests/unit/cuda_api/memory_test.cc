// SPDX-License-Identifier: Apache-2.0
// Kinds of device memory: how processes open each other's memory, and which kinds callers may pass.
#include <atomic>
#include <functional>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 3;
constexpr size_t kCount = 70'000;

// Runs an AllReduce and an AllGather over buffers `in` and `out` of kRanks * kCount floats.
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

// by_descriptor: how processes are expected to share memory.
void run_world(RankMode mode, bool by_descriptor, bool mapped_buffers) {
  RankOptions options{.mode = mode, .deadline_ms = 90'000, .init = false};
  options.config.timeout_ms = capped_ms(40'000);
  options.config.init_timeout_ms = capped_ms(60'000);
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
        // Both have the same size, so that one number tells how much to release.
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

// A rank that has nothing left to do may leave while the kernel of another process still reads its memory.
TEST(CudaMemory, OfAKernelStaysWhileAnotherProcessUsesIt) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  const RankOptions options = device_options(RankMode::kProcesses);
  Meeting left;
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        if (!device.emulated()) GTEST_SKIP() << "needs a driver that takes freed memory from all processes";
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpBroadcast, "oneshot"), comm);
        void* const stream = device.make_stream();
        uint64_t* const gate = device.make_word();
        DeviceBuffer x(device, 1000 * 4);
        x.put(floats(1000, static_cast<float>(5 + rank)));
        device.begin_capture(stream);
        MOECCL_EXPECT_OK(moecclBroadcast(x.data(), x.data(), 1000, moecclFloat32, 0, comm, as_stream(stream)));
        void* const graph = device.end_capture(stream);
        ASSERT_NE(graph, nullptr);
        void* const instance = device.instantiate(graph);
        if (rank == 1) device.hold(stream, gate, 1);
        device.launch_graph(instance, stream);
        if (rank == 1) {
          EXPECT_TRUE(left.wait_for(1));
          std::atomic_ref(*gate).store(1);
        }
        EXPECT_EQ(x.get(stream), floats(1000, 5));
        device.end_graph(graph, instance);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        left.arrive();
        device.end_word(gate);
        device.end_stream(stream);
      },
      options);
}

// Step by step, the root of a broadcast has nothing to wait for once its data is staged, so it may leave while copies
// of other ranks from its staging are still queued.
struct Leaving {
  RankMode mode;
  int n;
  const char* late;     // the rank, and the device, whose streams lag
  bool aborts = false;  // that rank ends its communicator while its copy is queued
};
void leave_before_copies_end(const Leaving& w) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "4"), lag("MOECCL_TEST_CUDA_DELAY_US", "50000"),
      late_one("MOECCL_TEST_CUDA_DELAY_DEVICE", w.late), steps("MOECCL_CUDA_PERSISTENT", "0");
  const RankOptions options = device_options(w.mode);
  Meeting aborted;
  run_ranks(
      w.n,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        if (!device.emulated()) GTEST_SKIP() << "needs streams that are late on purpose";
        moecclComm_t comm = join(rank, w.n, device, options);
        ASSERT_NE(comm, nullptr);
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpBroadcast, "oneshot"), comm);
        void* const stream = device.make_stream();
        DeviceBuffer x(device, kCount * 4);
        x.put(floats(kCount, static_cast<float>(5 + rank)));
        MOECCL_EXPECT_COMM_OK(moecclBroadcast(x.data(), x.data(), kCount, moecclFloat32, 0, comm, as_stream(stream)),
                              comm);
        moecclResult_t state = moecclInProgress;
        if (w.aborts && std::to_string(rank) == w.late) {
          while (state == moecclInProgress) MOECCL_ASSERT_OK(moecclCommGetAsyncError(comm, &state));
          EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
          aborted.arrive();
        }
        if (w.aborts && rank == 0) {
          EXPECT_TRUE(aborted.wait_for(1));
        }
        const moecclResult_t ended = moecclCommDestroy(comm);
        const std::vector<char> got = x.get(stream);  // the device still works
        if (!w.aborts) {
          EXPECT_EQ(ended, moecclSuccess);
          EXPECT_TRUE(got == floats(kCount, 5));
        }
        device.end_stream(stream);
      },
      options);
}

TEST(CudaMemory, OfStagingStaysUntilAThreadThatLeavesHasReadIt) {
  leave_before_copies_end({.mode = RankMode::kMixed, .n = 4, .late = "2"});
}
TEST(CudaMemory, OfStagingStaysUntilAThreadThatAbortsHasReadIt) {
  leave_before_copies_end({.mode = RankMode::kMixed, .n = 4, .late = "2", .aborts = true});
}
TEST(CudaMemory, OfStagingSharedByHandlesStaysUntilAProcessThatLeavesHasReadIt) {
  const Setting handles("MOECCL_TEST_CUDA_NO_VMM", "1");
  leave_before_copies_end({.mode = RankMode::kProcesses, .n = 2, .late = "1"});
}
TEST(CudaMemory, OfStagingSharedByHandlesStaysUntilAProcessThatAbortsHasReadIt) {
  const Setting handles("MOECCL_TEST_CUDA_NO_VMM", "1");
  leave_before_copies_end({.mode = RankMode::kProcesses, .n = 2, .late = "1", .aborts = true});
}
// The news that a rank has left must not overtake what its stream still has to signal.
TEST(CudaMemory, OfARootThatLeavesAtOnceReachesAllRanks) {
  for (const RankMode mode : {RankMode::kThreads, RankMode::kMixed, RankMode::kProcesses})
    leave_before_copies_end({.mode = mode, .n = 4, .late = "0"});
}

// A rank may also come to a broadcast long after its root has left.
void come_after_the_root(RankMode mode, int n) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "4"), steps("MOECCL_CUDA_PERSISTENT", "0");
  const RankOptions options = device_options(mode);
  Meeting left;
  run_ranks(
      n,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, n, device, options);
        ASSERT_NE(comm, nullptr);
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpBroadcast, "oneshot"), comm);
        void* const stream = device.make_stream();
        DeviceBuffer x(device, kCount * 4);
        x.put(floats(kCount, static_cast<float>(5 + rank)));
        if (rank > 0) {
          EXPECT_TRUE(left.wait_for(1));
        }
        const moecclResult_t called =
            moecclBroadcast(x.data(), x.data(), kCount, moecclFloat32, 0, comm, as_stream(stream));
        moecclResult_t state = moecclSuccess;
        device.synchronize(stream);
        MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
        const std::string said = moecclGetLastError(comm);
        (void)moecclCommDestroy(comm);
        if (rank == 0) left.arrive();
        // The public header allows either.
        const moecclResult_t result = called == moecclSuccess ? state : called;
        EXPECT_TRUE(result == moecclRemoteError || x.get(stream) == floats(kCount, 5)) << result << " " << said;
        device.end_stream(stream);
      },
      options);
}
TEST(CudaMemory, OfStagingStaysForAThreadThatCallsLate) { come_after_the_root(RankMode::kThreads, 2); }
TEST(CudaMemory, OfStagingSharedWithProcessesStaysForRanksThatCallLate) { come_after_the_root(RankMode::kMixed, 4); }

// The first rank of a process maps the segments of other processes for all of its ranks. If it cannot, no rank waits
// for another one, and all say why they have no CUDA memory.
TEST(CudaMemory, ASegmentThatAProcessCannotLockIsNamedByAllRanks) {
  const RankOptions options = device_options(RankMode::kMixed);
  Meeting refused;
  run_ranks(
      4,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        ASSERT_TRUE(device.ok());
        if (!device.emulated()) GTEST_SKIP() << "needs a driver that refuses on purpose";
        // Ranks 1 and 3 are one process. Each of them first locks a segment of its own.
        if (rank == 1) device.refuse("cuMemHostRegister_v2", 999, 2);
        ASSERT_TRUE(refused.meet(4));
        const Stopwatch watch;
        moecclComm_t comm = join(rank, 4, device, options);
        ASSERT_NE(comm, nullptr);
        MOECCL_EXPECT_WITHIN(watch, 30'000);
        DeviceBuffer x(device, 64);
        EXPECT_EQ(moecclAllReduce(x.data(), x.data(), 16, moecclFloat32, moecclSum, comm, nullptr), moecclUnsupported);
        const std::string said = moecclGetLastError(comm);
        for (const char* words : {"rank 1", "page-locking", "(999)"})
          EXPECT_NE(said.find(words), std::string::npos) << words << " in: " << said;
        int32_t one = 1;
        MOECCL_EXPECT_OK(moecclAllReduce(&one, &one, 1, moecclInt32, moecclSum, comm, nullptr));
        EXPECT_EQ(one, 4);
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
      },
      options);
}

// Memory without an IPC handle, such as that of PyTorch's expandable segments.
TEST(CudaMemory, BuffersOfMappedMemoryServeProcesses) { run_world(RankMode::kProcesses, true, true); }
TEST(CudaMemory, BuffersOfMappedMemoryServeThreads) { run_world(RankMode::kThreads, false, true); }

// Gathers one expert of each rank to all of them, sums its gradients, and sums replicas, from peers' buffers. The
// buffers have room for kRanks * kCount floats.
// opens: the driver's function that opens them to other devices, for emulations that do not check what kernels reach.
void exchange_experts(CudaDevice& device, moecclComm_t comm, int rank, void* in, void* out, const char* opens) {
  const auto opened_by = [&](const std::function<moecclResult_t()>& call) {
    const uint64_t before = device.own_calls(opens);
    MOECCL_EXPECT_COMM_OK(call(), comm);
    EXPECT_TRUE(!device.emulated() || device.own_calls(opens) == before + 2) << "both buffers";
  };
  const int32_t domain = kRanks;
  moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
  config.n_experts = kRanks;
  config.n_levels = 1;
  config.domain = &domain;
  moecclHybrid_t hybrid = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
  moecclHybridInfo_t info{};
  info.size = sizeof(info);
  MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &info));
  ASSERT_EQ(info.n_held, kRanks);
  std::vector<float> values(kRanks * kCount, static_cast<float>(rank + 1)), got(values.size());
  device.upload(in, values.data(), values.size() * 4);
  opened_by([&] { return moecclHybridGather(hybrid, in, out, kCount * 4, nullptr); });
  device.download(got.data(), out, got.size() * 4);
  for (int i = 0; i < info.n_held; ++i)
    EXPECT_EQ(got[static_cast<size_t>(i) * kCount], static_cast<float>(info.held_experts[i] + 1));
  opened_by([&] { return moecclHybridReduce(hybrid, in, out, kCount, moecclFloat32, nullptr); });
  device.download(got.data(), out, kCount * 4);
  EXPECT_EQ(got[0], 6.0f);
  MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));

  const int32_t expert[kRanks] = {0, 0, 0};
  moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
  placement.n_experts = 1;
  placement.slots_per_rank = 1;
  placement.slot_expert = expert;
  MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpExpertAllReduce, "direct"), comm);
  opened_by(
      [&] { return moecclExpertAllReduce(in, out, kCount, moecclFloat32, moecclSum, &placement, comm, nullptr); });
  device.download(got.data(), out, kCount * 4);
  EXPECT_EQ(got[kCount - 1], 6.0f);
}

// Thread ranks on three devices use each other's buffers directly. Peer access covers only memory of cuMemAlloc. For
// memory of a pool, or memory that a caller mapped for its own device, the call opens it to the others.
enum class Calls { kCollectives, kExperts };
void on_three_devices(bool from_pool, const char* persistent, Calls calls = Calls::kCollectives) {
  setenv("MOECCL_TEST_CUDA_DEVICES", "3", 1);
  setenv("MOECCL_CUDA_PERSISTENT", persistent, 1);
  const RankOptions options = device_options(RankMode::kThreads);
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, kRanks, device, options);
        ASSERT_NE(comm, nullptr);
        const size_t bytes = kRanks * kCount * 4;
        void* in = from_pool ? device.allocate_from_pool(bytes, nullptr) : device.allocate_mapped(bytes);
        void* out = from_pool ? device.allocate_from_pool(bytes, nullptr) : device.allocate_mapped(bytes);
        // Buffers that one call has opened stay open, so the experts' calls are the first.
        if (calls == Calls::kExperts)
          exchange_experts(device, comm, rank, in, out, from_pool ? "cuMemPoolSetAccess" : "cuMemSetAccess");
        if (calls == Calls::kCollectives) sum_and_gather(device, comm, rank, in, out);
        const int to = (rank + 1) % kRanks, from = (rank + kRanks - 1) % kRanks;
        MOECCL_EXPECT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(moecclSend(in, kCount, moecclFloat32, to, comm, nullptr));
        MOECCL_EXPECT_OK(moecclRecv(out, kCount, moecclFloat32, from, comm, nullptr));
        MOECCL_EXPECT_OK(moecclGroupEnd());
        std::vector<float> first(1);
        device.download(first.data(), out, 4);
        EXPECT_EQ(first[0], static_cast<float>(calls == Calls::kExperts ? from + 1 : 100 * from));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        for (void* p : {in, out}) from_pool ? device.release_to_pool(p, nullptr) : device.release_mapped(p);
      },
      options);
  unsetenv("MOECCL_TEST_CUDA_DEVICES");
  unsetenv("MOECCL_CUDA_PERSISTENT");
}
// The likeliest mistake: every rank joins before it chooses its device.
TEST(CudaMemory, OfADeviceThatWasChosenAfterJoiningIsRefused) {
  run_ranks(2, [](int, moecclComm_t comm) {
    CudaDevice device;
    DeviceBuffer x(device, 64);
    EXPECT_EQ(moecclAllReduce(x.data(), x.data(), 16, moecclFloat32, moecclSum, comm, nullptr), moecclUnsupported);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("no rank had a current CUDA context"), std::string::npos)
        << moecclGetLastError(comm);
    moecclRedOp_t op = 0;
    EXPECT_EQ(moecclRedOpCreatePreMulSum(&op, x.data(), moecclFloat32, comm), moecclUnsupported);
  });
}

TEST(CudaMemory, OfAPoolServesRanksOnOtherDevices) { on_three_devices(true, "1"); }
TEST(CudaMemory, OfAPoolServesRanksOnOtherDevicesStepByStep) { on_three_devices(true, "0"); }
TEST(CudaMemory, OfAPoolHoldsExpertsForRanksOnOtherDevices) { on_three_devices(true, "1", Calls::kExperts); }
TEST(CudaMemory, MappedForOneDeviceHoldsExpertsForRanksOnOthers) { on_three_devices(false, "1", Calls::kExperts); }
TEST(CudaMemory, MappedForOneDeviceServesRanksOnOthers) { on_three_devices(false, "1"); }
TEST(CudaMemory, MappedForOneDeviceServesRanksOnOthersStepByStep) { on_three_devices(false, "0"); }

// A query of the driver costs about a microsecond, and one query must tell all that a call needs to know about a
// buffer.
void ask_once(const char* n_devices) {
  setenv("MOECCL_TEST_CUDA_DEVICES", n_devices, 1);
  const RankOptions options = device_options(RankMode::kThreads);
  const auto body = [&](int rank, moecclComm_t) {
    CudaDevice device(rank);
    if (!device.emulated()) return;
    moecclComm_t comm = join(rank, 2, device, options);
    ASSERT_NE(comm, nullptr);
    void* stream = device.make_stream();
    {
      DeviceBuffer in(device, kCount * 4), out(device, kCount * 4);
      const auto queries = [&] {
        return device.own_calls("cuPointerGetAttribute") + device.own_calls("cuPointerGetAttributes");
      };
      const auto asked_by = [&](const char* what, const std::function<moecclResult_t()>& call) {
        MOECCL_EXPECT_OK(call());  // the first call on a stream also creates what later ones use
        device.synchronize(stream);
        const uint64_t before = queries(), all = device.own_calls(nullptr);
        MOECCL_EXPECT_OK(call());
        const uint64_t asked = queries() - before;
        std::printf("rank %d, %s: %llu calls of the driver by the caller, %llu of them about pointers\n", rank, what,
                    static_cast<unsigned long long>(device.own_calls(nullptr) - all),
                    static_cast<unsigned long long>(asked));
        device.synchronize(stream);
        return asked;
      };
      EXPECT_EQ(asked_by("AllReduce",
                         [&] {
                           return moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, comm,
                                                  as_stream(stream));
                         }),
                2u);
      EXPECT_EQ(asked_by("AllReduce in place",
                         [&] {
                           return moecclAllReduce(in.data(), in.data(), kCount, moecclFloat32, moecclSum, comm,
                                                  as_stream(stream));
                         }),
                1u);
      EXPECT_EQ(asked_by("Send or Recv",
                         [&] {
                           return rank == 0 ? moecclSend(in.data(), kCount, moecclFloat32, 1, comm, as_stream(stream))
                                            : moecclRecv(out.data(), kCount, moecclFloat32, 0, comm, as_stream(stream));
                         }),
                1u);
    }
    MOECCL_EXPECT_OK(moecclCommDestroy(comm));
    device.end_stream(stream);
  };
  run_ranks(2, body, options);
  unsetenv("MOECCL_TEST_CUDA_DEVICES");
}
TEST(CudaMemory, IsAskedAboutOnceForEachBuffer) { ask_once("1"); }
TEST(CudaMemory, OnSeveralDevicesIsAskedAboutOnceForEachBuffer) { ask_once("2"); }

}  // namespace
}  // namespace moeccl::testing
