// SPDX-License-Identifier: Apache-2.0
// The persistent kernel through the C interface: graphs, alternating streams, several communicators, failures.
// collectives_test.cc, whose thread ranks run on this kernel, tests that its results are right.
#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>
#include <utility>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

RankOptions walk_options() { return device_options(RankMode::kThreads, 90'000, 40'000); }

TEST(KernelSide, ACapturedOperationIsOneNodeAndRunsAtEveryReplay) {
  const RankOptions options = walk_options();
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 3, device, options);
        ASSERT_NE(comm, nullptr);
        constexpr size_t kCount = 3000;
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), all(device, 3 * kCount * 4);
        void* stream = device.make_stream();
        in.put(floats(kCount, 1));
        // One operation comes before, so that the graph does not begin at the first one.
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        device.synchronize(stream);
        device.begin_capture(stream);
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        MOECCL_ASSERT_OK(moecclAllGather(sum.data(), all.data(), kCount, moecclFloat32, comm, as_stream(stream)));
        const size_t counts[3] = {1, 1, 1}, displs[3] = {0, 1, 2};
        MOECCL_ASSERT_OK(moecclAllToAllv(in.data(), counts, displs, sum.data(), counts, displs, moecclFloat32, comm,
                                         as_stream(stream)));
        // Operations that a host thread drives cannot be captured, and the error says so: here a group of both kinds.
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        MOECCL_ASSERT_OK(moecclSend(in.data(), 1, moecclFloat32, (rank + 1) % 3, comm, as_stream(stream)));
        MOECCL_ASSERT_OK(moecclRecv(sum.data(), 1, moecclFloat32, (rank + 2) % 3, comm, as_stream(stream)));
        EXPECT_EQ(moecclGroupEnd(), moecclUnsupported);
        void* graph = device.end_capture(stream);
        ASSERT_NE(graph, nullptr);
        EXPECT_EQ(device.graph_kernels(graph), 3u);
        void* instance = device.instantiate(graph);
        all_have_ended(comm);
        for (int replay = 0; replay < 5; ++replay) {
          const float value = static_cast<float>(rank + replay);
          in.put(floats(kCount, value));
          device.launch_graph(instance, stream);
          const float want = static_cast<float>(3 * replay + 3);
          EXPECT_EQ(all.get(stream), floats(3 * kCount, want)) << "replay " << replay;
          std::vector<char> three = sum.get(stream);
          for (int r = 0; r < 3; ++r)
            EXPECT_EQ(
                std::memcmp(&three[static_cast<size_t>(r) * 4], floats(1, static_cast<float>(r + replay)).data(), 4),
                0);
          // Operations outside the graph continue with the same numbers.
          MOECCL_ASSERT_OK(
              moecclAllReduce(in.data(), sum.data(), 10, moecclFloat32, moecclMax, comm, as_stream(stream)));
          std::vector<char> ten = sum.get(stream);
          ten.resize(40);
          EXPECT_EQ(ten, floats(10, static_cast<float>(2 + replay)));
        }
        moecclResult_t state = moecclInternalError;
        while (moecclCommGetAsyncError(comm, &state) == moecclSuccess && state == moecclInProgress)
          std::this_thread::yield();
        EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
        device.end_graph(graph, instance);
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
        device.end_stream(stream);
      },
      options);
}

// Each capture gives the program 100 ms to reach the device, and a busy machine may need several of them. Returns the
// last capture.
std::pair<void*, void*> captured_often(CudaDevice& device, void* stream, const std::function<void()>& operation) {
  void *graph = nullptr, *instance = nullptr;
  for (int i = 0; i < 50; ++i) {
    if (graph != nullptr) device.end_graph(graph, instance);
    device.begin_capture(stream);
    operation();
    graph = device.end_capture(stream);
    instance = device.instantiate(graph);
  }
  return {graph, instance};
}

