// SPDX-License-Identifier: Apache-2.0
// The persistent kernel with ranks on several hosts: data for another host passes through the rank's proxy. Uses named
// hosts, so that this runs wherever there is a device, which the processes must share through MPS. collectives_test.cc
// on hosts (net_cuda_walk_*) shows that all collectives give the right bits there.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <utility>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

class CudaWalkHosts : public ::testing::Test {
 protected:
  void SetUp() override { setenv("MOECCL_TEST_CUDA_MPS", "1", 1); }
  void TearDown() override { unsetenv("MOECCL_TEST_CUDA_MPS"); }

  static RankOptions mode(RankMode mode) { return device_options(mode, 60'000, 20'000); }
  // For tests in which rank 2 dies.
  static RankOptions without_rank_2() {
    RankOptions options = mode(RankMode::kProcesses);
    options.may_die = {2};
    options.check_leaks = false;
    return options;
  }
  // `weights`: the proportion in which the ranks' processes are spread over hosts.
  template <class Body>
  void run(int n, std::vector<int> weights, const Body& body, RankOptions options = mode(RankMode::kProcesses)) {
    const auto hosts = named_hosts(std::move(weights));
    run_on(*hosts, n, body, std::move(options));
  }
  template <class Body>
  void run_on(TestHosts& hosts, int n, const Body& body, RankOptions options = mode(RankMode::kProcesses)) {
    options.hosts = &hosts;
    Shared<std::atomic<int>> alone;
    run_on_devices(n, options, [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
      if (!device.shared_by_mps()) {
        *alone = 1;
        return;
      }
      body(rank, comm, device, stream);
    });
    if (*alone != 0) GTEST_SKIP() << "processes do not share the device through MPS";
  }
};

TEST_F(CudaWalkHosts, AnOperationIsOneLaunchARank) {
  run(3, {1, 1, 1}, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
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

// A put that the line has no room for may stay open when the next operation begins.
TEST_F(CudaWalkHosts, OperationsFollowOneAnotherOverASlowLine) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {1, 1}, .rate = "400mbit"}, &why);
  if (hosts == nullptr) GTEST_SKIP() << why;
  run_on(*hosts, 2, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    constexpr size_t kCount = 2 << 20;
    DeviceBuffer large(device, kCount * 4), small(device, 4);
    for (int i = 1; i <= 3; ++i) {
      if (rank == 0) large.put(floats(kCount, static_cast<float>(i)));
      small.put(floats(1, 1));
      for (int k = 0; k < 2; ++k) {
        MOECCL_ASSERT_COMM_OK(
            moecclBroadcast(large.data(), large.data(), kCount, moecclFloat32, 0, comm, as_stream(stream)), comm);
        MOECCL_ASSERT_COMM_OK(
            moecclAllReduce(small.data(), small.data(), 1, moecclFloat32, moecclSum, comm, as_stream(stream)), comm);
      }
      EXPECT_EQ(small.get(stream), floats(1, 4));
      EXPECT_EQ(large.get(stream), floats(kCount, static_cast<float>(i)));
    }
  });
}

