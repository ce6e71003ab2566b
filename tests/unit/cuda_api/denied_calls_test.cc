// SPDX-License-Identifier: Apache-2.0
// Any one call of the driver fails while a rank works: the others hear of it at once instead of waiting for the
// timeout, and what succeeds has the right data. MOECCL_TEST_SCALE tries more calls.
#include <gtest/gtest.h>

#include <atomic>
#include <iterator>
#include <random>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 2, kVictim = 1;
constexpr size_t kCount = 6'000;
constexpr size_t kHidden = 64, kTokens = 16, kTopK = 2;
constexpr int kOutOfMemory = 2;

// What may fail because the driver lacks memory or an object.
constexpr const char* kFunctions[] = {
    "cuEventCreate",          "cuEventRecord",          "cuFuncGetAttribute",         "cuLaunchHostFunc",
    "cuLaunchKernel",         "cuMemAllocAsync",        "cuMemAllocFromPoolAsync",    "cuMemAlloc_v2",
    "cuMemHostAlloc",         "cuMemHostRegister_v2",   "cuMemPoolSetAccess",         "cuMemcpyAsync",
    "cuMemcpyDtoDAsync_v2",   "cuMemcpyDtoHAsync_v2",   "cuMemcpyHtoDAsync_v2",       "cuMemsetD32Async",
    "cuMemsetD8Async",        "cuStreamCreate",         "cuStreamCreateWithPriority", "cuStreamWaitEvent",
    "cuStreamWaitValue32_v2", "cuStreamWaitValue64_v2", "cuStreamWriteValue32_v2",    "cuStreamWriteValue64_v2"};

struct Words {
  std::atomic<int> calls[std::size(kFunctions)];  // by the victim in its work
};

// The calls of one rank, up to the first failure. The test's own calls of the driver come before and after.
class Work {
 public:
  Work(int rank, moecclComm_t comm, CudaDevice& device, void* stream)
      : rank_(rank), comm_(comm), stream_(as_stream(stream)), in_(device, kCount * 4), out_(device, kCount * 4) {
    in_.put(floats(kCount, 1));
    for (size_t i = 0; i < kTokens * kTopK; ++i) choices_.push_back(static_cast<int32_t>(i * 3 % 8));
  }

  moecclResult_t run() {
    (void)(sums() && pieces() && messages() && layer());
    return first_;
  }
  bool right() { return !summed_ || out_.get() == floats(kCount, kRanks); }

 private:
  bool ok(moecclResult_t result) {
    if (first_ == moecclSuccess) first_ = result;
    return result == moecclSuccess;
  }
  // A wait for the stream that the driver refuses says nothing of the work.
  bool ended() {
    if (moecclStreamSynchronize(stream_) != moecclSuccess) (void)moecclStreamSynchronize(stream_);
    moecclResult_t state = moecclSuccess;
    return ok(moecclCommGetAsyncError(comm_, &state)) && ok(state);
  }
  bool sums() {
    const auto sum = [&](moecclStream_t on, size_t count) {
      return ok(moecclAllReduce(in_.data(), out_.data(), count, moecclFloat32, moecclSum, comm_, on));
    };
    return sum(nullptr, 1) && sum(nullptr, kCount) && sum(stream_, kCount) && ended();
  }
  bool pieces() {
    const size_t counts[kRanks] = {100, 100}, displs[kRanks] = {0, 100};
    const auto exchange = [&](moecclStream_t on) {
      return ok(moecclAllToAllv(in_.data(), counts, displs, out_.data(), counts, displs, moecclFloat32, comm_, on));
    };
    return exchange(nullptr) && exchange(stream_) && ended();
  }
  bool messages() {
    (void)moecclGroupStart();
    (void)ok(moecclSend(in_.data(), 100, moecclFloat32, 1 - rank_, comm_, stream_));
    (void)ok(moecclRecv(out_.data(), 100, moecclFloat32, 1 - rank_, comm_, stream_));
    (void)ok(moecclAllReduce(in_.data(), out_.data(), kCount, moecclFloat32, moecclSum, comm_, stream_));
    summed_ = ok(moecclGroupEnd()) && first_ == moecclSuccess && ended();
    return summed_;
  }
  bool layer() {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kHidden * 4, config.type = moecclFloat32, config.top_k = kTopK;
    config.n_experts = 8, config.max_tokens = kTokens;
    moecclMoe_t moe = nullptr;
    if (!ok(moecclMoeCreate(&moe, comm_, &config))) return false;
    moecclRouting_t routing = nullptr;
    summed_ = false;  // combine writes over the sums
    (void)(ok(moecclRoutingCreate(&routing, moe, choices_.data(), nullptr, kTokens)) &&
           ok(moecclDispatch(routing, in_.data(), out_.data(), stream_)) &&
           ok(moecclCombine(routing, out_.data(), in_.data(), stream_)) && ended());
    if (routing != nullptr) (void)ok(moecclRoutingDestroy(routing));
    (void)ok(moecclMoeDestroy(moe));
    return first_ == moecclSuccess;
  }