TEST(KernelSide, ProgramsAreReadAcrossTheBusOnceAtMost) {
  const RankOptions options = walk_options();
  run_on_devices(2, options, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (!device.emulated()) return;
    DeviceBuffer a(device, 4000);
    const auto reduce = [&] {
      MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 1000, moecclFloat32, moecclMax, comm, as_stream(stream)));
    };
    const auto [graph, instance] = captured_often(device, stream, reduce);  // makes the first launches of everything
    device.launch_graph(instance, stream);
    reduce();
    device.synchronize(stream);
    a.put(floats(1000, static_cast<float>(rank)));
    for (int i = 0; i < 5; ++i) {
      device.launch_graph(instance, stream);
      reduce();
    }
    EXPECT_EQ(a.get(stream), floats(1000, 1));
    std::printf("rank %d: %d bytes of programs read across the bus by both ranks' launches so far\n", rank,
                device.program_bytes());
    // Where streams lag, the first launches may be too early.
    if (std::getenv("MOECCL_TEST_CUDA_DELAY_US") == nullptr) {
      EXPECT_EQ(device.program_bytes(), 0);
    }
    device.end_graph(graph, instance);
  });
}

// A program's path to the device must not be blocked by callers' streams that wait, whatever channel they are in.
TEST(KernelSide, ProgramsPassCallersStreamsThatWait) {
  setenv("MOECCL_TEST_CUDA_CHANNELS", "1", 1);
  setenv("MOECCL_TEST_CUDA_MPS", "1", 1);
  RankOptions options = walk_options();
  options.mode = RankMode::kProcesses;
  run_on_devices(2, options, [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (!device.emulated()) return;
    DeviceBuffer a(device, 4000);
    a.put(floats(1000, 2));
    uint64_t* const word = device.make_word();
    std::vector<void*> held;
    for (int i = 0; i < 8; ++i) device.hold(held.emplace_back(device.make_stream()), word, 1);
    const auto [graph, instance] = captured_often(device, stream, [&] {
      MOECCL_EXPECT_OK(moecclAllReduce(a.data(), a.data(), 1000, moecclFloat32, moecclSum, comm, as_stream(stream)));
    });
    std::atomic_ref(*word).store(1);
    for (void* s : held) device.end_stream(s);
    device.launch_graph(instance, stream);
    EXPECT_EQ(a.get(stream), floats(1000, 4));
    EXPECT_EQ(device.program_bytes(), 0) << "the capture keeps the program that lies across the bus";
    device.end_graph(graph, instance);
    device.end_word(word);
  });
  unsetenv("MOECCL_TEST_CUDA_CHANNELS");
  unsetenv("MOECCL_TEST_CUDA_MPS");
}

// All ranks share one device. The persistent kernel, the only way that can be captured, exists if and only if MPS does.
void processes_on_one_device(const char* mps) {
  setenv("MOECCL_TEST_CUDA_MPS", mps, 1);
  RankOptions options = walk_options();
  options.mode = RankMode::kProcesses;
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        const bool side_by_side = device.shared_by_mps();
        moecclComm_t comm = join(rank, 3, device, options);
        ASSERT_NE(comm, nullptr);
        constexpr size_t kCount = 5000;
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4);
        void* stream = device.make_stream();
        device.begin_capture(stream);
        const moecclResult_t captured =
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream));
        void* graph = device.end_capture(stream);
        EXPECT_EQ(captured, side_by_side ? moecclSuccess : moecclUnsupported) << moecclGetLastError(comm);
        if (captured == moecclSuccess) {
          void* instance = device.instantiate(graph);
          all_have_ended(comm);
          for (int replay = 0; replay < 3; ++replay) {
            in.put(floats(kCount, static_cast<float>(rank + replay)));
            device.launch_graph(instance, stream);
            EXPECT_EQ(sum.get(stream), floats(kCount, static_cast<float>(3 * replay + 3))) << "replay " << replay;
          }
          device.end_graph(graph, instance);
        }
        // Outside graphs both ways work.
        in.put(floats(kCount, 2));
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        EXPECT_EQ(sum.get(stream), floats(kCount, 6));
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
        device.end_stream(stream);
      },
      options);
  unsetenv("MOECCL_TEST_CUDA_MPS");
}

