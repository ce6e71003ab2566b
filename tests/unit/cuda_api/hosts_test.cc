// CUDA memory whose ranks are on several hosts: what goes wrong is told as on host memory. (That all calls give the
// right bits there is shown by the other tests of this program, which the suite `net` runs on hosts:
// tests/meson.build.)
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "tests/support/cuda_ranks.h"
#include "tests/support/hosts.h"

namespace moeccl::testing {
namespace {

// Hosts by name, so that this runs wherever there is a device.
std::unique_ptr<TestHosts> named_hosts(std::vector<int> weights) {
  std::string why;
  return TestHosts::create({.weights = std::move(weights), .named = true}, &why);
}

RankOptions on(const TestHosts& hosts) {
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 60'000, .init = false};
  options.hosts = const_cast<TestHosts*>(&hosts);
  options.config.timeout_ms = 20'000;
  options.config.init_timeout_ms = 60'000;
  return options;
}

moecclStream_t as_stream(void* stream) { return reinterpret_cast<moecclStream_t>(stream); }

// What the communicator says once the operation that was put on a stream has failed.
std::string failure_of(moecclComm_t comm, moecclResult_t* state) {
  *state = moecclSuccess;
  for (int i = 0; i < 20'000 && (*state == moecclSuccess || *state == moecclInProgress); ++i) {
    EXPECT_EQ(moecclCommGetAsyncError(comm, state), moecclSuccess);
    usleep(1000);
  }
  return moecclGetLastError(comm);
}

TEST(CudaHosts, SayOverWhatTheyReachEachOther) {
  const auto hosts = named_hosts({2, 1});
  RankOptions options = on(*hosts);
  options.config.timeout_ms = 3000;
  Meeting told;
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 3, device, options);
        ASSERT_NE(comm, nullptr);
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
        (void)moecclCommDestroy(comm);
      },
      options);
}

TEST(CudaHosts, RanksThatDisagreeAreNamedAndTheStreamGoesOn) {
  const auto hosts = named_hosts({1, 1});
  const RankOptions options = on(*hosts);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        void* stream = device.make_stream();
        DeviceBuffer a(device, 4096);
        ASSERT_EQ(moecclAllReduce(a.data(), a.data(), rank == 0 ? 100 : 101, moecclFloat32, moecclSum, comm,
                                  as_stream(stream)),
                  moecclSuccess);
        device.synchronize(stream);
        moecclResult_t state = moecclSuccess;
        const std::string said = failure_of(comm, &state);
        EXPECT_EQ(state, moecclMismatch) << said;
        EXPECT_NE(said.find("with 100"), std::string::npos) << said;
        EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
        (void)moecclCommDestroy(comm);
        device.end_stream(stream);
      },
      options);
}

TEST(CudaHosts, MessagesOfDifferentSizesAreAMismatch) {
  const auto hosts = named_hosts({1, 1});
  const RankOptions options = on(*hosts);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 2, device, options);
        ASSERT_NE(comm, nullptr);
        DeviceBuffer a(device, 4096);
        if (rank == 0) {
          EXPECT_EQ(moecclSend(a.data(), 1000, moecclInt8, 1, comm, nullptr), moecclSuccess);
        } else {
          EXPECT_EQ(moecclRecv(a.data(), 1001, moecclInt8, 0, comm, nullptr), moecclMismatch);
          const std::string said = moecclGetLastError(comm);
          EXPECT_NE(said.find("rank 0 sends 1000 bytes, rank 1 expects 1001"), std::string::npos) << said;
        }
        (void)moecclCommDestroy(comm);
      },
      options);
}

// Everybody works on a stream until something happens.
void work_until_failure(int rank, int n, CudaDevice& device, const RankOptions& options, const std::string& must_say,
                        const std::function<void(moecclComm_t)>& now_and_then) {
  moecclComm_t comm = join(rank, n, device, options);
  ASSERT_NE(comm, nullptr);
  void* stream = device.make_stream();
  DeviceBuffer in(device, 240'000), out(device, 240'000);
  moecclResult_t state = moecclSuccess;
  const int64_t until = now_ms() + 40'000;
  for (int i = 0; state == moecclSuccess && now_ms() < until; ++i) {
    state = moecclAllReduce(in.data(), out.data(), 60'000, moecclFloat32, moecclSum, comm, as_stream(stream));
    if (i % 8 == 7) device.synchronize(stream);
    if (i == 20) now_and_then(comm);
  }
  ASSERT_NE(state, moecclSuccess) << "nothing happened";
  device.synchronize(stream);  // does not hang
  const std::string said = moecclGetLastError(comm);
  if (!must_say.empty()) {
    EXPECT_NE(said.find(must_say), std::string::npos) << said;
  }
  MOECCL_EXPECT_OK(moecclCommAbort(comm));
  device.end_stream(stream);
}

TEST(CudaHosts, AKilledProcessIsNamedOnTheOtherHost) {
  const auto hosts = named_hosts({2, 2});
  RankOptions options = on(*hosts);
  options.may_die = {3};
  options.check_leaks = false;
  run_ranks(
      4,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        const auto die = [rank](moecclComm_t) {
          if (rank == 3) kill(getpid(), SIGKILL);
        };
        work_until_failure(rank, 4, device, options, rank == 3 ? "" : "rank 3", die);
      },
      options);
}

TEST(CudaHosts, AnAbortReachesTheOtherHost) {
  const auto hosts = named_hosts({1, 2});
  const RankOptions options = on(*hosts);
  run_ranks(
      3,
      [&](int rank, moecclComm_t) {
        CudaDevice device;
        moecclComm_t comm = join(rank, 3, device, options);
        ASSERT_NE(comm, nullptr);
        void* stream = device.make_stream();
        DeviceBuffer a(device, 4096);
        MOECCL_EXPECT_COMM_OK(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, nullptr), comm);
        if (rank == 0) {
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
        } else {
          ASSERT_EQ(moecclAllReduce(a.data(), a.data(), 100, moecclFloat32, moecclSum, comm, as_stream(stream)),
                    moecclSuccess);
          device.synchronize(stream);
          moecclResult_t state = moecclSuccess;
          const std::string said = failure_of(comm, &state);
          EXPECT_EQ(state, moecclRemoteError) << said;
          EXPECT_NE(said.find("rank 0"), std::string::npos) << said;
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
        }
        device.end_stream(stream);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
