// SPDX-License-Identifier: Apache-2.0
// The caller's CUDA streams: from several devices, more than the hardware has channels, and with a driver that refuses.
#include <barrier>
#include <chrono>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 3000;

// An allocation may wait for the device, and there for a kernel that waits for this very call.
TEST(CudaFirstOperation, AllocatesNothing) {
  run_on_devices(2, device_options(RankMode::kThreads),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   if (!device.emulated()) GTEST_SKIP() << "only the emulated driver counts its calls";
                   DeviceBuffer in(device, kCount * 4), came(device, kCount * 4);
                   in.put(floats(kCount, 2));
                   const uint64_t before = device.own_calls("cuMemHostAlloc") + device.own_calls("cuMemAlloc_v2");
                   MOECCL_EXPECT_OK(moecclGroupStart());
                   MOECCL_EXPECT_OK(moecclSend(in.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(stream)));
                   MOECCL_EXPECT_OK(moecclRecv(came.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(stream)));
                   MOECCL_EXPECT_OK(moecclGroupEnd());
                   EXPECT_EQ(device.own_calls("cuMemHostAlloc") + device.own_calls("cuMemAlloc_v2"), before);
                   EXPECT_EQ(came.get(stream), floats(kCount, 2));
                 });
}

// One thread joins as all ranks, each on its own device where there are enough, and works while another device than the
// communicator's is current.
void one_thread(int n, bool named_streams) {
  run_ranks(
      1,
      [=](int, moecclComm_t) {
        if (named_streams && CudaDevice().count() < n)
          GTEST_SKIP() << "fewer devices than ranks, which wait for each other in the default stream of one";
        std::vector<std::unique_ptr<CudaDevice>> devices;
        std::vector<void*> streams;
        std::vector<moecclComm_t> comms(static_cast<size_t>(n));
        moecclUniqueId id;
        MOECCL_ASSERT_OK(moecclGetUniqueId(&id));
        MOECCL_ASSERT_OK(moecclGroupStart());
        moecclConfig_t config = device_options(RankMode::kThreads).config;
        for (int r = 0; r < n; ++r) {
          devices.push_back(std::make_unique<CudaDevice>(r));
          ASSERT_TRUE(devices.back()->ok());
          streams.push_back(named_streams ? reinterpret_cast<void*>(1) : devices.back()->make_stream());
          MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comms[static_cast<size_t>(r)], n, id, r, &config));
        }
        MOECCL_ASSERT_OK(moecclGroupEnd());
        std::vector<std::unique_ptr<DeviceBuffer>> in, out;
        for (int r = 0; r < n; ++r) {
          devices[static_cast<size_t>(r)]->make_current();
          in.push_back(std::make_unique<DeviceBuffer>(*devices[static_cast<size_t>(r)], kCount * 4));
          out.push_back(std::make_unique<DeviceBuffer>(*devices[static_cast<size_t>(r)], kCount * 4));
          in.back()->put(floats(kCount, static_cast<float>(r)), nullptr);
        }
        for (int round = 0; round < 3; ++round) {
          MOECCL_ASSERT_OK(moecclGroupStart());
          for (size_t r = 0; r < comms.size(); ++r) {
            if (round == 1) {  // driven by a thread of the library
              const int to = static_cast<int>(r + 1) % n, from = static_cast<int>(r + comms.size() - 1) % n;
              MOECCL_EXPECT_OK(moecclSend(in[r]->data(), kCount, moecclFloat32, to, comms[r], as_stream(streams[r])));
              MOECCL_EXPECT_OK(
                  moecclRecv(out[r]->data(), kCount, moecclFloat32, from, comms[r], as_stream(streams[r])));
              continue;
            }
            MOECCL_EXPECT_OK(moecclAllReduce(in[r]->data(), out[r]->data(), kCount, moecclFloat32, moecclSum, comms[r],
                                             as_stream(streams[r])));
          }
          MOECCL_ASSERT_OK(moecclGroupEnd());
          for (size_t r = 0; r < comms.size(); ++r) {
            devices[r]->make_current();
            const auto before = static_cast<float>((r + comms.size() - 1) % comms.size());
            const float want = round == 1 ? before : static_cast<float>(n * (n - 1) / 2);
            EXPECT_EQ(out[r]->get(streams[r]), floats(kCount, want)) << "rank " << r << ", round " << round;
          }
        }
        for (size_t r = 0; r < comms.size(); ++r) {
          devices[r]->make_current();
          MOECCL_EXPECT_OK(moecclCommFinalize(comms[r]));
        }
        for (size_t r = 0; r < comms.size(); ++r) {
          devices[r]->make_current();
          in[r] = nullptr, out[r] = nullptr;
          MOECCL_EXPECT_OK(moecclCommDestroy(comms[r]));
          if (!named_streams) devices[r]->end_stream(streams[r]);
        }
      },
      device_options(RankMode::kProcesses));
}