TEST(KernelSide, ProcessesOnOneDeviceTakeTurnsWithoutMps) { processes_on_one_device("0"); }
// With a GPU this needs MPS, which tools/gpu-check starts.
TEST(KernelSide, ProcessesOnOneDeviceWaitForEachOtherUnderMps) { processes_on_one_device("1"); }

TEST(KernelSide, StreamsInTurnBlockingCallsAndGroupsKeepTheOrderOfCalls) {
  const RankOptions options = walk_options();
  run_ranks(
      4,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 4, device, options);
        ASSERT_NE(comm, nullptr);
        DeviceBuffer a(device, 4000), b(device, 4000);
        void* streams[2] = {device.make_stream(), device.make_stream()};
        moecclStream_t host_stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&host_stream));
        a.put(floats(1000, 1), nullptr);
        b.put(floats(1000, 1), nullptr);
        const auto reduce = [&](DeviceBuffer& x, moecclStream_t s) {
          MOECCL_ASSERT_OK(moecclAllReduce(x.data(), x.data(), 1000, moecclFloat32, moecclAvg, comm, s));
        };
        for (int i = 0; i < scaled(12); ++i) {
          reduce(a, as_stream(streams[i % 2]));
          if (i % 5 == 1) reduce(b, host_stream);  // a thread launches it, and no other operation may overtake it
          reduce(b, as_stream(streams[(i + 1) % 2]));
          if (i % 4 == 2) reduce(a, nullptr);
          if (i % 3 == 0) {
            MOECCL_ASSERT_OK(moecclGroupStart());
            reduce(a, as_stream(streams[0]));
            reduce(b, as_stream(streams[0]));
            MOECCL_ASSERT_OK(moecclGroupEnd());
          }
          if (i % 6 == 5) {  // in between comes one that a thread drives
            const size_t counts[4] = {1, 1, 1, 1}, displs[4] = {0, 1, 2, 3};
            MOECCL_ASSERT_OK(moecclAllToAllv(a.data(), counts, displs, b.data(), counts, displs, moecclFloat32, comm,
                                             as_stream(streams[i % 2])));
          }
        }
        MOECCL_ASSERT_OK(moecclStreamSynchronize(host_stream));
        device.synchronize(streams[0]);
        device.synchronize(streams[1]);
        EXPECT_EQ(a.get(), floats(1000, 1));
        EXPECT_EQ(b.get(), floats(1000, 1));
        MOECCL_ASSERT_OK(moecclStreamDestroy(host_stream));
        EXPECT_EQ(moecclCommDestroy(comm), moecclSuccess);
        for (void* s : streams) device.end_stream(s);
      },
      options);
}

