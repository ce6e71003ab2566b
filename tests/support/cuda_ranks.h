// SPDX-License-Identifier: Apache-2.0
// Ranks of a communicator whose buffers are on a device.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/cuda_device.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

inline moecclStream_t as_stream(void* stream) { return reinterpret_cast<moecclStream_t>(stream); }

// Sets an environment variable during its lifetime.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

// Returns the bytes of n floats of this value.
inline std::vector<char> floats(size_t n, float value) {
  std::vector<char> bytes(n * sizeof(value));
  for (size_t i = 0; i < n; ++i) std::memcpy(&bytes[i * sizeof(value)], &value, sizeof(value));
  return bytes;
}

// Waits for all ranks. Comes before calls that wait for the whole device, such as cuMemFreeHost: while one waits for
// another rank's operation, that rank's thread cannot drive it.
inline void all_have_ended(moecclComm_t comm) {
  float x = 0;
  EXPECT_EQ(moecclAllReduce(&x, &x, 1, moecclFloat32, moecclSum, comm, nullptr), moecclSuccess);
}

// Returns options for ranks that join on a device themselves.
inline RankOptions device_options(RankMode mode, int deadline_ms = 120'000, int timeout_ms = 60'000) {
  RankOptions options{.mode = mode, .deadline_ms = deadline_ms, .init = false};
  options.config.timeout_ms = capped_ms(timeout_ms);
  options.config.init_timeout_ms = capped_ms(60'000);
  return options;
}

// Creates hosts by name, so that this runs wherever there is a device.
inline std::unique_ptr<TestHosts> named_hosts(std::vector<int> weights) {
  std::string why;
  return TestHosts::create({.weights = std::move(weights), .named = true}, &why);
}

// Joins the test's communicator on a device. Returns null when that failed. A missing device is a failure of the
// machine that runs the test.
inline moecclComm_t join(int rank, int n, const CudaDevice& device, const RankOptions& options) {
  moecclComm_t comm = nullptr;
  EXPECT_TRUE(device.ok()) << "no CUDA device";
  EXPECT_EQ(moecclCommInitRankConfig(&comm, n, unique_id(), rank, &options.config), moecclSuccess)
      << moecclGetLastError(nullptr);
  return comm;
}

// Runs n ranks, each on the device of its number where there are as many, with a communicator and a stream: body(rank,
// comm, device, stream). A body that aborts its communicator sets it to null.
template <class Body>
void run_on_devices(int n, const RankOptions& options, Body&& body) {
  run_ranks(
      n,
      [&](int rank, moecclComm_t) {
        CudaDevice device(rank);
        moecclComm_t comm = join(rank, n, device, options);
        ASSERT_NE(comm, nullptr);
        void* stream = device.make_stream();
        body(rank, comm, device, stream);
        if (comm != nullptr) {
          moecclResult_t state = moecclInternalError;
          (void)moecclCommGetAsyncError(comm, &state);
          const moecclResult_t ended = moecclCommDestroy(comm);
          if (state == moecclSuccess) {  // after a failure it may return the error again
            MOECCL_EXPECT_OK(ended);
          }
        }
        device.end_stream(stream);
      },
      options);
}

// Returns the communicator's error sentence once the operation on a stream has failed.
inline std::string failure_of(moecclComm_t comm, moecclResult_t* state) {
  *state = moecclSuccess;
  for (int i = 0; i < 20'000 && (*state == moecclSuccess || *state == moecclInProgress); ++i) {
    EXPECT_EQ(moecclCommGetAsyncError(comm, state), moecclSuccess);
    usleep(1000);
  }
  return moecclGetLastError(comm);
}

// Works on the stream, and calls now_and_then after some operations, until one fails. Then aborts the communicator and
// returns its error sentence.
inline std::string work_until_failure(moecclComm_t& comm, CudaDevice& device, void* stream, int after,
                                      const std::function<void()>& now_and_then) {
  DeviceBuffer in(device, 24'000), out(device, 24'000);
  moecclResult_t state = moecclSuccess;
  const int64_t until = now_ms() + 40'000;
  for (int i = 0; state == moecclSuccess && now_ms() < until; ++i) {
    state = moecclAllReduce(in.data(), out.data(), 6'000, moecclFloat32, moecclSum, comm, as_stream(stream));
    if (i % 4 == 3) device.synchronize(stream);
    if (i == after) now_and_then();
  }
  EXPECT_NE(state, moecclSuccess) << "nothing happened";
  device.synchronize(stream);  // does not hang
  std::string said = moecclGetLastError(comm);
  MOECCL_EXPECT_OK(moecclCommAbort(comm));
  comm = nullptr;
  return said;
}

}  // namespace moeccl::testing
