// SPDX-License-Identifier: Apache-2.0
// CU_STREAM_PER_THREAD names another stream on each thread.
#include <chrono>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 3000;
void* const kOwn = reinterpret_cast<void*>(2);  // CU_STREAM_PER_THREAD

// Runs `body` on a thread with a stream of its own, waits until the thread has ended, and returns the result. What the
// body itself expects would not be reported.
template <class Body>
auto on_thread(CudaDevice& device, Body&& body) {
  std::optional<decltype(body())> result;
  std::thread([&] {
    device.make_current();
    result = body();
  }).join();
  return *result;
}

moecclResult_t sum(DeviceBuffer& x, moecclComm_t comm, void* stream) {
  return moecclAllReduce(x.data(), x.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream));
}

// Returns whether the work on the stream ends soon.
bool ends(CudaDevice& device, void* stream) {
  constexpr int kNotReady = 600;
  void* const end = device.make_event();
  device.record(end, stream);
  const int64_t until = now_ms() + patient_ms(10'000);
  while (device.query(end) == kNotReady && now_ms() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const bool ended = device.query(end) == 0;
  device.end_event(end);
  return ended;
}

// The stream of one thread is held by the program. The other thread's operation must not come after it.
void one_is_held(bool its_thread_ends) {
  // Processes on one device are driven step by step.
  run_on_devices(2, device_options(RankMode::kProcesses), [=](int rank, moecclComm_t comm, CudaDevice& device, void*) {
    moecclComm_t second = nullptr;
    MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &second, nullptr));
    DeviceBuffer a(device, kCount * 4), b(device, kCount * 4);
    a.put(floats(kCount, 1));
    b.put(floats(kCount, 2));
    uint64_t* const word = device.make_word();
    const auto held = [&] {
      device.hold(kOwn, word, 1);
      return sum(a, comm, kOwn);
    };
    EXPECT_EQ(its_thread_ends ? on_thread(device, held) : held(), moecclSuccess);
    bool ended = false;
    const std::vector<char> sums = on_thread(device, [&] {
      ended = sum(b, second, kOwn) == moecclSuccess && ends(device, kOwn);
      std::atomic_ref(*word).store(1);
      return b.get(kOwn);
    });
    EXPECT_TRUE(ended) << "it waits for another thread's stream";
    EXPECT_EQ(sums, floats(kCount, 4));
    MOECCL_EXPECT_OK(sum(a, comm, nullptr));
    EXPECT_EQ(a.get(), floats(kCount, 4));
    MOECCL_EXPECT_OK(moecclCommDestroy(second));
    device.end_word(word);
  });
}
TEST(CudaThreadStreams, DoNotWaitForOneAnother) { one_is_held(false); }
TEST(CudaThreadStreams, MayHaveWorkWhenTheirThreadEnds) { one_is_held(true); }

int threads_of_process() {
  std::ifstream status("/proc/self/status");
  const std::string name = "Threads:";
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, name.size(), name) == 0) return std::stoi(line.substr(name.size()));
  return 0;
}

// Each stream has a thread of the library. Those of threads that have ended serve later threads.
TEST(CudaThreadStreams, OfManyThreadsInTurnTakeOneThreadOfTheLibrary) {
  run_on_devices(2, device_options(RankMode::kProcesses), [](int, moecclComm_t comm, CudaDevice& device, void*) {
    DeviceBuffer a(device, kCount * 4);
    const auto operation = [&] {
      const moecclResult_t called = sum(a, comm, kOwn), ended = moecclStreamSynchronize(as_stream(kOwn));
      return called != moecclSuccess ? called : ended;
    };
    constexpr int kThreads = 20;
    EXPECT_EQ(on_thread(device, operation), moecclSuccess);
    const int before = threads_of_process();
    for (int i = 0; i < kThreads; ++i) EXPECT_EQ(on_thread(device, operation), moecclSuccess);
    EXPECT_LT(threads_of_process(), before + kThreads / 2);
  });
}

}  // namespace
}  // namespace moeccl::testing
