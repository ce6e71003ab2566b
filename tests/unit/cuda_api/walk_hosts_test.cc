// The persistent kernel of ranks on several hosts: what goes to another host passes through the rank's proxy. Named
// hosts, so that this runs wherever there is a device; their processes must share it through MPS. That all collectives
// give the right bits there is shown by collectives_test.cc on hosts (net_cuda_walk_*).
#include <signal.h>
#include <unistd.h>

#include "tests/support/cuda_ranks.h"
#include "tests/support/hosts.h"

namespace moeccl::testing {
namespace {

moecclStream_t as_stream(void* stream) { return reinterpret_cast<moecclStream_t>(stream); }

std::vector<char> floats(size_t n, float value) {
  std::vector<char> bytes(n * 4);
  for (size_t i = 0; i < n; ++i) std::memcpy(&bytes[i * 4], &value, 4);
  return bytes;
}

class CudaWalkHosts : public ::testing::Test {
 protected:
  void SetUp() override { setenv("MOECCL_TEST_CUDA_MPS", "1", 1); }
  void TearDown() override { unsetenv("MOECCL_TEST_CUDA_MPS"); }

  static RankOptions mode(RankMode mode) {
    RankOptions options;
    options.mode = mode;
    return options;
  }
  // `weights`: how the ranks' processes are spread over hosts. A body that has aborted its communicator sets it to
  // null.
  using Body = std::function<void(int, CudaDevice&, moecclComm_t&, void*)>;
  void run(int n, std::vector<int> weights, const Body& body, RankOptions options = mode(RankMode::kProcesses)) {
    std::string why;
    const auto hosts = TestHosts::create({.weights = std::move(weights), .named = true}, &why);
    options.hosts = hosts.get();
    options.deadline_ms = 60'000;
    options.init = false;
    if (options.config.timeout_ms == 0) options.config.timeout_ms = 20'000;
    options.config.init_timeout_ms = 60'000;
    Shared<std::atomic<int>> skipped;
    run_ranks(
        n,
        [&](int rank, moecclComm_t) {
          CudaDevice device;
          ASSERT_TRUE(device.ok());
          if (!device.shared_by_mps()) {
            *skipped = 1;
            return;
          }
          moecclComm_t comm = join(rank, n, device, options);
          ASSERT_NE(comm, nullptr);
          void* stream = device.make_stream();
          body(rank, device, comm, stream);
          if (comm != nullptr) (void)moecclCommDestroy(comm);
          device.end_stream(stream);
        },
        options);
    if (*skipped != 0) GTEST_SKIP() << "processes do not share the device through MPS";
  }
};

// What the communicator says once something on a stream has failed.
std::string failure_of(moecclComm_t comm, moecclResult_t* state) {
  *state = moecclSuccess;
  for (int i = 0; i < 20'000 && (*state == moecclSuccess || *state == moecclInProgress); ++i) {
    EXPECT_EQ(moecclCommGetAsyncError(comm, state), moecclSuccess);
    usleep(1000);
  }
  return moecclGetLastError(comm);
}

TEST_F(CudaWalkHosts, AnOperationIsOneLaunchARank) {
  run(3, {1, 1, 1}, [](int rank, CudaDevice& device, moecclComm_t& comm, void* stream) {
    constexpr size_t kCount = 30'000;
    DeviceBuffer in(device, kCount * 4), all(device, 3 * kCount * 4);
    in.put(floats(kCount, static_cast<float>(rank + 1)));
    for (int i = 0; i < 4; ++i) {
      const int before = device.launches();
      MOECCL_ASSERT_OK(
          moecclAllReduce(in.data(), all.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
      device.synchronize(stream);
      if (device.emulated()) {
        EXPECT_EQ(device.launches() - before, 1);
      }
      std::vector<char> sum = all.get(stream);
      sum.resize(kCount * 4);
      EXPECT_EQ(sum, floats(kCount, 6));
    }
    const int before = device.launches();
    MOECCL_ASSERT_OK(moecclAllGather(in.data(), all.data(), kCount, moecclFloat32, comm, as_stream(stream)));
    device.synchronize(stream);
    if (device.emulated()) {
      EXPECT_EQ(device.launches() - before, 1);
    }
    const std::vector<char> got = all.get(stream);
    for (int r = 0; r < 3; ++r)
      EXPECT_EQ(std::memcmp(&got[static_cast<size_t>(r) * kCount * 4], floats(kCount, static_cast<float>(r + 1)).data(),
                            kCount * 4),
                0);
  });
}

// Thread ranks reach their neighbours' memory, the other host through their proxies.
TEST_F(CudaWalkHosts, AReplayRunsWithoutTheHost) {
  run(
      4, {1, 1},
      [](int rank, CudaDevice& device, moecclComm_t& comm, void* stream) {
        constexpr size_t kCount = 3000;
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), all(device, 4 * kCount * 4);
        // One before, so that the graph does not begin at the first operation.
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        device.synchronize(stream);
        device.begin_capture(stream);
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        MOECCL_ASSERT_OK(moecclAllGather(sum.data(), all.data(), kCount, moecclFloat32, comm, as_stream(stream)));
        void* graph = device.end_capture(stream);
        ASSERT_NE(graph, nullptr);
        EXPECT_EQ(device.graph_nodes(graph), 2u);
        void* instance = device.instantiate(graph);
        for (int replay = 0; replay < 5; ++replay) {
          in.put(floats(kCount, static_cast<float>(rank + replay)));
          device.launch_graph(instance, stream);
          EXPECT_EQ(all.get(stream), floats(4 * kCount, static_cast<float>(4 * replay + 6))) << "replay " << replay;
          // Operations outside of the graph go on with the same numbers.
          MOECCL_ASSERT_OK(
              moecclAllReduce(in.data(), sum.data(), 10, moecclFloat32, moecclMax, comm, as_stream(stream)));
          std::vector<char> ten = sum.get(stream);
          ten.resize(40);
          EXPECT_EQ(ten, floats(10, static_cast<float>(3 + replay)));
        }
        device.end_graph(graph, instance);
      },
      mode(RankMode::kMixed));
}

TEST_F(CudaWalkHosts, AMissingRankIsATimeoutThatNamesItAndItsStep) {
  RankOptions options = mode(RankMode::kProcesses);
  options.config.timeout_ms = 2000;
  Meeting told;
  run(
      2, {1, 1},
      [&](int rank, CudaDevice& device, moecclComm_t& comm, void* stream) {
        DeviceBuffer a(device, 4096);
        MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
        device.synchronize(stream);
        if (rank == 0) {
          MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
          device.synchronize(stream);  // ends: the kernel leaves
          moecclResult_t state = moecclSuccess;
          const std::string said = failure_of(comm, &state);
          EXPECT_EQ(state, moecclTimeout) << said;
          EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
          EXPECT_NE(said.find("step "), std::string::npos) << said;
          told.arrive();
        } else {
          (void)told.wait_for(1);
        }
      },
      options);
}

TEST_F(CudaWalkHosts, RanksThatDisagreeAreNamed) {
  run(2, {1, 1}, [](int rank, CudaDevice& device, moecclComm_t& comm, void* stream) {
    DeviceBuffer a(device, 4096);
    MOECCL_ASSERT_OK(
        moecclAllReduce(a.data(), a.data(), rank == 0 ? 100 : 101, moecclFloat32, moecclSum, comm, as_stream(stream)));
    device.synchronize(stream);
    moecclResult_t state = moecclSuccess;
    const std::string said = failure_of(comm, &state);
    EXPECT_EQ(state, moecclMismatch) << said;
    EXPECT_NE(said.find("100"), std::string::npos) << said;
    EXPECT_NE(said.find("101"), std::string::npos) << said;
  });
}

// Everybody works until something happens to rank 2, which is on the other host.
void work_until_failure(CudaDevice& device, moecclComm_t comm, void* stream, const std::string& must_say,
                        const std::function<void()>& at_the_tenth) {
  DeviceBuffer in(device, 24'000), out(device, 24'000);
  moecclResult_t state = moecclSuccess;
  const int64_t until = now_ms() + 40'000;
  for (int i = 0; state == moecclSuccess && now_ms() < until; ++i) {
    state = moecclAllReduce(in.data(), out.data(), 6'000, moecclFloat32, moecclSum, comm, as_stream(stream));
    if (i % 4 == 3) device.synchronize(stream);
    if (i == 10) at_the_tenth();
  }
  ASSERT_NE(state, moecclSuccess) << "nothing happened";
  device.synchronize(stream);  // does not hang
  const std::string said = moecclGetLastError(comm);
  EXPECT_NE(said.find(must_say), std::string::npos) << said;
}

TEST_F(CudaWalkHosts, ADeadHostEndsTheKernels) {
  RankOptions options = mode(RankMode::kProcesses);
  options.may_die = {2};
  options.check_leaks = false;
  run(
      3, {2, 1},
      [](int rank, CudaDevice& device, moecclComm_t& comm, void* stream) {
        work_until_failure(device, comm, stream, "rank 2", [rank] {
          if (rank == 2) kill(getpid(), SIGKILL);
        });
      },
      options);
}

TEST_F(CudaWalkHosts, AnAbortReachesTheOtherHostsKernels) {
  run(3, {2, 1}, [](int rank, CudaDevice& device, moecclComm_t& comm, void* stream) {
    DeviceBuffer a(device, 4096);
    MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
    device.synchronize(stream);
    if (rank == 2) {
      MOECCL_EXPECT_OK(moecclCommAbort(comm));
      comm = nullptr;
      return;
    }
    MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
    device.synchronize(stream);
    moecclResult_t state = moecclSuccess;
    const std::string said = failure_of(comm, &state);
    EXPECT_NE(said.find("rank 2"), std::string::npos) << said;
  });
}

}  // namespace
}  // namespace moeccl::testing