class CudaStreams : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("MOECCL_TEST_CUDA_DEVICES");
    unsetenv("MOECCL_CUDA_PERSISTENT");
    unsetenv("MOECCL_TEST_CUDA_CHANNELS");
    unsetenv("MOECCL_TEST_CUDA_CHANNEL_POOL");
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    unsetenv("MOECCL_TEST_CUDA_FAIL");
  }
};

TEST_F(CudaStreams, OneThreadMayWorkOnSeveralDevices) {
  setenv("MOECCL_TEST_CUDA_DEVICES", "4", 1);
  one_thread(4, false);
}
TEST_F(CudaStreams, TheDefaultStreamIsThatOfTheCommunicatorsDevice) {
  setenv("MOECCL_TEST_CUDA_DEVICES", "4", 1);
  one_thread(4, true);
}
TEST_F(CudaStreams, OneThreadMayWorkOnSeveralDevicesStepByStep) {
  setenv("MOECCL_TEST_CUDA_DEVICES", "4", 1);
  setenv("MOECCL_CUDA_PERSISTENT", "0", 1);
  one_thread(4, false);
}

TEST_F(CudaStreams, OfAnotherDeviceAreRefused) {
  setenv("MOECCL_TEST_CUDA_DEVICES", "2", 1);
  run_on_devices(
      2, device_options(RankMode::kProcesses), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        if (!device.emulated()) GTEST_SKIP() << "needs a second device";
        CudaDevice second(rank + 1);
        void* foreign = second.make_stream();
        device.make_current();
        DeviceBuffer in(device, 64), out(device, 64);
        EXPECT_EQ(moecclAllReduce(in.data(), out.data(), 16, moecclFloat32, moecclSum, comm, as_stream(foreign)),
                  moecclInvalidUsage);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("stream belongs to another CUDA context"),
                  std::string::npos)
            << moecclGetLastError(comm);
        MOECCL_EXPECT_OK(moecclAllReduce(in.data(), out.data(), 16, moecclFloat32, moecclSum, comm, as_stream(stream)));
        device.synchronize(stream);
        second.end_stream(foreign);
      });
}

// A rank's message to itself may cross between device memory and page-locked memory, but not ordinary memory.
TEST_F(CudaStreams, ServeMessagesToOneselfBetweenKindsOfMemory) {
  run_on_devices(2, device_options(RankMode::kProcesses), [](int rank, moecclComm_t comm, CudaDevice& device, void* s) {
    DeviceBuffer on_device(device, kCount * 4);
    auto* const locked = static_cast<float*>(device.lock(kCount * 4));
    std::vector<float> ordinary(kCount, -1);
    const auto to_itself = [&](const void* from, void* to) {
      MOECCL_EXPECT_OK(moecclGroupStart());
      MOECCL_EXPECT_OK(moecclSend(from, kCount, moecclFloat32, rank, comm, as_stream(s)));
      MOECCL_EXPECT_OK(moecclRecv(to, kCount, moecclFloat32, rank, comm, as_stream(s)));
      return moecclGroupEnd();
    };
    std::fill(locked, locked + kCount, 3.0f);
    on_device.put(floats(kCount, 5), nullptr);
    MOECCL_EXPECT_OK(to_itself(locked, on_device.data()));
    EXPECT_EQ(on_device.get(s), floats(kCount, 3));
    const std::vector<char> sevens = floats(kCount, 7);  // until the copy has run
    on_device.put(sevens, s);
    MOECCL_EXPECT_OK(to_itself(on_device.data(), locked));
    device.synchronize(s);
    EXPECT_EQ(std::vector<float>(locked, locked + kCount), std::vector<float>(kCount, 7));
    for (const bool sends : {true, false}) {
      EXPECT_EQ(sends ? to_itself(on_device.data(), ordinary.data()) : to_itself(ordinary.data(), on_device.data()),
                moecclInvalidArgument);
      EXPECT_EQ(ordinary, std::vector<float>(kCount, -1));
    }
    device.end_lock(locked);
  });
}