// A group that cannot be captured issues none of its calls, also not those on other streams.
TEST(KernelSide, AGroupThatCannotBeCapturedIssuesNothing) {
  const RankOptions options = walk_options();
  std::atomic<int> refused{0};  // ranks whose group has ended
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comms[4] = {join(rank, 2, device, options)};
        ASSERT_NE(comms[0], nullptr);
        for (int i = 1; i < 4; ++i) MOECCL_ASSERT_OK(moecclCommSplit(comms[0], 0, rank, &comms[i], nullptr));
        DeviceBuffer a(device, 4000), b(device, 4000);
        a.put(floats(1000, 1), nullptr);
        b.put(floats(1000, 1), nullptr);
        void* streams[2] = {device.make_stream(), device.make_stream()};
        moecclStream_t host_stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&host_stream));
        const auto reduce = [&](DeviceBuffer& x, moecclComm_t c, moecclStream_t s) {
          return moecclAllReduce(x.data(), x.data(), 1000, moecclFloat32, moecclSum, c, s);
        };
        // The host stream launches its operation only after both groups: it first waits for the peer's message.
        int32_t word = 0;
        MOECCL_ASSERT_OK(moecclRecv(&word, 1, moecclInt32, 1 - rank, comms[2 + rank], host_stream));
        MOECCL_ASSERT_OK(reduce(b, comms[1], host_stream));
        device.begin_capture(streams[1]);
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(reduce(a, comms[0], as_stream(streams[0])));
        MOECCL_EXPECT_OK(reduce(b, comms[1], as_stream(streams[1])));
        EXPECT_EQ(moecclGroupEnd(), moecclUnsupported);
        device.end_capture(streams[1]);
        refused.fetch_add(1);
        while (refused.load() < 2) std::this_thread::yield();
        int32_t sent = 1;
        MOECCL_EXPECT_OK(moecclSend(&sent, 1, moecclInt32, 1 - rank, comms[3 - rank], nullptr));
        MOECCL_EXPECT_OK(moecclStreamSynchronize(host_stream));
        device.synchronize(streams[0]);
        EXPECT_EQ(a.get(), floats(1000, 1)) << "nothing may have run";
        EXPECT_EQ(b.get(), floats(1000, 2));
        MOECCL_EXPECT_OK(moecclStreamDestroy(host_stream));
        for (moecclComm_t c : comms) MOECCL_EXPECT_OK(moecclCommDestroy(c));
        for (void* s : streams) device.end_stream(s);
      },
      options);
}

// As on host memory: the call's place in the group counts, and peers may use other streams.
TEST(KernelSide, AGroupKeepsTheOrderOfItsCallsOnWhateverStreams) {
  run_on_devices(2, walk_options(), [](int rank, moecclComm_t comm, CudaDevice& device, void* first) {
    DeviceBuffer a(device, 4000), b(device, 4000), c(device, 4000);
    a.put(floats(1000, static_cast<float>(rank + 1)), nullptr);
    b.put(floats(1000, static_cast<float>(rank + 5)), nullptr);
    c.put(floats(1000, static_cast<float>(rank + 7)), nullptr);
    void* second = device.make_stream();
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(moecclAllReduce(a.data(), a.data(), 1000, moecclFloat32, moecclSum, comm, as_stream(first)));
    MOECCL_EXPECT_OK(
        moecclBroadcast(b.data(), b.data(), 1000, moecclFloat32, 0, comm, as_stream(rank == 0 ? first : second)));
    MOECCL_EXPECT_OK(moecclAllReduce(c.data(), c.data(), 1000, moecclFloat32, moecclMax, comm, as_stream(first)));
    MOECCL_EXPECT_OK(moecclGroupEnd());
    for (void* s : {first, second}) device.synchronize(s);
    EXPECT_EQ(a.get(), floats(1000, 3));
    EXPECT_EQ(b.get(), floats(1000, 5));
    EXPECT_EQ(c.get(), floats(1000, 8));
    device.end_stream(second);
  });
}

// The second communicator keeps the first stream's calls from being launched at once. Those of the first communicator
// on the other stream must not overtake them.
TEST(KernelSide, AGroupKeepsTheOrderOfItsCallsWhereAHostThreadLaunchesSomeOfThem) {
  run_on_devices(2, walk_options(), [](int rank, moecclComm_t comm, CudaDevice& device, void* first) {
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &other, nullptr));
    DeviceBuffer a(device, 4000), b(device, 4000), c(device, 4000), d(device, 4000), e(device, 4000);
    for (DeviceBuffer* x : {&a, &b, &c, &d}) x->put(floats(1000, static_cast<float>(rank + 1)), nullptr);
    void *second = device.make_stream(), *third = device.make_stream();
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(moecclAllReduce(a.data(), a.data(), 1000, moecclFloat32, moecclSum, comm, as_stream(first)));
    MOECCL_EXPECT_OK(
        moecclBroadcast(b.data(), b.data(), 1000, moecclFloat32, 0, comm, as_stream(rank == 0 ? second : first)));
    MOECCL_EXPECT_OK(moecclAllReduce(c.data(), c.data(), 1000, moecclFloat32, moecclMax, other, as_stream(first)));
    MOECCL_EXPECT_OK(moecclSend(d.data(), 1000, moecclFloat32, 1 - rank, other, as_stream(third)));
    MOECCL_EXPECT_OK(moecclRecv(e.data(), 1000, moecclFloat32, 1 - rank, other, as_stream(third)));
    MOECCL_EXPECT_OK(moecclGroupEnd());
    for (void* s : {first, second, third}) device.synchronize(s);
    EXPECT_EQ(a.get(), floats(1000, 3));
    EXPECT_EQ(b.get(), floats(1000, 1));
    EXPECT_EQ(c.get(), floats(1000, 2));
    EXPECT_EQ(e.get(), floats(1000, static_cast<float>(2 - rank)));
    MOECCL_EXPECT_OK(moecclCommDestroy(other));
    for (void* s : {second, third}) device.end_stream(s);
  });
}

