// SPDX-License-Identifier: Apache-2.0
// Captures of the caller's CUDA streams, in every mode: on streams that were never used, beside other operations, of
// forked streams, and several at the same time.
#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 3000;

// CU_STREAM_CAPTURE_MODE_GLOBAL, _THREAD_LOCAL and _RELAXED. torch.cuda.graph uses the first.
class CudaCapture : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Modes, CudaCapture, ::testing::Values(0, 1, 2));

// In the first mode, a test's allocations and waits would end another thread rank's capture, so ranks begin and end
// together. A blocking call of the library itself does not end a capture.
void meet(moecclComm_t comm, const DeviceBuffer& word) {
  MOECCL_EXPECT_OK(moecclAllReduce(word.data(), word.data(), 1, moecclFloat32, moecclMax, comm, nullptr));
}

TEST_P(CudaCapture, MayBeginOnAStreamThatWasNeverUsed) {
  run_on_devices(2, device_options(RankMode::kThreads), [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), word(device, 4);
    in.put(floats(kCount, 2));
    meet(comm, word);
    device.begin_capture(stream, GetParam());
    MOECCL_EXPECT_OK(moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
    void* graph = device.end_capture(stream);
    meet(comm, word);
    ASSERT_NE(graph, nullptr);
    void* instance = device.instantiate(graph);
    meet(comm, word);
    for (int replay = 0; replay < 2; ++replay) device.launch_graph(instance, stream);
    EXPECT_EQ(sum.get(stream), floats(kCount, 4));
    MOECCL_EXPECT_OK(moecclStreamSynchronize(as_stream(stream)));
    device.end_graph(graph, instance);
  });
}

// Allocations and queries for other operations do not become part of a graph that some thread captures.
TEST_P(CudaCapture, IsNotEndedByOperationsOnOtherStreams) {
  run_on_devices(
      2, device_options(RankMode::kThreads), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), came(device, kCount * 4), word(device, 4);
        in.put(floats(kCount, 2));
        void* other = device.make_stream();
        meet(comm, word);
        device.begin_capture(stream, GetParam());
        MOECCL_EXPECT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        // A thread of the library drives these, and queries events and waits for its stream in the meantime.
        MOECCL_EXPECT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(moecclSend(in.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(other)));
        MOECCL_EXPECT_OK(moecclRecv(came.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(other)));
        MOECCL_EXPECT_OK(moecclGroupEnd());
        moecclResult_t state = moecclInProgress;
        while (moecclCommGetAsyncError(comm, &state) == moecclSuccess && state == moecclInProgress)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
        void* graph = device.end_capture(stream);
        meet(comm, word);
        ASSERT_NE(graph, nullptr);
        EXPECT_EQ(came.get(other), floats(kCount, 2));
        void* instance = device.instantiate(graph);
        meet(comm, word);
        device.launch_graph(instance, stream);
        EXPECT_EQ(sum.get(stream), floats(kCount, 4));
        device.end_graph(graph, instance);
        device.end_stream(other);
      });
}

// The second stream is forked from the first inside the capture, and nothing but the library joins it again.
TEST_P(CudaCapture, OrdersOperationsOnForkedStreams) {
  run_on_devices(2, device_options(RankMode::kThreads), [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), twice(device, kCount * 4), word(device, 4);
    in.put(floats(kCount, 2));
    void *forked = device.make_stream(), *event = device.make_event();
    void* graph = nullptr;
    for (int capture = 0; capture < 2; ++capture) {
      if (graph != nullptr) device.end_graph(graph, device.instantiate(graph));
      meet(comm, word);
      device.begin_capture(stream, GetParam());
      device.record(event, stream);
      device.wait_event(forked, event);
      MOECCL_EXPECT_OK(
          moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(forked)));
      MOECCL_EXPECT_OK(
          moecclAllReduce(sum.data(), twice.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
      graph = device.end_capture(stream);
      meet(comm, word);
      ASSERT_NE(graph, nullptr) << "the second operation does not follow the first";
    }
    void* instance = device.instantiate(graph);
    meet(comm, word);
    for (int replay = 0; replay < 2; ++replay) device.launch_graph(instance, stream);
    EXPECT_EQ(twice.get(stream), floats(kCount, 8));
    meet(comm, word);
    device.end_graph(graph, instance);
    device.end_event(event);
    device.end_stream(forked);
  });
}