// The default stream waits for such a stream, which waits for an operation: this one must not wait for the default
// stream as it is when the operation begins.
TEST_F(CudaStreams, ThatTheDefaultStreamWaitsForStandBesideCallsWithoutOne) {
  setenv("MOECCL_CUDA_PERSISTENT", "0", 1);
  run_on_devices(2, device_options(RankMode::kProcesses), [](int rank, moecclComm_t comm, CudaDevice& device, void*) {
    DeviceBuffer a(device, kCount * 4), b(device, kCount * 4);
    void* const s = device.make_stream(0);
    moecclStream_t host = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&host));
    const auto sum = [&](DeviceBuffer& x, moecclStream_t on) {
      return moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, on);
    };
    for (DeviceBuffer* x : {&a, &b}) x->put(floats(kCount, 1), nullptr);
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(sum(a, nullptr));
    MOECCL_EXPECT_OK(sum(b, as_stream(s)));
    MOECCL_EXPECT_OK(moecclGroupEnd());
    device.synchronize(s);
    EXPECT_EQ(a.get(), floats(kCount, 2));
    EXPECT_EQ(b.get(), floats(kCount, 2));
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    MOECCL_EXPECT_OK(sum(a, host));
    MOECCL_EXPECT_OK(sum(a, host));
    MOECCL_EXPECT_OK(sum(b, as_stream(s)));
    device.synchronize(s);
    MOECCL_EXPECT_OK(moecclStreamSynchronize(host));
    EXPECT_EQ(a.get(), floats(kCount, 8));
    EXPECT_EQ(b.get(), floats(kCount, 4));
    MOECCL_EXPECT_OK(moecclStreamDestroy(host));
    device.end_stream(s);
  });
}

// Each operation's number must reach the proxy in the order in which the stream waits for it.
TEST_F(CudaStreams, MayBeSharedByThreadsOfSeveralCommunicators) {
  setenv("MOECCL_CUDA_PERSISTENT", "0", 1);
  run_ranks(
      1,
      [](int, moecclComm_t) {
        constexpr int kThreads = 4, kTimes = 200;
        CudaDevice device(0);
        ASSERT_TRUE(device.ok());
        void* stream = device.make_stream();
        std::vector<std::unique_ptr<DeviceBuffer>> sums;
        for (int t = 0; t < kThreads; ++t) {
          sums.push_back(std::make_unique<DeviceBuffer>(device, kCount * 4));
          sums.back()->put(floats(kCount, static_cast<float>(t)));
        }
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t) {
          threads.emplace_back([&, t] {
            device.make_current();
            moecclConfig_t config = device_options(RankMode::kThreads).config;
            moecclUniqueId id;
            moecclComm_t comm = nullptr;
            MOECCL_ASSERT_OK(moecclGetUniqueId(&id));
            MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 1, id, 0, &config));
            void* data = sums[static_cast<size_t>(t)]->data();
            for (int i = 0; i < kTimes; ++i)
              MOECCL_EXPECT_OK(moecclAllReduce(data, data, kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
            MOECCL_EXPECT_OK(moecclCommFinalize(comm));
            MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          });
        }
        for (std::thread& t : threads) t.join();
        for (int t = 0; t < kThreads; ++t)
          EXPECT_EQ(sums[static_cast<size_t>(t)]->get(stream), floats(kCount, static_cast<float>(t)));
        sums.clear();
        device.end_stream(stream);
      },
      device_options(RankMode::kProcesses));
}

