// SPDX-License-Identifier: Apache-2.0
// The library's frees beside operations that are in flight (docs/decisions/120-calls-that-wait-for-the-device.md).
#include <dlfcn.h>
#include <unistd.h>

#include <barrier>
#include <csignal>
#include <functional>
#include <thread>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 3000;

struct Rank {
  moecclComm_t comm;
  CudaDevice& device;
  void* stream;
  void *in, *out;

  void all_reduce(void* on) const {
    MOECCL_EXPECT_OK(moecclAllReduce(in, out, kCount, moecclFloat32, moecclSum, comm, as_stream(on)));
  }
};

// Rank 1 ends another communicator, and then takes part in an operation that rank 0 has begun before.
void end_beside(const std::function<std::function<void()>(const Rank&)>& prepare) {
  std::barrier both(2);
  const RankOptions options = device_options(RankMode::kThreads, 60'000, 10'000);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, 2, device, options), other = nullptr;
        ASSERT_NE(comm, nullptr);
        MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &other, nullptr));
        {
          DeviceBuffer in(device, kCount * 4), out(device, kCount * 4);
          in.put(floats(kCount, 1));
          void* const stream = device.make_stream();
          const auto operation = prepare({comm, device, stream, in.data(), out.data()});
          if (rank == 0) {
            MOECCL_EXPECT_OK(moecclCommDestroy(other));
            both.arrive_and_wait();
            operation();
          } else {
            both.arrive_and_wait();
            usleep(300'000);  // rank 0's operation is on the device now
            MOECCL_EXPECT_OK(moecclCommDestroy(other));
            operation();
          }
          EXPECT_EQ(out.get(stream), floats(kCount, 2));
          device.end_stream(stream);
          both.arrive_and_wait();
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

TEST(CudaFrees, DoNotHoldUpABlockingCall) {
  end_beside([](const Rank& r) { return [=] { r.all_reduce(nullptr); }; });
}

TEST(CudaFrees, DoNotHoldUpAReplay) {
  end_beside([](const Rank& r) -> std::function<void()> {
    r.device.begin_capture(r.stream);
    r.all_reduce(r.stream);
    void* const graph = r.device.end_capture(r.stream);
    if (graph == nullptr) return [] { ADD_FAILURE() << "no graph"; };
    void* const instance = r.device.instantiate(graph);
    return [=] {
      r.device.launch_graph(instance, r.stream);
      r.device.synchronize(r.stream);
      r.device.end_graph(graph, instance);
    };
  });
}

// Ranks 0 and 2 are threads of one process, which closes handles of rank 1's memory.
TEST(CudaFrees, DoNotWaitLongToCloseHandles) {
  const Setting mps("MOECCL_TEST_CUDA_MPS", "1"), handles("MOECCL_TEST_CUDA_NO_VMM", "1");
  std::barrier both(2);
  const RankOptions options = device_options(RankMode::kMixed, 60'000, 20'000);
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, 3, device, options), pair = nullptr;
        ASSERT_NE(comm, nullptr);
        MOECCL_ASSERT_OK(moecclCommSplit(comm, rank % 2, rank, &pair, nullptr));
        DeviceBuffer in(device, kCount * 4), out(device, kCount * 4);
        in.put(floats(kCount, 1));
        MOECCL_EXPECT_OK(
            moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, comm, nullptr));  // opens them
        if (rank == 2) {
          both.arrive_and_wait();
          usleep(300'000);  // rank 0's operation is on the device now
          const Stopwatch watch;
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          MOECCL_EXPECT_WITHIN(watch, 5000);
        } else if (rank == 0) {
          both.arrive_and_wait();
        }
        if (rank != 1) {
          MOECCL_EXPECT_COMM_OK(moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, pair, nullptr),
                                pair);
          EXPECT_EQ(out.get(), floats(kCount, 2));
          both.arrive_and_wait();
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(pair));
        if (rank != 2) {
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        }
      },
      options);
}

