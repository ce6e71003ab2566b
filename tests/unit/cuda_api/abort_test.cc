// SPDX-License-Identifier: Apache-2.0
// Aborts while calls wait for the earlier work of a CUDA stream, which may never end.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 3000;

moecclResult_t sum(DeviceBuffer& x, moecclComm_t comm, moecclStream_t stream) {
  return moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, stream);
}

// A rank, a second communicator of the same ranks, and a stream that the program holds.
struct Held {
  moecclComm_t comm, second;
  CudaDevice& device;
  void* stream;
  DeviceBuffer &a, &b;
};

// Holds the rank's stream, or the default stream, and makes the call on another thread. The call waits until this one
// aborts the communicator, or the second one.
void abort_meanwhile(bool default_stream, moecclResult_t wanted, const std::function<moecclResult_t(Held)>& call,
                     bool of_second = false) {
  Meeting done;
  // Processes on one device are driven step by step.
  run_on_devices(2, device_options(RankMode::kProcesses),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   moecclComm_t second = nullptr;
                   if (of_second) {
                     MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &second, nullptr));
                   }
                   if (rank == 1) {
                     EXPECT_TRUE(done.meet(2));
                     if (of_second) (void)moecclCommDestroy(second);
                     return;
                   }
                   moecclComm_t const aborted = of_second ? second : comm;
                   DeviceBuffer a(device, kCount * 4), b(device, kCount * 4);
                   uint64_t* const word = device.make_word();
                   device.hold(default_stream ? nullptr : stream, word, 1);
                   std::promise<moecclResult_t> result;
                   std::future<moecclResult_t> returned = result.get_future();
                   std::thread caller([&] {
                     device.make_current();
                     result.set_value(call({comm, second, device, stream, a, b}));
                   });
                   EXPECT_EQ(returned.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
                   const Stopwatch watch;
                   MOECCL_EXPECT_OK(moecclCommAbort(aborted));
                   EXPECT_EQ(returned.wait_for(std::chrono::seconds(20)), std::future_status::ready);
                   MOECCL_EXPECT_WITHIN(watch, 1000);
                   std::atomic_ref(*word).store(1);
                   caller.join();
                   EXPECT_EQ(returned.get(), wanted);
                   moecclResult_t state = moecclSuccess;
                   MOECCL_EXPECT_OK(moecclCommGetAsyncError(aborted, &state));
                   EXPECT_EQ(state, moecclAborted);
                   device.synchronize(stream);
                   device.end_word(word);
                   done.arrive();
                   if (of_second) (void)moecclCommDestroy(second);
                 });
}

TEST(CudaAbort, EndsAGroupThatWaitsForAStream) {
  abort_meanwhile(false, moecclAborted, [](const Held& h) {
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(sum(h.a, h.comm, nullptr));
    MOECCL_EXPECT_OK(sum(h.b, h.comm, as_stream(h.stream)));
    return moecclGroupEnd();
  });
}

// Any of a group's communicators may be the one that a program aborts.
TEST(CudaAbort, OfTheSecondCommunicatorEndsAGroupThatWaitsForAStream) {
  const auto group = [](const Held& h, moecclStream_t stream) {
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(sum(h.a, h.comm, stream));
    MOECCL_EXPECT_OK(sum(h.b, h.second, stream));
    return moecclGroupEnd();
  };
  abort_meanwhile(
      true, moecclAborted, [&](const Held& h) { return group(h, nullptr); }, true);
  // No stream may wait for a thread's calls: the group's end waits in the stream's place, and the streams go.
  const Setting lazy("CUDA_MODULE_LOADING", "LAZY");
  abort_meanwhile(
      false, moecclSuccess, [&](const Held& h) { return group(h, as_stream(h.stream)); }, true);
}

TEST(CudaAbort, EndsABlockingCallBehindTheDefaultStream) {
  abort_meanwhile(true, moecclAborted, [](const Held& h) { return sum(h.a, h.comm, nullptr); });
}

TEST(CudaAbort, EndsAWaitForAHostStreamBehindTheDefaultStream) {
  abort_meanwhile(true, moecclAborted, [](const Held& h) {
    moecclStream_t host = nullptr;
    MOECCL_EXPECT_OK(moecclStreamCreate(&host));
    MOECCL_EXPECT_OK(sum(h.a, h.comm, host));
    const moecclResult_t result = moecclStreamSynchronize(host);
    MOECCL_EXPECT_OK(moecclStreamDestroy(host));
    return result;
  });
}