// Work that cannot take its place in the caller's stream must not run without it, and must not succeed.
void refused_by_the_driver(const char* function) {
  // Processes on one device are driven step by step.
  run_on_devices(
      2, device_options(RankMode::kProcesses), [=](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
        if (!device.emulated()) GTEST_SKIP() << "needs a driver that fails on purpose";
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4);
        in.put(floats(kCount, 1));
        MOECCL_EXPECT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        EXPECT_EQ(sum.get(stream), floats(kCount, 2));
        if (rank == 0) device.refuse(function, 999);
        const moecclResult_t called =
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclMax, comm, as_stream(stream));
        if (rank == 0) {
          EXPECT_EQ(called, moecclSystemError);
        }
        moecclResult_t state = moecclSuccess;
        const std::string said = failure_of(comm, &state);
        EXPECT_NE(state, moecclSuccess);
        EXPECT_NE(said.find("the given CUDA stream"), std::string::npos) << said;
        EXPECT_NE(said.find("(999)"), std::string::npos) << said;
        device.synchronize(stream);  // does not hang
        EXPECT_EQ(sum.get(stream), floats(kCount, 2)) << "the refused operation has run";
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
        comm = nullptr;
      });
}
TEST_F(CudaStreams, ThatCannotRecordAnEventFailAllRanks) { refused_by_the_driver("cuEventRecord"); }
TEST_F(CudaStreams, ThatCannotWaitFailAllRanks) { refused_by_the_driver("cuStreamWaitValue64_v2"); }

// Two communicators whose streams share the only channel. The operation of one ends before the other's stream gets
// there.
TEST_F(CudaStreams, OfOneChannelServeSeveralCommunicators) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  run_on_devices(2, device_options(RankMode::kProcesses), [](int rank, moecclComm_t comm, CudaDevice& device, void* s) {
    moecclComm_t second = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &second, nullptr));
    void* other = device.make_stream();
    DeviceBuffer a(device, kCount * 4), b(device, kCount * 4);
    a.put(floats(kCount, 1));
    b.put(floats(kCount, 2));
    for (int i = 0; i < 3; ++i) {
      MOECCL_EXPECT_OK(moecclAllReduce(b.data(), b.data(), kCount, moecclFloat32, moecclMax, second, as_stream(other)));
      MOECCL_EXPECT_OK(moecclAllReduce(a.data(), a.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(s)));
      MOECCL_EXPECT_OK(moecclStreamSynchronize(as_stream(other)));
      MOECCL_EXPECT_OK(moecclStreamSynchronize(as_stream(s)));
    }
    EXPECT_EQ(a.get(s), floats(kCount, 8));
    EXPECT_EQ(b.get(other), floats(kCount, 2));
    MOECCL_EXPECT_OK(moecclCommDestroy(second));
    device.end_stream(other);
  });
}

// Each rank sends on one stream and receives on another, which may share a hardware channel. Both streams wait for both
// messages, and the messages wait for the earlier work of both.
void exchange_on_two_streams() {
  run_on_devices(2, device_options(RankMode::kProcesses), [](int rank, moecclComm_t comm, CudaDevice& device, void*) {
    constexpr size_t kLarge = 2'000'000;
    void* streams[2] = {device.make_stream(), device.make_stream()};
    DeviceBuffer out(device, kLarge * 4), in(device, kLarge * 4);
    for (int i = 0; i < 4; ++i) {
      void *sends = streams[(rank + i) % 2], *receives = streams[(rank + i + 1) % 2];
      const std::vector<char> given = floats(kLarge, static_cast<float>(10 * rank + i));  // until the copy has run
      out.put(given, sends);
      MOECCL_EXPECT_OK(moecclGroupStart());
      MOECCL_EXPECT_OK(moecclSend(out.data(), kLarge, moecclFloat32, 1 - rank, comm, as_stream(sends)));
      MOECCL_EXPECT_OK(moecclRecv(in.data(), kLarge, moecclFloat32, 1 - rank, comm, as_stream(receives)));
      MOECCL_EXPECT_OK(moecclGroupEnd());
      // The stream of the Send waits for the Recv, too.
      EXPECT_EQ(in.get(sends), floats(kLarge, static_cast<float>(10 * (1 - rank) + i)));
      device.synchronize(receives);
    }
    for (void* s : streams) device.end_stream(s);
  });
}
TEST_F(CudaStreams, ServeAGroupTogether) { exchange_on_two_streams(); }
TEST_F(CudaStreams, OfOneChannelServeAGroupTogether) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  exchange_on_two_streams();
}

