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

// A device whose eight queues all have work when operations begin on some streams. The program's streams have more work
// in the other queues, so what the library does for the operations comes behind the waits of these streams for these
// very operations. Only an error ends that.
class FullQueues {
 public:
  explicit FullQueues(CudaDevice& device) : device_(device), begin_(device.make_word()), end_(device.make_word()) {
    for (void*& s : busy_) s = device.make_stream();
    n_waits_ = device_.calls("cuStreamWaitValue64_v2");
  }
  ~FullQueues() {
    end();
    for (void* s : busy_) device_.end_stream(s);
    for (uint64_t* word : {begin_, end_}) device_.end_word(word);
  }
  FullQueues(const FullQueues&) = delete;
  FullQueues& operator=(const FullQueues&) = delete;
  // Comes before the calls that put operations on the stream.
  void hold(void* stream) {
    device_.hold(stream, begin_, 1);
    ++n_waits_;
  }
  // Comes after them. The streams wait for so many operations.
  void begin(uint64_t n_waits) {
    EXPECT_EQ(device_.calls("cuStreamWaitValue64_v2"), n_waits_ + n_waits) << "the streams do not wait on the device";
    constexpr int kMore = 8;
    for (void* s : busy_)
      for (int i = 0; i < kMore; ++i) device_.hold(s, end_, 1);
    std::atomic_ref(*begin_).store(1);
  }
  // Ends the program's work.
  void end() {
    std::atomic_ref(*end_).store(1);
    for (void* s : busy_) device_.synchronize(s);
  }

 private:
  CudaDevice& device_;
  uint64_t *begin_, *end_;
  void* busy_[7] = {};
  uint64_t n_waits_ = 0;
};

// Runs body(rank, comm, device, stream) on ranks with a process and a device each, whose streams share a pool of eight
// queues.
template <class Body>
void run_on_pools(int n, bool persistent, int timeout_ms, Body&& body) {
  const Setting channels("MOECCL_TEST_CUDA_CHANNELS", "1"), pool("MOECCL_TEST_CUDA_CHANNEL_POOL", "1"),
      devices("MOECCL_TEST_CUDA_DEVICES", "2"), steps("MOECCL_CUDA_PERSISTENT", persistent ? "1" : "0");
  run_on_devices(n, device_options(RankMode::kProcesses, 60'000, timeout_ms),
                 [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
                   if (!device.emulated()) GTEST_SKIP() << "needs a driver whose queues are known";
                   body(rank, comm, device, stream);
                 });
}

// Waits for the failure, and then for the streams, which come soon. Returns the error sentence.
std::string streams_go_after(moecclComm_t comm, moecclResult_t wanted, CudaDevice& device,
                             std::initializer_list<void*> streams) {
  moecclResult_t state = moecclSuccess;
  std::string why = failure_of(comm, &state);
  EXPECT_EQ(state, wanted) << why;
  const Stopwatch watch;
  for (void* s : streams) device.synchronize(s);
  MOECCL_EXPECT_WITHIN(watch, 6000);
  return why;
}

void expect_hint(const std::string& why) {
  EXPECT_NE(why.find("set CUDA_DEVICE_MAX_CONNECTIONS=32"), std::string::npos) << why;
}

// The communicator's streams are slow with what they do, which makes it visible if it comes too late.
class SlowStreams : Setting {
 public:
  SlowStreams() : Setting("MOECCL_TEST_CUDA_DELAY_US", "100000") {}
  // When the stream's failed operations have been waited for, they write to `out` no more.
  static void expect_ended(CudaDevice& device, FullQueues& queues, void* stream, DeviceBuffer& out, void* fast) {
    EXPECT_NE(moecclStreamSynchronize(as_stream(stream)), moecclSuccess);
    queues.end();
    const std::vector<char> own = floats(kCount, 7);
    device.upload(out.data(), own.data(), own.size(), fast);
    device.synchronize(fast);
    usleep(500'000);
    std::vector<char> now(own.size());
    device.download(now.data(), out.data(), now.size(), fast);
    EXPECT_TRUE(now == own) << "an operation wrote to its output after its end";
  }
};

moecclResult_t sum_to(DeviceBuffer& out, DeviceBuffer& in, moecclComm_t comm, void* stream) {
  return moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream));
}

// The rank needs no peer, so the thread that drives the operation has nothing left to do when it begins.
TEST(CudaFullQueues, AnOperationThatDoesNotGetOnLetsItsStreamGo) {
  const SlowStreams slow;
  run_on_pools(1, false, 1000, [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    unsetenv("MOECCL_TEST_CUDA_DELAY_US");
    DeviceBuffer x(device, kCount * 4), out(device, kCount * 4);
    void* const fast = device.make_stream();
    {
      FullQueues queues(device);
      queues.hold(stream);
      MOECCL_EXPECT_OK(sum_to(out, x, comm, stream));
      queues.begin(1);
      expect_hint(streams_go_after(comm, moecclTimeout, device, {stream}));
      SlowStreams::expect_ended(device, queues, stream, out, fast);
    }
    device.end_stream(fast);
  });
}

