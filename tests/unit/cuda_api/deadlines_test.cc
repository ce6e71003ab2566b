// SPDX-License-Identifier: Apache-2.0
// The communicator's timeout is for what peers do. Work of the program that precedes a launch in its stream takes as
// long as it takes.
#include <unistd.h>

#include <atomic>

#include "tests/support/cuda_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kFloats = 100'000;

void operations_behind_held_streams(bool messages) {
  run_on_devices(
      2, device_options(RankMode::kThreads, 60'000, 1'000),
      [&](int rank, moecclComm_t comm, CudaDevice& device, void* stream) {
        DeviceBuffer in(device, kFloats * 4), out(device, kFloats * 4);
        in.put(floats(kFloats, static_cast<float>(rank)));
        uint64_t* const word = device.make_word();
        const auto operation = [&] {
          if (!messages) {
            MOECCL_EXPECT_OK(
                moecclAllReduce(in.data(), out.data(), kFloats, moecclFloat32, moecclSum, comm, as_stream(stream)));
            return;
          }
          MOECCL_EXPECT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(moecclSend(in.data(), kFloats, moecclFloat32, 1 - rank, comm, as_stream(stream)));
          MOECCL_EXPECT_OK(moecclRecv(out.data(), kFloats, moecclFloat32, 1 - rank, comm, as_stream(stream)));
          MOECCL_EXPECT_OK(moecclGroupEnd());
        };
        const auto check = [&] {
          const float want = messages ? static_cast<float>(1 - rank) : 1;
          EXPECT_TRUE(out.get(stream) == floats(kFloats, want));
          moecclResult_t state = moecclInternalError;
          MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
          EXPECT_EQ(state, moecclSuccess) << moecclGetLastError(comm);
        };
        for (const useconds_t held_us : {1'500'000u, 3'000'000u}) {
          std::atomic_ref(*word).store(0);
          all_have_ended(comm);
          device.hold(stream, word, 1);
          operation();
          usleep(held_us);
          std::atomic_ref(*word).store(1);
          check();
        }
        all_have_ended(comm);
        if (rank == 0) usleep(100'000);  // the other rank polls for longer than its first look at the word
        operation();
        check();
        all_have_ended(comm);
        device.end_word(word);
      });
}

TEST(CudaDeadlines, OfOperationsDoNotCountTheProgramsOwnWork) { operations_behind_held_streams(false); }
TEST(CudaDeadlines, OfMessagesDoNotCountTheProgramsOwnWork) { operations_behind_held_streams(true); }

}  // namespace
}  // namespace moeccl::testing