// The driver's calls that free memory wait for all work of the context, and let no other call return meanwhile.
TEST_F(CudaStreams, OfAnOperationInFlightDoNotHoldUpTheEndOfAnotherCommunicator) {
  constexpr size_t kLarge = 2'000'000;  // more than a message without a receiver takes
  std::barrier both(2);
  run_on_devices(2, device_options(RankMode::kThreads), [&](int rank, moecclComm_t comm, CudaDevice& device, void* s) {
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &other, nullptr));
    DeviceBuffer x(device, kLarge * 4);
    x.put(floats(kLarge, static_cast<float>(rank)));
    if (rank == 0) {
      MOECCL_EXPECT_OK(moecclSend(x.data(), kLarge, moecclFloat32, 1, comm, as_stream(s)));
    }
    both.arrive_and_wait();
    EXPECT_EQ(moecclCommDestroy(other), moecclSuccess);
    both.arrive_and_wait();  // the Recv comes after both have destroyed the other communicator
    if (rank == 1) {
      MOECCL_EXPECT_OK(moecclRecv(x.data(), kLarge, moecclFloat32, 0, comm, as_stream(s)));
    }
    EXPECT_EQ(x.get(s), floats(kLarge, 0));
  });
}

// The new context and its streams may have the addresses of the old ones.
TEST_F(CudaStreams, OfAContextThatWasResetAreForgotten) {
  std::barrier both(2);
  static moecclUniqueId id;
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        for (int round = 0; round < 3; ++round) {
          CudaDevice device;
          moecclComm_t comm = nullptr;
          if (rank == 0) {
            MOECCL_ASSERT_OK(moecclGetUniqueId(&id));
          }
          both.arrive_and_wait();
          MOECCL_ASSERT_OK(moecclCommInitRank(&comm, 2, id, rank));
          void* const stream = device.make_stream();
          {
            DeviceBuffer in(device, kCount * 4), came(device, kCount * 4);
            in.put(floats(kCount, static_cast<float>(rank)));
            both.arrive_and_wait();  // the copy waits for the thread's own stream of the other rank, too
            MOECCL_EXPECT_OK(moecclGroupStart());
            for (void* const s : {stream, reinterpret_cast<void*>(2)}) {  // the second is CU_STREAM_PER_THREAD
              MOECCL_EXPECT_OK(moecclSend(in.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(s)));
              MOECCL_EXPECT_OK(moecclRecv(came.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(s)));
            }
            MOECCL_EXPECT_OK(moecclGroupEnd());
            EXPECT_EQ(came.get(stream), floats(kCount, static_cast<float>(1 - rank)));
            device.synchronize(reinterpret_cast<void*>(2));
          }
          device.end_stream(stream);
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          both.arrive_and_wait();
          if (rank == 0) device.reset();
          both.arrive_and_wait();
        }
      },
      device_options(RankMode::kThreads));
}

// Where the first launch of any kernel may wait for all streams, no stream may wait for a thread, and never the legacy
// default stream.
TEST_F(CudaStreams, WaitForAThreadOnlyWhereKernelsAreLoadedEagerly) {
  for (const char* const mode : {"LAZY", "EAGER"}) {
    const Setting loading("CUDA_MODULE_LOADING", mode), steps("MOECCL_CUDA_PERSISTENT", "0");
    run_on_devices(
        2, device_options(RankMode::kProcesses), [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
          if (!device.emulated()) GTEST_SKIP() << "only the emulated driver counts its calls";
          DeviceBuffer x(device, kCount * 4);
          for (void* const s : {stream, reinterpret_cast<void*>(1)}) {
            x.put(floats(kCount, static_cast<float>(rank)));
            const uint64_t before = device.own_calls("cuStreamWaitValue64_v2");
            MOECCL_EXPECT_OK(moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(s)));
            const bool waits = std::string(mode) == "EAGER" && s == stream;
            EXPECT_EQ(device.own_calls("cuStreamWaitValue64_v2") - before, waits ? 1u : 0u) << mode;
            EXPECT_EQ(x.get(s), floats(kCount, 1));
          }
        });
  }
}