// A program may mix replays and calls on streams that it does not order, as NCCL allows: they run in the order in which
// they were put there, on all ranks.
TEST_P(CudaCapture, IsReplayedInOrderWithCallsOnOtherStreams) {
  run_on_devices(
      2, device_options(RankMode::kThreads), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        constexpr int kRounds = 12;
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), own(device, kCount * 4), came(device, kCount * 4),
            word(device, 4);
        in.put(floats(kCount, 2));
        void* const other = device.make_stream();
        uint64_t* const gate = device.make_word();
        all_have_ended(comm);  // page-locking would wait for the other rank's kernel
        meet(comm, word);
        device.begin_capture(stream, GetParam());
        MOECCL_EXPECT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        MOECCL_EXPECT_OK(
            moecclAllReduce(sum.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        void* graph = device.end_capture(stream);
        meet(comm, word);
        ASSERT_NE(graph, nullptr);
        EXPECT_EQ(device.graph_kernels(graph), 2u);
        void* instance = device.instantiate(graph);
        meet(comm, word);
        for (uint64_t round = 1; round <= kRounds; ++round) {
          set_note("round " + std::to_string(round));
          const std::vector<char> values = floats(kCount, static_cast<float>(round));
          own.put(values, other);
          device.synchronize(other);
          // One of the streams begins late, another one on each rank.
          device.hold((rank == 0) == (round % 2 == 0) ? stream : other, gate, round);
          const auto call = [&] {
            if (round % 3 == 0) {
              MOECCL_EXPECT_OK(moecclGroupStart());
              MOECCL_EXPECT_OK(moecclSend(own.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(other)));
              MOECCL_EXPECT_OK(moecclRecv(came.data(), kCount, moecclFloat32, 1 - rank, comm, as_stream(other)));
              MOECCL_EXPECT_OK(moecclGroupEnd());
            } else {
              MOECCL_EXPECT_OK(
                  moecclAllReduce(own.data(), came.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(other)));
            }
          };
          if (round % 4 < 2) call();
          device.launch_graph(instance, stream);
          if (round % 4 >= 2) call();
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          std::atomic_ref(*gate).store(round);
          EXPECT_EQ(came.get(other), floats(kCount, static_cast<float>(round % 3 == 0 ? round : 2 * round)));
          EXPECT_EQ(sum.get(stream), floats(kCount, 8));
        }
        meet(comm, word);
        device.end_graph(graph, instance);
        device.end_stream(other);
        device.end_word(gate);
      });
}

// MOECCL_CUDA_GRAPH_MIXING=0, or NCCL's name for it: no events in graphs, and none around them.
TEST(CudaCaptureAlone, HasNoEvents) {
  for (const char* name : {"MOECCL_CUDA_GRAPH_MIXING", "NCCL_GRAPH_MIXING_SUPPORT"}) {
    const Setting alone(name, "0");
    run_on_devices(2, device_options(RankMode::kThreads), [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
      DeviceBuffer x(device, kCount * 4), word(device, 4);
      x.put(floats(kCount, 1));
      const auto sum = [&] {
        MOECCL_EXPECT_OK(
            moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
      };
      meet(comm, word);
      device.begin_capture(stream);
      for (int i = 0; i < 3; ++i) sum();
      void* graph = device.end_capture(stream);
      meet(comm, word);
      ASSERT_NE(graph, nullptr);
      EXPECT_EQ(device.graph_nodes(graph), 3u);
      void* instance = device.instantiate(graph);
      meet(comm, word);
      device.launch_graph(instance, stream);
      sum();
      device.launch_graph(instance, stream);
      EXPECT_EQ(x.get(stream), floats(kCount, 128));
      EXPECT_EQ(device.calls("cuEventRecordWithFlags"), 0u);
      meet(comm, word);
      device.end_graph(graph, instance);
    });
  }
}

// A thread of the library launches a call on a host stream. Nothing but the program orders it and a replay.
TEST(CudaCaptureBesideAThread, FailsWithASentenceWhereNothingOrdersThem) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  Meeting done;
  run_on_devices(
      2, device_options(RankMode::kProcesses, 60'000, 4'000),
      [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        if (!device.emulated()) GTEST_SKIP() << "needs a hold on a thread of the library";
        DeviceBuffer in(device, kCount * 4), a(device, kCount * 4), b(device, kCount * 4);
        in.put(floats(kCount, 2));
        moecclStream_t host = nullptr;
        MOECCL_EXPECT_OK(moecclStreamCreate(&host));
        device.begin_capture(stream);
        MOECCL_EXPECT_OK(
            moecclAllReduce(in.data(), a.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        void* const graph = device.end_capture(stream);
        ASSERT_NE(graph, nullptr);
        void* const instance = device.instantiate(graph);
        all_have_ended(comm);
        if (rank == 0) {
          EXPECT_EQ(device.hold_calls("cuLaunchKernel"), 0);
          MOECCL_EXPECT_OK(moecclAllReduce(in.data(), b.data(), kCount, moecclFloat32, moecclSum, comm, host));
          while (device.hold_calls("cuLaunchKernel") == 0) usleep(1000);
          device.launch_graph(instance, stream);
          (void)device.hold_calls("");
          EXPECT_NE(moecclStreamSynchronize(host), moecclSuccess);
          const std::string said = moecclGetLastError(comm);
          EXPECT_NE(said.find("a graph's replay ran beside operation 1 "), std::string::npos) << said;
          const Stopwatch watch;
          device.synchronize(stream);
          MOECCL_EXPECT_WITHIN(watch, 1000);
          done.arrive();
        }
        EXPECT_TRUE(done.wait_for(1));
        (void)moecclStreamDestroy(host);
        device.end_graph(graph, instance);
      });
}

// Megatron-LM sets one connection, which leaves no stream a place to wait (decision 115). A call behind a replay of the
// same stream needs none.
TEST(CudaCaptureOnOneConnection, DoesNotHoldUpACallOnTheSameStream) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2"), channels("MOECCL_TEST_CUDA_CHANNELS", "1"),
      pool("MOECCL_TEST_CUDA_CHANNEL_POOL", "1"), connections("CUDA_DEVICE_MAX_CONNECTIONS", "1");
  run_on_devices(2, device_options(RankMode::kProcesses, 60'000, 20'000),
                 [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
                   if (device.count() < 2) GTEST_SKIP() << "needs two devices";
                   DeviceBuffer x(device, kCount * 4);
                   x.put(floats(kCount, 1));
                   uint64_t* const gate = device.make_word();
                   const auto sum = [&] {
                     return moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm,
                                            as_stream(stream));
                   };
                   device.begin_capture(stream);
                   MOECCL_EXPECT_OK(sum());
                   void* const graph = device.end_capture(stream);
                   ASSERT_NE(graph, nullptr);
                   void* const instance = device.instantiate(graph);
                   all_have_ended(comm);
                   device.hold(stream, gate, 1);
                   device.launch_graph(instance, stream);
                   std::promise<moecclResult_t> result;
                   std::future<moecclResult_t> returned = result.get_future();
                   std::thread caller([&] {
                     device.make_current();
                     result.set_value(sum());
                   });
                   EXPECT_EQ(returned.wait_for(std::chrono::seconds(5)), std::future_status::ready)
                       << "the call waits for the replay";
                   std::atomic_ref(*gate).store(1);
                   caller.join();
                   EXPECT_EQ(returned.get(), moecclSuccess);
                   EXPECT_EQ(x.get(stream), floats(kCount, 4));
                   all_have_ended(comm);
                   device.end_graph(graph, instance);
                   device.end_word(gate);
                 });
}

