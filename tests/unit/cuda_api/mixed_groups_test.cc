// SPDX-License-Identifier: Apache-2.0
// Groups of collectives and messages on CUDA memory (docs/decisions/133-messages-after-collectives.md): as in NCCL, the
// collectives come first, and a launch of messages holds up nothing else of its group. Peers may make the calls one by
// one in that order.
#include <unistd.h>

#include <csignal>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kFloats = 300'000;  // more than a message without a receiver takes

// Two ranks on one device. Rank 0 makes its calls in a group, and rank 1 makes them one by one.
void group_beside_single_calls() {
  run_on_devices(2, device_options(RankMode::kThreads, 60'000, 10'000),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   DeviceBuffer a(device, kFloats * 4), b(device, kFloats * 4), x(device, kFloats * 4);
                   for (DeviceBuffer* sum : {&a, &b}) sum->put(floats(kFloats, 1));
                   x.put(floats(kFloats, static_cast<float>(rank + 5)));
                   all_have_ended(comm);
                   if (rank == 0) {
                     MOECCL_EXPECT_OK(moecclGroupStart());
                   }
                   for (DeviceBuffer* sum : {&a, &b}) {
                     MOECCL_EXPECT_OK(moecclAllReduce(sum->data(), sum->data(), kFloats, moecclFloat32, moecclSum, comm,
                                                      as_stream(stream)));
                   }
                   if (rank == 0) {
                     MOECCL_EXPECT_OK(moecclSend(x.data(), kFloats, moecclFloat32, 1, comm, as_stream(stream)));
                     MOECCL_EXPECT_OK(moecclGroupEnd());
                   } else {
                     MOECCL_EXPECT_OK(moecclRecv(x.data(), kFloats, moecclFloat32, 0, comm, as_stream(stream)));
                   }
                   EXPECT_TRUE(x.get(stream) == floats(kFloats, 5));
                   for (DeviceBuffer* sum : {&a, &b}) EXPECT_TRUE(sum->get(stream) == floats(kFloats, 2));
                   moecclResult_t state = moecclInternalError;
                   MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
                   EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
                   all_have_ended(comm);
                 });
}

TEST(CudaMixedGroups, MayStandBesideSingleCalls) { group_beside_single_calls(); }
TEST(CudaMixedGroups, MayHoldCollectivesThatAThreadDrives) {
  const Setting bytes("MOECCL_CUDA_PERSISTENT_BYTES", "64K");
  group_beside_single_calls();
}

// What a rank launches first does not depend on how far its earlier launches have got.
TEST(CudaMixedGroups, HaveOneOrderBehindOperationsInFlight) {
  run_on_devices(
      2, device_options(RankMode::kThreads, 120'000, 10'000),
      [](int rank, moecclComm_t comm, CudaDevice& device, void* first) {
        constexpr int kRounds = 60;
        DeviceBuffer sum(device, 4000), other(device, 4000), out(device, kFloats * 4), in(device, kFloats * 4);
        void* const second = device.make_stream();
        out.put(floats(kFloats, static_cast<float>(rank)));
        sum.put(floats(1000, 1));
        all_have_ended(comm);
        const auto reduce = [&](DeviceBuffer& x, void* s) {
          MOECCL_EXPECT_OK(moecclAllReduce(x.data(), x.data(), 1000, moecclFloat32, moecclMax, comm, as_stream(s)));
        };
        for (int round = 0; round < kRounds; ++round) {
          reduce(other, first);
          MOECCL_EXPECT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(moecclSend(out.data(), kFloats, moecclFloat32, 1 - rank, comm, as_stream(second)));
          MOECCL_EXPECT_OK(moecclRecv(in.data(), kFloats, moecclFloat32, 1 - rank, comm, as_stream(second)));
          reduce(sum, second);
          MOECCL_EXPECT_OK(moecclGroupEnd());
        }
        EXPECT_TRUE(in.get(second) == floats(kFloats, static_cast<float>(1 - rank)));
        EXPECT_EQ(sum.get(second), floats(1000, 1));
        device.synchronize(first);
        all_have_ended(comm);
        device.end_stream(second);
      });
}

// A group that cannot be issued launches nothing, because no thread would watch what the device does with the caller's
// buffers.
TEST(CudaMixedGroups, LaunchNothingWhereTheOtherCallsCannotBeIssued) {
  run_on_devices(1, device_options(RankMode::kThreads), [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (!device.emulated()) GTEST_SKIP() << "needs a driver that fails on purpose";
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, 0, &other, nullptr));
    DeviceBuffer in(device, 4000), out(device, 4000), driven(device, 4000);
    in.put(floats(1000, 1));
    driven.put(floats(1000, 2));
    for (const bool fails : {false, true}) {
      out.put(floats(1000, 7));
      device.synchronize(stream);
      const int before = device.launches();
      if (fails)
        device.refuse("cuEventCreate", 999);  // for the default stream's work, before the call without a stream
      MOECCL_EXPECT_OK(moecclGroupStart());
      MOECCL_EXPECT_OK(moecclAllReduce(in.data(), out.data(), 1000, moecclFloat32, moecclSum, comm, as_stream(stream)));
      MOECCL_EXPECT_OK(moecclAllReduce(driven.data(), driven.data(), 1000, moecclFloat32, moecclMax, other, nullptr));
      EXPECT_EQ(moecclGroupEnd(), fails ? moecclSystemError : moecclSuccess);
      EXPECT_EQ(device.launches() > before, !fails);
      EXPECT_EQ(out.get(stream), floats(1000, fails ? 7 : 1));
    }
    MOECCL_EXPECT_OK(moecclCommDestroy(other));
  });
}

// The collective is driven, and fails while the messages of its group wait.
TEST(CudaMixedGroups, EndSoonAfterTheDeathOfAPeer) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2"), bytes("MOECCL_CUDA_PERSISTENT_BYTES", "64K");
  RankOptions options = device_options(RankMode::kProcesses, 60'000, 40'000);
  options.may_die = {1};
  run_on_devices(2, options, [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer sum(device, kFloats * 4), x(device, kFloats * 4);
    all_have_ended(comm);
    if (rank == 1) {
      usleep(300'000);
      kill(getpid(), SIGKILL);
    }
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(moecclSend(x.data(), kFloats, moecclFloat32, 1, comm, as_stream(stream)));
    MOECCL_EXPECT_OK(
        moecclAllReduce(sum.data(), sum.data(), kFloats, moecclFloat32, moecclSum, comm, as_stream(stream)));
    MOECCL_EXPECT_OK(moecclGroupEnd());
    const Stopwatch watch;
    moecclResult_t state = moecclSuccess;
    const std::string said = failure_of(comm, &state);
    EXPECT_EQ(state, moecclRemoteError) << said;
    EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
    device.synchronize(stream);
    MOECCL_EXPECT_WITHIN(watch, 5000);
  });
}

}  // namespace
}  // namespace moeccl::testing
