// SPDX-License-Identifier: Apache-2.0
// CUDA memory with ranks on several hosts: failures are reported as on host memory. (The other tests of this program,
// which the suite `net` runs on hosts, show that all calls give the right bits there: tests/meson.build.)
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

RankOptions on(const TestHosts& hosts) {
  RankOptions options = device_options(RankMode::kProcesses, 60'000, 20'000);
  options.hosts = const_cast<TestHosts*>(&hosts);
  return options;
}

TEST(CudaHosts, SayOverWhatTheyReachEachOther) {
  const auto hosts = named_hosts({2, 1});
  RankOptions options = on(*hosts);
  options.config.timeout_ms = 3000;
  Meeting told;
  run_on_devices(3, options, [&](int rank, moecclComm_t& comm, CudaDevice& device, void*) {
    DeviceBuffer a(device, 4096);
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr), comm);
    if (rank == 0) {
      EXPECT_EQ(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr), moecclTimeout);
      const std::string said = moecclGetLastError(comm);
      EXPECT_NE(said.find("rank 1 (cuda"), std::string::npos) << said;
      EXPECT_NE(said.find("rank 2 (cuda over tcp"), std::string::npos) << said;
      told.arrive();
    } else {
      (void)told.wait_for(1);
    }
  });
}

TEST(CudaHosts, ExplainSaysWhyDataIsStagedInHostMemory) {
  const auto hosts = named_hosts({2, 1});
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        if (rank == 1) setenv("MOECCL_CUDA_IPC", "0", 1);  // a process of its own
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, 3, device, on(*hosts));
        ASSERT_NE(comm, nullptr);
        DeviceBuffer a(device, 4096);
        MOECCL_EXPECT_COMM_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr), comm);
        char text[16384] = {};
        MOECCL_EXPECT_OK(moecclPlanExplain(comm, moecclOpAllReduce, 100, moecclFloat32, text, sizeof(text), nullptr));
        EXPECT_NE(std::string(text).find("rank 1: MOECCL_CUDA_IPC=0"), std::string::npos) << text;
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      on(*hosts));
}

TEST(CudaHosts, RanksThatDisagreeAreNamedAndTheStreamGoesOn) {
  const auto hosts = named_hosts({1, 1});
  run_on_devices(2, on(*hosts), [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    DeviceBuffer a(device, 4096);
    ASSERT_EQ(
        moecclAllReduce(a.data(), a.data(), rank == 0 ? 100 : 101, moecclFloat32, moecclSum, comm, as_stream(stream)),
        moecclSuccess);
    device.synchronize(stream);
    moecclResult_t state = moecclSuccess;
    const std::string said = failure_of(comm, &state);
    EXPECT_EQ(state, moecclMismatch) << said;
    EXPECT_NE(said.find("with 100"), std::string::npos) << said;
    EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
  });
}

TEST(CudaHosts, MessagesOfDifferentSizesAreAMismatch) {
  const auto hosts = named_hosts({1, 1});
  run_on_devices(2, on(*hosts), [&](int rank, moecclComm_t& comm, CudaDevice& device, void*) {
    DeviceBuffer a(device, 4096);
    if (rank == 0) {
      EXPECT_EQ(moecclSend(a.data(), 1000, moecclInt8, 1, comm, nullptr), moecclSuccess);
    } else {
      EXPECT_EQ(moecclRecv(a.data(), 1001, moecclInt8, 0, comm, nullptr), moecclMismatch);
      const std::string said = moecclGetLastError(comm);
      EXPECT_NE(said.find("rank 0 sends 1000 bytes, rank 1 expects 1001"), std::string::npos) << said;
    }
  });
}

TEST(CudaHosts, AKilledProcessIsNamedOnTheOtherHost) {
  const auto hosts = named_hosts({2, 2});
  RankOptions options = on(*hosts);
  options.may_die = {3};
  options.check_leaks = false;
  run_on_devices(4, options, [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    const std::string said = work_until_failure(comm, device, stream, 20, [rank] {
      if (rank == 3) kill(getpid(), SIGKILL);
    });
    EXPECT_NE(said.find("rank 3"), std::string::npos) << said;
  });
}

TEST(CudaHosts, AnAbortReachesTheOtherHost) {
  const auto hosts = named_hosts({1, 2});
  Meeting begun;  // an abort may overtake the last part of the first sum
  run_on_devices(3, on(*hosts), [&](int rank, moecclComm_t& comm, CudaDevice& device, void* stream) {
    DeviceBuffer a(device, 4096);
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr), comm);
    if (rank == 0) {
      EXPECT_TRUE(begun.wait_for(2));
    } else {
      ASSERT_EQ(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)),
                moecclSuccess);
      begun.arrive();
      device.synchronize(stream);
      moecclResult_t state = moecclSuccess;
      const std::string said = failure_of(comm, &state);
      EXPECT_EQ(state, moecclRemoteError) << said;
      EXPECT_NE(said.find("rank 0"), std::string::npos) << said;
    }
    MOECCL_EXPECT_OK(moecclCommAbort(comm));
    comm = nullptr;
  });
}

}  // namespace
}  // namespace moeccl::testing