// Thread ranks reach their neighbours' memory directly, and the other host through their proxies.
TEST_F(CudaWalkHosts, AReplayRunsWithoutTheHost) {
  run(
      4, {1, 1},
      [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
        constexpr size_t kCount = 3000;
        DeviceBuffer in(device, kCount * 4), sum(device, kCount * 4), all(device, 4 * kCount * 4);
        // One operation comes before, so that the graph does not begin at the first one.
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        device.synchronize(stream);
        device.begin_capture(stream);
        MOECCL_ASSERT_OK(
            moecclAllReduce(in.data(), sum.data(), kCount, moecclFloat32, moecclSum, comm, as_stream(stream)));
        MOECCL_ASSERT_OK(moecclAllGather(sum.data(), all.data(), kCount, moecclFloat32, comm, as_stream(stream)));
        void* graph = device.end_capture(stream);
        ASSERT_NE(graph, nullptr);
        EXPECT_EQ(device.graph_kernels(graph), 2u);
        void* instance = device.instantiate(graph);
        all_have_ended(comm);
        for (int replay = 0; replay < 5; ++replay) {
          in.put(floats(kCount, static_cast<float>(rank + replay)));
          device.launch_graph(instance, stream);
          EXPECT_EQ(all.get(stream), floats(4 * kCount, static_cast<float>(4 * replay + 6))) << "replay " << replay;
          // Operations outside the graph continue with the same numbers.
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

// Each rank sends rank r this many elements with its own number as value.
struct Splits {
  size_t counts[3], from[3], into[3], arrive[3];
  explicit Splits(int rank) {
    size_t sent = 0, came = 0;
    for (size_t r = 0; r < 3; ++r) {
      counts[r] = (static_cast<size_t>(rank) + r) % 3 * 20'000 + r;
      arrive[r] = (static_cast<size_t>(rank) + r) % 3 * 20'000 + static_cast<size_t>(rank);
      from[r] = std::exchange(sent, sent + counts[r]);
      into[r] = std::exchange(came, came + arrive[r]);
    }
  }
};

TEST_F(CudaWalkHosts, BlocksOfUnequalSizesAreOneLaunchARank) {
  run(3, {2, 1}, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    const Splits s(rank);
    constexpr size_t kMost = 3 * 40'002;
    DeviceBuffer in(device, kMost * 4), out(device, kMost * 4);
    in.put(floats(kMost, static_cast<float>(rank)));
    const auto exchange = [&] {
      return moecclAllToAllv(in.data(), s.counts, s.from, out.data(), s.arrive, s.into, moecclFloat32, comm,
                             as_stream(stream));
    };
    const auto check = [&] {
      const std::vector<char> got = out.get(stream);
      for (size_t r = 0; r < 3; ++r) {
        const auto expected = floats(s.arrive[r], static_cast<float>(r));
        EXPECT_TRUE(s.arrive[r] == 0 || std::memcmp(&got[s.into[r] * 4], expected.data(), s.arrive[r] * 4) == 0);
      }
    };
    const int before = device.launches();
    MOECCL_ASSERT_OK(exchange());
    check();
    if (device.emulated()) {
      EXPECT_EQ(device.launches() - before, 1);
    }
    device.begin_capture(stream);
    MOECCL_ASSERT_OK(exchange());
    void* graph = device.end_capture(stream);
    void* instance = device.instantiate(graph);
    all_have_ended(comm);
    for (int replay = 0; replay < 3; ++replay) {
      out.put(floats(kMost, -1), stream);
      device.launch_graph(instance, stream);
      check();
    }
    device.end_graph(graph, instance);
  });
}

// A launch moves rank 0's message to rank 1 and a thread drives the one to rank 2, for which rank 1 waits first.
TEST_F(CudaWalkHosts, MessagesInsideAHostDoNotHoldUpThoseBetweenHosts) {
  run(3, {2, 1}, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    constexpr size_t kCount = 1'000'000;
    DeviceBuffer x(device, kCount * 4), y(device, kCount * 4);
    x.put(floats(kCount, static_cast<float>(rank + 1)));
    all_have_ended(comm);
    const auto send = [&](DeviceBuffer& from, int to) {
      MOECCL_EXPECT_OK(moecclSend(from.data(), kCount, moecclFloat32, to, comm, as_stream(stream)));
    };
    const auto receive = [&](DeviceBuffer& to, int from) {
      MOECCL_EXPECT_OK(moecclRecv(to.data(), kCount, moecclFloat32, from, comm, as_stream(stream)));
    };
    if (rank == 0) {
      MOECCL_EXPECT_OK(moecclGroupStart());
      send(x, 1);
      send(x, 2);
      MOECCL_EXPECT_OK(moecclGroupEnd());
    } else if (rank == 1) {
      receive(x, 2);
      receive(y, 0);
    } else {
      receive(y, 0);
      send(y, 1);
    }
    EXPECT_TRUE(x.get(stream) == floats(kCount, rank == 2 ? 3 : 1));
    if (rank != 0) {
      EXPECT_TRUE(y.get(stream) == floats(kCount, 1));
    }
    all_have_ended(comm);
  });
}

// Rank 2 dies while rank 0's allreduce waits on the device for rank 1, and its message to rank 2 on the host.
TEST_F(CudaWalkHosts, ADeadHostEndsAMixedGroup) {
  run(
      3, {2, 1},
      [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
        constexpr size_t kCount = 1'000'000;
        DeviceBuffer sum(device, 4000), x(device, kCount * 4);
        all_have_ended(comm);
        if (rank == 2) {
          usleep(500'000);
          kill(getpid(), SIGKILL);
        }
        const Stopwatch watch;
        if (rank == 0) {
          MOECCL_EXPECT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(
              moecclAllReduce(sum.data(), sum.data(), 1000, moecclFloat32, moecclSum, comm, as_stream(stream)));
          MOECCL_EXPECT_OK(moecclSend(x.data(), kCount, moecclFloat32, 2, comm, as_stream(stream)));
          MOECCL_EXPECT_OK(moecclGroupEnd());
        }
        moecclResult_t state = moecclSuccess;
        if (rank == 1) usleep(1'000'000);
        if (rank == 0) {
          const std::string said = failure_of(comm, &state);
          EXPECT_EQ(state, moecclRemoteError) << said;
          EXPECT_NE(said.find("rank 2"), std::string::npos) << said;
          device.synchronize(stream);
          MOECCL_EXPECT_WITHIN(watch, 5000);
        }
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
        comm = nullptr;
      },
      without_rank_2());
}

TEST_F(CudaWalkHosts, SizesThatDifferBetweenHostsAreNamed) {
  run(2, {1, 1}, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    DeviceBuffer a(device, 4096), b(device, 4096);
    const size_t counts[2] = {10, 10}, others[2] = {rank == 1 ? 11u : 10u, 10}, at[2] = {0, 20};
    MOECCL_ASSERT_OK(
        moecclAllToAllv(a.data(), counts, at, b.data(), others, at, moecclFloat32, comm, as_stream(stream)));
    device.synchronize(stream);
    moecclResult_t state = moecclSuccess;
    const std::string said = failure_of(comm, &state);
    EXPECT_EQ(state, moecclMismatch) << said;
    EXPECT_NE(said.find("rank 0 sends 10 elements, rank 1 expects 11"), std::string::npos) << said;
  });
}

TEST_F(CudaWalkHosts, AMissingRankIsATimeoutThatNamesItAndItsStep) {
  RankOptions options = mode(RankMode::kProcesses);
  options.config.timeout_ms = 2000;
  Meeting told;
  run(
      2, {1, 1},
      [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
        DeviceBuffer a(device, 4096);
        MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
        device.synchronize(stream);
        if (rank == 0) {
          MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
          device.synchronize(stream);  // it ends, because the kernel leaves
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
  run(2, {1, 1}, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
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

TEST_F(CudaWalkHosts, ADeadHostEndsTheKernels) {
  run(
      3, {2, 1},
      [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
        const std::string said = work_until_failure(comm, device, stream, 10, [rank] {
          if (rank == 2) kill(getpid(), SIGKILL);
        });
        EXPECT_NE(said.find("rank 2"), std::string::npos) << said;
      },
      without_rank_2());
}

TEST_F(CudaWalkHosts, AnAbortReachesTheOtherHostsKernels) {
  run(3, {2, 1}, [](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    DeviceBuffer a(device, 4096);
    MOECCL_ASSERT_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)));
    device.synchronize(stream);
    if (rank == 2) {
      MOECCL_EXPECT_OK(moecclCommAbort(comm));
      comm = nullptr;
      return;
    }
    const moecclResult_t issued =
        moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream));
    if (issued != moecclSuccess) {  // the abort was here before the call
      EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 2"), std::string::npos) << moecclGetLastError(comm);
      return;
    }
    device.synchronize(stream);
    moecclResult_t state = moecclSuccess;
    const std::string said = failure_of(comm, &state);
    EXPECT_NE(said.find("rank 2"), std::string::npos) << said;
  });
}

}  // namespace
}  // namespace moeccl::testing