  int rank_;
  moecclComm_t comm_;
  moecclStream_t stream_;
  DeviceBuffer in_, out_;
  std::vector<int32_t> choices_;
  moecclResult_t first_ = moecclSuccess;
  bool summed_ = false;
};

struct Refusal {
  const char* function = nullptr;  // null: none
  int nth = 0;                     // of its calls
};

void run_with(const Refusal& refusal, Words& words) {
  Meeting end;
  const auto body = [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (!device.emulated()) GTEST_SKIP() << "needs a driver that fails on purpose";
    Work work(rank, comm, device, stream);
    const bool fails = rank == kVictim && refusal.function != nullptr;
    const auto calls = [&](size_t f) { return static_cast<int>(device.calls(kFunctions[f])); };
    int before[std::size(kFunctions)] = {};
    for (size_t f = 0; f < std::size(kFunctions); ++f) before[f] = calls(f);
    if (fails) device.refuse(refusal.function, kOutOfMemory, refusal.nth);
    const moecclResult_t result = work.run();
    if (fails) device.refuse(refusal.function, 0, 1 << 30);
    EXPECT_NE(result, moecclTimeout) << moecclGetLastError(comm);
    EXPECT_NE(result, moecclInternalError) << moecclGetLastError(comm);
    if (refusal.function == nullptr) {
      MOECCL_EXPECT_COMM_OK(result, comm);
      for (size_t f = 0; f < std::size(kFunctions) && rank == kVictim; ++f) words.calls[f] = calls(f) - before[f];
    }
    EXPECT_TRUE(end.meet(kRanks));  // the end of a rank tells its peers what its failure must have told them
    EXPECT_TRUE(work.right());
  };
  run_on_devices(kRanks, device_options(RankMode::kProcesses, 60'000, 5'000), body);
}

void refuse_some() {
  const Shared<Words> words;
  run_with({}, *words);
  const int most = scaled(1);  // of each function
  int tried = 0;
  std::mt19937_64 random(test_seed());
  for (size_t f = 0; f < std::size(kFunctions) && !::testing::Test::HasFailure(); ++f) {
    const int n = words->calls[f];
    for (int i = 0; i < std::min(n, most) && !::testing::Test::HasFailure(); ++i) {
      const int first = n * i / std::min(n, most), next = n * (i + 1) / std::min(n, most);
      const int nth = first + static_cast<int>(random() % static_cast<uint64_t>(next - first));
      SCOPED_TRACE(::testing::Message() << kFunctions[f] << " fails at call " << nth << " of " << n);
      run_with({kFunctions[f], nth}, *words);
      ++tried;
    }
  }
  printf("%d calls failed, one in each run\n", tried);
}

TEST(DeniedCalls, AreErrorsForAllStepByStep) { refuse_some(); }

TEST(DeniedCalls, AreErrorsForAllInThePersistentKernel) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  refuse_some();
}

// The buffers of ranks that are threads are opened to each other's devices before the operation begins.
TEST(DeniedCalls, ABufferThatPeersCannotReachIsAnErrorForAll) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  Meeting opened, end;
  const auto body = [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
    if (!device.emulated()) GTEST_SKIP() << "needs a driver that fails on purpose";
    DeviceBuffer known(device, kCount * 4), fresh(device, kCount * 4);
    const auto sum = [&](DeviceBuffer& b, moecclStream_t on) {
      return moecclAllReduce(b.data(), b.data(), kCount, moecclFloat32, moecclSum, comm, on);
    };
    MOECCL_EXPECT_COMM_OK(sum(known, nullptr), comm);
    EXPECT_TRUE(opened.meet(kRanks));
    const bool fails = rank == kVictim;
    if (fails) device.refuse("cuMemPoolSetAccess", kOutOfMemory);
    const moecclResult_t result = sum(fails ? fresh : known, nullptr);
    EXPECT_EQ(result, fails ? moecclOutOfMemory : moecclRemoteError) << moecclGetLastError(comm);
    EXPECT_TRUE(end.meet(kRanks));
    (void)stream;
  };
  run_on_devices(kRanks, device_options(RankMode::kThreads, 60'000, 5'000), body);
}

// The driver refuses a stream that has ended as it refuses other things. The other rank hears nothing of it and waits
// for the next try.
TEST(DeniedCalls, AStreamThatHasEndedIsAnErrorOfItsRankAlone) {
  run_on_devices(
      kRanks, device_options(RankMode::kProcesses), [](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        if (!device.emulated()) GTEST_SKIP() << "a driver may crash";
        DeviceBuffer sum(device, kCount * 4);
        sum.put(floats(kCount, 1));
        const auto add = [&](void* on) {
          return moecclAllReduce(sum.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(on));
        };
        if (rank == kVictim) {
          void* ended = device.make_stream();
          device.end_stream(ended);
          EXPECT_NE(add(ended), moecclSuccess);
        }
        MOECCL_EXPECT_COMM_OK(add(stream), comm);
        EXPECT_EQ(sum.get(stream), floats(kCount, kRanks));
      });
}

}  // namespace
}  // namespace moeccl::testing