// Memory that processes share is unmapped and not freed. Ranks 0 and 2 are threads of one process; while rank 0's
// message waits for rank 2, all end another communicator.
TEST(CudaFrees, DoNotHoldUpAMessageWhereUnmappingWaits) {
  constexpr size_t kLarge = 2'000'000;  // more than a message without a receiver takes
  const Setting mps("MOECCL_TEST_CUDA_MPS", "1"), waits("MOECCL_TEST_CUDA_UNMAP_WAITS", "1");
  Meeting sent, ended;
  run_on_devices(4, device_options(RankMode::kMixed, 60'000, 10'000),
                 [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
                   moecclComm_t other = nullptr;
                   MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &other, nullptr));
                   DeviceBuffer x(device, kLarge * 4);
                   x.put(floats(kLarge, static_cast<float>(rank)));
                   if (rank == 0) {
                     MOECCL_EXPECT_OK(moecclSend(x.data(), kLarge, moecclFloat32, 2, comm, as_stream(stream)));
                   }
                   EXPECT_TRUE(sent.meet(4));
                   const Stopwatch watch;
                   MOECCL_EXPECT_OK(moecclCommDestroy(other));
                   MOECCL_EXPECT_WITHIN(watch, 5000);
                   EXPECT_TRUE(ended.meet(4));
                   if (rank == 2) {
                     MOECCL_EXPECT_OK(moecclRecv(x.data(), kLarge, moecclFloat32, 0, comm, as_stream(stream)));
                   }
                   EXPECT_TRUE(x.get(stream) == floats(kLarge, rank == 2 ? 0 : static_cast<float>(rank)));
                   moecclResult_t state = moecclInternalError;
                   MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
                   EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
                 });
}

// A call of the program waits for rank 0's allreduce, and keeps all other calls of the context from returning. Rank 0
// must notice without the driver that rank 1 has died, also where the program does not ask.
void death_is_noticed_beside(const std::function<std::function<void()>(CudaDevice&)>& prepare) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  RankOptions options = device_options(RankMode::kProcesses);
  options.may_die = {1};
  for (const bool asks : {true, false}) {
    run_on_devices(2, options, [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
      if (!device.emulated()) GTEST_SKIP() << "processes with a device each, and a driver whose calls wait";
      const Rank r{comm, device, stream, device.allocate(kCount * 4), device.allocate(kCount * 4)};
      const std::function<void()> call = prepare(device);
      r.all_reduce(stream);
      device.synchronize(stream);
      all_have_ended(comm);
      if (rank == 1) {
        usleep(400'000);
        kill(getpid(), SIGKILL);
      }
      r.all_reduce(stream);
      usleep(50'000);  // the kernel runs
      const Stopwatch watch;
      std::thread caller([&] {
        device.make_current();
        call();
      });
      moecclResult_t state = moecclSuccess;
      if (asks) (void)failure_of(comm, &state);
      caller.join();
      MOECCL_EXPECT_WITHIN(watch, 3000);
      const std::string said = failure_of(comm, &state);
      EXPECT_EQ(state, moecclRemoteError) << said;
      EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
    });
  }
}

TEST(CudaFrees, OfTheProgramDoNotHideTheDeathOfAPeer) {
  death_is_noticed_beside([](CudaDevice& device) {
    void* const memory = device.allocate(4096);
    return [&device, memory] { device.release(memory); };
  });
}

// The first launch of a kernel that is loaded lazily does the same.
TEST(CudaFrees, FirstLaunchesOfTheProgramDoNotHideTheDeathOfAPeer) {
  const Setting lazy("CUDA_MODULE_LOADING", "LAZY");
  death_is_noticed_beside([](CudaDevice&) -> std::function<void()> {
    void* const driver = dlopen(std::getenv("MOECCL_CUDA_DRIVER"), RTLD_NOW);
    const auto load =
        reinterpret_cast<int (*)(void**, const void*, unsigned, int*, void**)>(dlsym(driver, "cuModuleLoadDataEx"));
    const auto find = reinterpret_cast<int (*)(void**, void*, const char*)>(dlsym(driver, "cuModuleGetFunction"));
    const auto first = reinterpret_cast<int (*)(void*)>(dlsym(driver, "cuFuncLoad"));
    void *module = nullptr, *kernel = nullptr;
    EXPECT_EQ(load(&module, nullptr, 0, nullptr, nullptr), 0);
    EXPECT_EQ(find(&kernel, module, "emulated_store"), 0);
    return [first, kernel] { EXPECT_EQ(first(kernel), 0); };
  });
}

TEST(CudaFrees, DoNotHoldUpAnotherDevice) {
  const Setting devices("MOECCL_TEST_CUDA_DEVICES", "2");
  end_beside([](const Rank& r) { return [=] { r.all_reduce(r.stream); }; });
}

}  // namespace
}  // namespace moeccl::testing