TEST(CudaFullQueues, AnOperationThatItsPeerWaitsForLetsItsStreamGo) {
  run_on_pools(2, false, 1000, [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer x(device, kCount * 4);
    FullQueues queues(device);
    if (rank == 0) queues.hold(stream);
    MOECCL_EXPECT_OK(sum(x, comm, stream));
    if (rank == 0) queues.begin(1);
    (void)streams_go_after(comm, moecclTimeout, device, {stream});
  });
}

// The second operation's wait is before the first one's work in the queue, too.
TEST(CudaFullQueues, SeveralOperationsLetTheirStreamGo) {
  run_on_pools(1, false, 1000, [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer x(device, kCount * 4);
    FullQueues queues(device);
    queues.hold(stream);
    MOECCL_EXPECT_OK(sum(x, comm, stream));
    MOECCL_EXPECT_OK(sum(x, comm, stream));
    queues.begin(2);
    expect_hint(streams_go_after(comm, moecclTimeout, device, {stream}));
  });
}

// The work comes behind the wait of the stream that does not run the group.
TEST(CudaFullQueues, AGroupLetsAllItsStreamsGo) {
  const SlowStreams slow;
  run_on_pools(1, false, 1000, [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    unsetenv("MOECCL_TEST_CUDA_DELAY_US");
    DeviceBuffer x(device, kCount * 4), out(device, kCount * 4), y(device, kCount * 4);
    void *const other = device.make_stream(), *const fast = device.make_stream();
    {
      FullQueues queues(device);
      queues.hold(stream);
      queues.hold(other);
      MOECCL_EXPECT_OK(moecclGroupStart());
      MOECCL_EXPECT_OK(sum_to(out, x, comm, stream));
      MOECCL_EXPECT_OK(sum(y, comm, other));
      MOECCL_EXPECT_OK(moecclGroupEnd());
      queues.begin(2);
      expect_hint(streams_go_after(comm, moecclTimeout, device, {stream, other}));
      SlowStreams::expect_ended(device, queues, stream, out, fast);
    }
    for (void* s : {other, fast}) device.end_stream(s);
  });
}

TEST(CudaFullQueues, AnAbortLetsAStreamGo) {
  run_on_pools(1, false, 60'000, [](int, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer x(device, kCount * 4);
    FullQueues queues(device);
    queues.hold(stream);
    MOECCL_EXPECT_OK(sum(x, comm, stream));
    queues.begin(1);
    usleep(100'000);
    MOECCL_EXPECT_OK(moecclCommAbort(comm));
    (void)streams_go_after(comm, moecclAborted, device, {stream});
  });
}

// The end of a communicator frees memory, which waits for the program's streams, too.
TEST(CudaFullQueues, TheEndOfACommunicatorLetsAStreamGo) {
  run_on_pools(1, false, 1000, [](int, moecclComm_t& comm, CudaDevice& device, void* stream) {
    DeviceBuffer x(device, kCount * 4);
    std::future<moecclResult_t> ended;
    {
      FullQueues queues(device);
      queues.hold(stream);
      MOECCL_EXPECT_OK(sum(x, comm, stream));
      queues.begin(1);
      const Stopwatch watch;
      ended = std::async(std::launch::async, [last = comm] { return moecclCommDestroy(last); });
      device.synchronize(stream);
      MOECCL_EXPECT_WITHIN(watch, 6000);
    }
    (void)ended.get();  // may be the failure
    comm = nullptr;
  });
}

// A thread launches the group's operation. No rank's kernel begins, so none of them sees a timeout.
TEST(CudaFullQueues, ALaunchThatDoesNotBeginLetsItsStreamGo) {
  run_on_pools(2, true, 1000, [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    DeviceBuffer x(device, kCount * 4), y(device, kCount * 4);
    FullQueues queues(device);
    queues.hold(stream);
    MOECCL_EXPECT_OK(moecclGroupStart());
    MOECCL_EXPECT_OK(sum(x, comm, stream));
    MOECCL_EXPECT_OK(rank == 0 ? moecclSend(y.data(), kCount, moecclFloat32, 1, comm, as_stream(stream))
                               : moecclRecv(y.data(), kCount, moecclFloat32, 0, comm, as_stream(stream)));
    MOECCL_EXPECT_OK(moecclGroupEnd());
    queues.begin(1);
    expect_hint(streams_go_after(comm, moecclTimeout, device, {stream}));
  });
}

}  // namespace
}  // namespace moeccl::testing