// Nothing on the host watches a replay: the call that asks for errors looks at its peers.
void replay_ends(RankMode mode, const std::function<void(moecclComm_t)>& leave, moecclResult_t wanted) {
  const Setting mps("MOECCL_TEST_CUDA_MPS", "1");  // processes on one device need it for kernels that wait
  RankOptions options = device_options(mode);
  options.may_die = {1};
  run_on_devices(2, options, [&, mode](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (mode == RankMode::kProcesses && !device.emulated() && !device.shared_by_mps())
      GTEST_SKIP() << "processes do not share the device through MPS";
    DeviceBuffer x(device, kCount * 4);
    device.begin_capture(stream);
    MOECCL_EXPECT_OK(sum(x, comm, as_stream(stream)));
    void* const graph = device.end_capture(stream);
    ASSERT_NE(graph, nullptr);
    void* const instance = device.instantiate(graph);
    all_have_ended(comm);
    device.launch_graph(instance, stream);
    device.synchronize(stream);
    if (rank == 0) {
      device.launch_graph(instance, stream);
      moecclResult_t state = moecclSuccess;
      const std::string why = failure_of(comm, &state);
      EXPECT_EQ(state, wanted) << why;
      EXPECT_NE(why.find("rank 1"), std::string::npos) << why;
      const Stopwatch watch;
      device.synchronize(stream);
      MOECCL_EXPECT_WITHIN(watch, 1000);
    } else {
      usleep(300'000);
      leave(comm);
    }
    device.end_graph(graph, instance);
  });
}

TEST(CudaAbort, OfAPeerEndsAReplay) {
  replay_ends(
      RankMode::kThreads, [](moecclComm_t comm) { MOECCL_EXPECT_OK(moecclCommAbort(comm)); }, moecclRemoteError);
}
TEST(CudaAbort, ARevokedCommunicatorsReplaysEnd) {
  replay_ends(
      RankMode::kThreads, [](moecclComm_t comm) { MOECCL_EXPECT_OK(moecclCommRevoke(comm)); }, moecclAborted);
}
TEST(CudaAbort, TheDeathOfAPeerEndsAReplay) {
  replay_ends(
      RankMode::kProcesses, [](moecclComm_t) { kill(getpid(), SIGKILL); }, moecclRemoteError);
}

// With one hardware channel, the call waits in its stream's place (decision 115). The operation reports the abort.
TEST(CudaAbort, EndsACallThatWaitsInItsStreamsPlace) {
  const Setting channels("MOECCL_TEST_CUDA_CHANNELS", "1"), pool("MOECCL_TEST_CUDA_CHANNEL_POOL", "1"),
      connections("CUDA_DEVICE_MAX_CONNECTIONS", "1");
  abort_meanwhile(false, moecclSuccess, [](const Held& h) { return sum(h.a, h.comm, as_stream(h.stream)); });
}

// A group's calls promise the persistent kernel their launches. The thread of a stream that the group waits for may
// still hold the calls when their communicator has ended; what it lets go of then must not be the communicator's. The
// address sanitizer would see it.
TEST(CudaAbort, CallsMayOutliveTheirCommunicator) {
  const Setting no_wait("MOECCL_TEST_CUDA_IMPLICIT_SYNC", "0");  // where the communicator gives its memory back
  run_on_devices(2, device_options(RankMode::kThreads),
                 [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   const size_t large = rank == 0 ? 256 << 20 : 4;
                   moecclComm_t aborted = nullptr;
                   MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &aborted, nullptr));
                   DeviceBuffer x(device, kCount * 4), from(device, large), to(device, large);
                   void* const busy = device.make_stream();
                   // The stream's thread keeps the group until it has told the stream of the end of this copy.
                   MOECCL_EXPECT_OK(moecclGroupStart());
                   MOECCL_EXPECT_OK(moecclSend(from.data(), large, moecclUint8, rank, comm, as_stream(busy)));
                   MOECCL_EXPECT_OK(moecclRecv(to.data(), large, moecclUint8, rank, comm, as_stream(busy)));
                   MOECCL_EXPECT_OK(moecclGroupEnd());
                   MOECCL_EXPECT_OK(moecclGroupStart());
                   MOECCL_EXPECT_OK(sum(x, aborted, as_stream(stream)));
                   MOECCL_EXPECT_OK(moecclSend(from.data(), 4, moecclUint8, 1 - rank, aborted, as_stream(busy)));
                   MOECCL_EXPECT_OK(moecclRecv(to.data(), 4, moecclUint8, 1 - rank, aborted, as_stream(busy)));
                   MOECCL_EXPECT_OK(moecclGroupEnd());
                   MOECCL_EXPECT_OK(moecclCommAbort(aborted));
                   (void)moecclCommDestroy(aborted);  // may return the abort
                   for (void* s : {stream, busy}) device.synchronize(s);
                   device.end_stream(busy);
                 });
}