// cuMemFree does what the first launch of a kernel that is loaded lazily does: it waits for all streams, and no other
// call of the context returns meanwhile, also none of the thread that drives the operation.
TEST_F(CudaStreams, OfACallThatAThreadDrivesDoNotHangTheProgramsNextCall) {
  const Setting lazy("CUDA_MODULE_LOADING", "LAZY"), steps("MOECCL_CUDA_PERSISTENT", "0");
  run_on_devices(2, device_options(RankMode::kProcesses, 60'000, 10'000),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   DeviceBuffer x(device, kCount * 4);
                   x.put(floats(kCount, static_cast<float>(rank)));
                   void* const other = device.allocate(4096);
                   all_have_ended(comm);
                   if (rank == 1) usleep(200'000);
                   MOECCL_EXPECT_OK(
                       moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
                   device.release(other);
                   EXPECT_EQ(x.get(stream), floats(kCount, 1));
                 });
}

// A hardware channel runs the work of its streams in turn, so a caller's stream that waits for an operation must not
// block the library's own stream.
void more_streams_than_channels(RankMode mode) {
  run_on_devices(2, device_options(mode), [](int, moecclComm_t comm, CudaDevice& device, void*) {
    DeviceBuffer in(device, kCount * 4);
    in.put(floats(kCount, 1));
    std::vector<void*> streams;
    std::vector<std::unique_ptr<DeviceBuffer>> sums;
    for (int i = 0; i < 40; ++i) {  // first, because a new stream's work may need a channel that waits
      streams.push_back(device.make_stream());
      sums.push_back(std::make_unique<DeviceBuffer>(device, kCount * 4));
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      MOECCL_EXPECT_OK(
          moecclAllReduce(in.data(), sums[i]->data(), kCount, moecclFloat32, moecclSum, comm, as_stream(streams[i])));
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      EXPECT_EQ(sums[i]->get(streams[i]), floats(kCount, 2));
      device.end_stream(streams[i]);
    }
  });
}

TEST_F(CudaStreams, MoreThanTheChannelsOfADeviceDoNotHoldUpAnOperation) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  more_streams_than_channels(RankMode::kProcesses);
}
// On an H100 the library's own streams have no channels of their own. Where all are taken, the call waits.
TEST_F(CudaStreams, MoreThanTheChannelsOfAPoolDoNotHoldUpAnOperation) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  setenv("MOECCL_TEST_CUDA_CHANNEL_POOL", "1", 1);
  more_streams_than_channels(RankMode::kProcesses);
}
// Thread ranks use the persistent kernel. A stream whose launch comes after one on another stream waits for that one,
// whose kernel waits for the other rank's, which needs a channel too.
TEST_F(CudaStreams, MoreThanTheChannelsOfAPoolDoNotHoldUpAPersistentKernel) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  setenv("MOECCL_TEST_CUDA_CHANNEL_POOL", "1", 1);
  more_streams_than_channels(RankMode::kThreads);
}
TEST_F(CudaStreams, OfAPoolOfOneChannelDoNotHoldUpAnOperation) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  setenv("MOECCL_TEST_CUDA_CHANNEL_POOL", "1", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  more_streams_than_channels(RankMode::kProcesses);
  exchange_on_two_streams();
}

// A part is on its parent's device, also when it has a config and another device is current on the calling thread.
TEST_F(CudaStreams, OfAPartAreThoseOfItsParentsDevice) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  const RankOptions options = device_options(RankMode::kThreads);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice own(0);
        moecclComm_t comm = join(rank, 2, own, options), parts[2] = {};
        ASSERT_NE(comm, nullptr);
        CudaDevice other(1);  // becomes current
        MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &parts[0], &options.config));
        MOECCL_ASSERT_OK(moecclCommShrink(comm, nullptr, 0, &parts[1], &options.config, MOECCL_SHRINK_DEFAULT));
        own.make_current();
        void* const stream = own.make_stream();
        {
          DeviceBuffer x(own, 16 * 4);
          for (moecclComm_t part : parts) {
            x.put(floats(16, static_cast<float>(rank + 1)));
            MOECCL_EXPECT_OK(
                moecclAllReduce(x.data(), x.data(), 16, moecclFloat32, moecclSum, part, as_stream(stream)));
            EXPECT_EQ(x.get(stream), floats(16, 3));
          }
        }
        for (moecclComm_t part : parts) MOECCL_EXPECT_OK(moecclCommDestroy(part));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        own.end_stream(stream);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