TEST(KernelSide, OneThreadDrivesSeveralRanksInAGroup) {
  const RankOptions options = walk_options();
  run_ranks(
      1,
      [&](int, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comms[3] = {};
        MOECCL_ASSERT_OK(moecclCommInitAll(comms, 3, &options.config));
        std::vector<std::unique_ptr<DeviceBuffer>> buffers;
        std::vector<void*> streams;
        for (int r = 0; r < 3; ++r) {
          buffers.push_back(std::make_unique<DeviceBuffer>(device, 400));
          streams.push_back(device.make_stream());
          buffers[static_cast<size_t>(r)]->put(floats(100, static_cast<float>(r)), nullptr);
        }
        for (const bool on_streams : {true, false}) {
          MOECCL_ASSERT_OK(moecclGroupStart());
          for (size_t r = 0; r < 3; ++r) {
            MOECCL_ASSERT_OK(moecclAllReduce(buffers[r]->data(), buffers[r]->data(), 100, moecclFloat32, moecclSum,
                                             comms[r], on_streams ? as_stream(streams[r]) : nullptr));
          }
          MOECCL_ASSERT_OK(moecclGroupEnd());
          for (size_t r = 0; r < 3; ++r)
            EXPECT_EQ(buffers[r]->get(on_streams ? streams[r] : nullptr), floats(100, on_streams ? 3.0f : 9.0f));
        }
        for (size_t r = 0; r < 3; ++r) {
          EXPECT_EQ(moecclCommDestroy(comms[r]), moecclSuccess);
          device.end_stream(streams[r]);
        }
      },
      options);
}

// As many as PyTorch and Megatron make. Those that find no room on the device report it when they join, and still work.
TEST(KernelSide, ThirtyCommunicatorsOfADeviceAllWorkAndSomeOfThemOnThePersistentKernel) {
  RankOptions options = walk_options();
  options.config.staging_bytes = 256 << 10;
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        void* stream = device.make_stream();
        constexpr int kComms = 30;
        constexpr size_t kCount = 30'000;
        DeviceBuffer in(device, kCount * 4), out(device, kCount * 4);
        in.put(floats(kCount, 1));
        std::vector<moecclComm_t> comms;
        std::vector<int> on_kernel;
        for (int i = 0; i < kComms; ++i) {
          moecclComm_t comm = nullptr;
          if (i == 0)
            comm = join(rank, 2, device, options);
          else
            MOECCL_EXPECT_OK(moecclCommSplit(comms[0], 0, rank, &comm, nullptr));
          ASSERT_NE(comm, nullptr) << i;
          comms.push_back(comm);
        }
        for (int i = 0; i < kComms; ++i) {
          moecclComm_t comm = comms[static_cast<size_t>(i)];
          device.begin_capture(stream);
          const moecclResult_t captured =
              moecclAllReduce(in.data(), out.data(), 1, moecclFloat32, moecclSum, comm, as_stream(stream));
          void* graph = device.end_capture(stream);
          device.end_graph(graph, device.instantiate(graph));
          if (captured == moecclSuccess) on_kernel.push_back(i);
          for (const size_t count : {size_t{5}, kCount}) {
            MOECCL_ASSERT_OK(
                moecclAllReduce(in.data(), out.data(), count, moecclFloat32, moecclSum, comm, as_stream(stream)));
            std::vector<char> sum = out.get(stream);
            sum.resize(count * 4);
            EXPECT_EQ(sum, floats(count, 2)) << "communicator " << i;
            const size_t half = count / 2, counts[2] = {half, half}, displs[2] = {0, half};
            MOECCL_ASSERT_OK(moecclAllToAllv(in.data(), counts, displs, out.data(), counts, displs, moecclFloat32, comm,
                                             as_stream(stream)));
            std::vector<char> swapped = out.get(stream);
            swapped.resize(2 * half * 4);
            EXPECT_EQ(swapped, floats(2 * half, 1)) << "communicator " << i;
          }
        }
        std::printf("rank %d: %zu of %d communicators have a persistent kernel\n", rank, on_kernel.size(), kComms);
        // The emulated device holds 128 blocks, 8 for each rank. Which communicators find room does not depend on luck.
        if (device.emulated()) {
          EXPECT_EQ(on_kernel, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
        }
        while (!comms.empty()) {
          EXPECT_EQ(moecclCommDestroy(comms.back()), moecclSuccess);
          comms.pop_back();
        }
        device.end_stream(stream);
      },
      options);
}