// A stream that a group waits for looks at all of the group's communicators when it comes to the group. After an abort
// of one of them, the program may have destroyed another one by then. The address sanitizer would see it.
TEST(CudaAbort, AStreamMayComeToAGroupWhoseCommunicatorsHaveEnded) {
  const Setting steps("MOECCL_CUDA_PERSISTENT", "0"), no_wait("MOECCL_TEST_CUDA_IMPLICIT_SYNC", "0");
  Meeting held, issued, destroyed;
  run_on_devices(
      2, device_options(RankMode::kThreads), [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        moecclComm_t front = nullptr, second = nullptr;
        MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &front, nullptr));
        MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &second, nullptr));
        DeviceBuffer a(device, kCount * 4), b(device, kCount * 4), c(device, kCount * 4), d(device, kCount * 4);
        void* const busy = device.make_stream();
        uint64_t* const word = device.make_word();
        device.hold(busy, word, 1);
        EXPECT_TRUE(held.meet(2));
        std::thread first([&] {
          device.make_current();
          MOECCL_EXPECT_OK(sum(d, comm, as_stream(busy)));  // its stream's thread waits for the word
        });
        usleep(300'000);
        // The call of the group may return only when the streams have come to it.
        std::thread caller([&] {
          device.make_current();
          MOECCL_EXPECT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(sum(a, front, as_stream(stream)));
          MOECCL_EXPECT_OK(sum(b, front, as_stream(busy)));
          MOECCL_EXPECT_OK(sum(c, second, as_stream(busy)));
          MOECCL_EXPECT_OK(moecclGroupEnd());
        });
        usleep(700'000);
        EXPECT_TRUE(issued.meet(2));
        MOECCL_EXPECT_OK(moecclCommAbort(front));
        usleep(300'000);
        (void)moecclCommDestroy(second);
        (void)moecclCommDestroy(front);
        EXPECT_TRUE(destroyed.meet(2));
        std::atomic_ref(*word).store(1);
        first.join();
        caller.join();
        for (void* s : {stream, busy}) device.synchronize(s);
        device.end_word(word);
        device.end_stream(busy);
      });
}

// In their one stream, a launch of the aborted communicator stands behind one of another, which waits for rank 1.
TEST(CudaAbort, DestroyDoesNotWaitForAnotherCommunicatorsLaunch) {
  Meeting destroyed;
  run_on_devices(2, device_options(RankMode::kThreads),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   moecclComm_t aborted = nullptr;
                   MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &aborted, nullptr));
                   DeviceBuffer x(device, kCount * 4), y(device, kCount * 4);
                   if (rank == 0) {
                     MOECCL_EXPECT_OK(sum(x, comm, as_stream(stream)));
                     MOECCL_EXPECT_OK(sum(y, aborted, as_stream(stream)));
                     usleep(100'000);
                   } else {
                     EXPECT_TRUE(destroyed.wait_for(1));
                   }
                   const Stopwatch watch;
                   MOECCL_EXPECT_OK(moecclCommAbort(aborted));
                   (void)moecclCommDestroy(aborted);  // may return the abort
                   MOECCL_EXPECT_WITHIN(watch, 2000);
                   if (rank == 0) {
                     destroyed.arrive();
                   } else {
                     MOECCL_EXPECT_OK(sum(x, comm, as_stream(stream)));
                   }
                   device.synchronize(stream);
                   moecclResult_t state = moecclInternalError;
                   MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
                   MOECCL_EXPECT_OK(state);
                 });
}

// Returns how much of the current device's memory is free.
size_t free_bytes() {
  void* const driver = dlopen(std::getenv("MOECCL_CUDA_DRIVER"), RTLD_NOW | RTLD_NOLOAD);
  auto* const ask = reinterpret_cast<int (*)(size_t*, size_t*)>(dlsym(driver, "cuMemGetInfo_v2"));
  size_t free = 0, total = 0;
  EXPECT_TRUE(ask != nullptr && ask(&free, &total) == 0);
  return free;
}

// The stream comes to the aborted communicator's launch only after Destroy, which gave up waiting for it.
TEST(CudaAbort, ALaunchThatDestroyDidNotWaitForGivesTheMemoryBack) {
  Meeting before, destroyed, freed;
  run_on_devices(2, device_options(RankMode::kThreads),
                 [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
                   if (!device.emulated()) GTEST_SKIP() << "others use the device's memory";
                   DeviceBuffer x(device, kCount * 4);
                   uint64_t* const word = device.make_word();
                   EXPECT_TRUE(before.meet(2));
                   const size_t had = free_bytes();
                   moecclComm_t aborted = nullptr;
                   MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &aborted, nullptr));
                   device.hold(stream, word, 1);
                   MOECCL_EXPECT_OK(sum(x, aborted, as_stream(stream)));
                   usleep(100'000);
                   MOECCL_EXPECT_OK(moecclCommAbort(aborted));
                   const Stopwatch watch;
                   (void)moecclCommDestroy(aborted);  // may return the abort
                   MOECCL_EXPECT_WITHIN(watch, 3500);
                   EXPECT_LT(free_bytes(), had);
                   EXPECT_TRUE(destroyed.meet(2));
                   std::atomic_ref(*word).store(1);
                   device.synchronize(stream);
                   for (const Stopwatch since; free_bytes() < had && since.ms() < patient_ms(5000);) usleep(1000);
                   EXPECT_EQ(free_bytes(), had);
                   EXPECT_TRUE(freed.meet(2));
                   device.end_word(word);
                 });
}

}  // namespace
}  // namespace moeccl::testing