// Their operations come in turn. In each of them, as above, only the library joins the forked stream.
TEST_P(CudaCapture, OrdersOperationsInEachOfSeveralAtOnce) {
  run_on_devices(2, device_options(RankMode::kThreads), [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    struct One {
      explicit One(CudaDevice& device) : in(device, kCount * 4), sum(device, kCount * 4), twice(device, kCount * 4) {}
      DeviceBuffer in, sum, twice;
      void *origin = nullptr, *forked = nullptr, *event = nullptr, *graph = nullptr;
    };
    std::array<One, 3> all{One(device), One(device), One(device)};
    DeviceBuffer word(device, 4);
    float value = 1;
    for (One& c : all) {
      c.origin = device.make_stream();
      c.forked = device.make_stream();
      c.event = device.make_event();
      c.in.put(floats(kCount, value++));
    }
    meet(comm, word);
    for (const One& c : all) {
      device.begin_capture(c.origin, GetParam());
      device.record(c.event, c.origin);
      device.wait_event(c.forked, c.event);
    }
    for (const One& c : all) {
      MOECCL_EXPECT_OK(
          moecclAllReduce(c.in.data(), c.sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(c.forked)));
    }
    for (const One& c : all) {
      MOECCL_EXPECT_OK(
          moecclAllReduce(c.sum.data(), c.twice.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(c.origin)));
    }
    for (One& c : all) c.graph = device.end_capture(c.origin);
    meet(comm, word);
    value = 1;
    for (const One& c : all) {
      ASSERT_NE(c.graph, nullptr) << "the second operation does not follow the first";
      void* instance = device.instantiate(c.graph);
      meet(comm, word);
      for (int replay = 0; replay < 2; ++replay) device.launch_graph(instance, stream);
      device.synchronize(stream);
      device.end_graph(c.graph, instance);
    }
    for (One& c : all) EXPECT_EQ(c.twice.get(stream), floats(kCount, 4 * value++));
    meet(comm, word);
    for (const One& c : all) {
      device.end_event(c.event);
      device.end_stream(c.forked);
      device.end_stream(c.origin);
    }
  });
}

}  // namespace
}  // namespace moeccl::testing