TEST(KernelSide, AMissingThreadIsATimeoutThatNamesIt) {
  RankOptions options = walk_options();
  options.config.timeout_ms = 1000;
  for (const bool on_stream : {false, true}) {
    run_ranks(
        2,
        [&](int rank, moecclComm_t) {
          CudaDevice device;
          moecclComm_t comm = join(rank, 2, device, options);
          ASSERT_NE(comm, nullptr);
          void* stream = device.make_stream();
          DeviceBuffer a(device, 4096);
          if (rank == 0) {
            const moecclResult_t result = moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm,
                                                          on_stream ? as_stream(stream) : nullptr);
            if (on_stream) {
              ASSERT_EQ(result, moecclSuccess);
              device.synchronize(stream);  // it ends, because the kernel leaves
              moecclResult_t state = moecclSuccess;
              for (int i = 0; i < 20'000 && (state == moecclSuccess || state == moecclInProgress); ++i) {
                ASSERT_EQ(moecclCommGetAsyncError(comm, &state), moecclSuccess);
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
              }
              EXPECT_EQ(state, moecclTimeout) << moecclGetErrorString(state);
            } else {
              EXPECT_EQ(result, moecclTimeout) << moecclGetLastError(comm);
            }
            for (const char* part : {"rank 1", "ranks share the device"})
              EXPECT_NE(std::string(moecclGetLastError(comm)).find(part), std::string::npos)
                  << moecclGetLastError(comm);
          } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(3000));
          }
          (void)moecclCommDestroy(comm);
          device.end_stream(stream);
        },
        options);
  }
}

TEST(KernelSide, OperationsOfTwoKindsInOnePlaceAreAMismatch) {
  const RankOptions options = walk_options();
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        DeviceBuffer a(device, 4096), b(device, 4096);
        const size_t counts[2] = {1, 1}, displs[2] = {0, 1};
        const moecclResult_t result =
            rank == 0
                ? moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr)
                : moecclAllToAllv(a.data(), counts, displs, b.data(), counts, displs, moecclFloat32, comm, nullptr);
        EXPECT_EQ(result, moecclMismatch) << moecclGetLastError(comm);
        const std::string text = moecclGetLastError(comm);
        EXPECT_NE(text.find("alltoallv"), std::string::npos) << text;
        (void)moecclCommDestroy(comm);
      },
      options);
}

TEST(KernelSide, AnAbortEndsTheKernels) {
  const RankOptions options = walk_options();
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        void* stream = device.make_stream();
        DeviceBuffer a(device, 4096);
        if (rank == 0) {
          MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
          device.synchronize(stream);
        }
        (void)moecclCommDestroy(comm);
        device.end_stream(stream);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
