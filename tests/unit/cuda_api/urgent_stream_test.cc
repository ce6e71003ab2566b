// SPDX-License-Identifier: Apache-2.0
// How many of the callers' streams may wait (src/exec/cuda/urgent_stream.h) is measured when a context is first used.
#include <atomic>
#include <future>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 1000;

// A communicator of one rank on the device that is current.
moecclComm_t alone() {
  moecclComm_t comm = nullptr;
  moecclUniqueId id;
  moecclConfig_t config = device_options(RankMode::kThreads).config;
  MOECCL_EXPECT_OK(moecclGetUniqueId(&id));
  MOECCL_EXPECT_OK(moecclCommInitRankConfig(&comm, 1, id, 0, &config));
  return comm;
}

moecclResult_t sum(DeviceBuffer& x, moecclComm_t comm, void* stream) {
  return moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream));
}

TEST(CudaUrgentStreams, AMeasurementThatFailedIsRepeated) {
  run_ranks(
      1,
      [](int, moecclComm_t) {
        CudaDevice device;
        if (!device.emulated()) GTEST_SKIP() << "needs a driver that fails on purpose";
        DeviceBuffer x(device, kCount * 4);
        void* const stream = device.make_stream();
        device.refuse("cuStreamCreate", 2);
        moecclComm_t comm = alone();
        EXPECT_NE(sum(x, comm, stream), moecclSuccess);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        comm = alone();
        MOECCL_EXPECT_COMM_OK(sum(x, comm, stream), comm);
        device.synchronize(stream);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        device.end_stream(stream);
      },
      device_options(RankMode::kProcesses));
}

// The driver may not return from the creation of a stream while many of the program's streams wait. Other devices'
// operations go on.
TEST(CudaUrgentStreams, AStreamThatTheDriverHoldsUpDoesNotHoldUpOtherDevices) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2"), channels("MOECCL_TEST_CUDA_CHANNELS", "1"),
      pool("MOECCL_TEST_CUDA_CHANNEL_POOL", "1"), steps("MOECCL_CUDA_PERSISTENT", "0");
  run_ranks(
      1,
      [](int, moecclComm_t) {
        CudaDevice first(0);
        if (!first.emulated()) GTEST_SKIP() << "needs a driver that holds up a call on purpose";
        moecclComm_t kept = alone();
        uint64_t* const word = first.make_word();
        std::vector<void*> waiting(7);  // of the pool's 8 channels
        for (void*& s : waiting) s = first.make_stream();
        CudaDevice second(1);  // becomes current
        moecclComm_t comm = alone();
        DeviceBuffer x(second, kCount * 4);
        void* const stream = second.make_stream();
        first.make_current();
        for (void* s : waiting) first.hold(s, word, 1);
        const uint64_t before = first.calls("cuStreamCreateWithPriority");
        std::thread maker([&] {
          first.make_current();
          MOECCL_EXPECT_OK(moecclCommDestroy(alone()));
        });
        for (int i = 0; i < 5000 && first.calls("cuStreamCreateWithPriority") == before; ++i) usleep(1000);
        EXPECT_GT(first.calls("cuStreamCreateWithPriority"), before);
        std::future<moecclResult_t> done = std::async(std::launch::async, [&] {
          second.make_current();
          const moecclResult_t called = sum(x, comm, stream);
          second.synchronize(stream);
          return called;
        });
        EXPECT_EQ(done.wait_for(std::chrono::seconds(10)), std::future_status::ready);
        std::atomic_ref(*word).store(1);
        maker.join();
        EXPECT_EQ(done.get(), moecclSuccess);
        for (void* s : waiting) first.end_stream(s);
        first.end_word(word);
        for (moecclComm_t c : {kept, comm}) MOECCL_EXPECT_OK(moecclCommDestroy(c));
        second.make_current();
        second.end_stream(stream);
      },
      device_options(RankMode::kProcesses));
}

// Where all queues have work, a rank's part of an operation comes into the shortest one, in which the other rank's
// stream may wait for that operation.
TEST(CudaUrgentStreams, RanksThatShareADeviceDoNotHoldUpOneAnother) {
  const Setting channels("MOECCL_TEST_CUDA_CHANNELS", "1"), pool("MOECCL_TEST_CUDA_CHANNEL_POOL", "1"),
      steps("MOECCL_CUDA_PERSISTENT", "0");
  run_on_devices(2, device_options(RankMode::kThreads, 30'000, 10'000),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   if (!device.emulated()) GTEST_SKIP() << "needs a driver whose queues are known";
                   DeviceBuffer x(device, kCount * 4);
                   x.put(floats(kCount, static_cast<float>(rank)));
                   std::vector<void*> busy(rank == 1 ? 7 : 0);  // and the other rank's stream has the eighth queue
                   for (void*& s : busy) s = device.make_stream();
                   const uint64_t before = device.calls("cuStreamWaitValue64_v2");
                   all_have_ended(comm);
                   // Until the other rank's stream waits for this rank, or, as it should be, only its call does.
                   for (int i = 0; rank == 1 && i < 500 && device.calls("cuStreamWaitValue64_v2") == before; ++i)
                     usleep(1000);
                   for (void* s : busy)
                     for (int i = 0; i < 3; ++i) device.keep_busy(s);
                   MOECCL_EXPECT_COMM_OK(sum(x, comm, stream), comm);
                   EXPECT_EQ(x.get(stream), floats(kCount, 1));
                   for (void* s : busy) {
                     device.synchronize(s);
                     device.end_stream(s);
                   }
                   all_have_ended(comm);
                 });
}

}  // namespace
}  // namespace moeccl::testing
