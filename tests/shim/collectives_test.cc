// SPDX-License-Identifier: Apache-2.0
// An ordinary NCCL program on host memory with the preloaded shim: every collective, many types, 2 to 4 ranks.
#include <numeric>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 1003;  // odd, so that blocks do not align

// Small integers are exact in every type and in any order of summation.
double value(int rank, size_t i) { return static_cast<double>((i * 7 + static_cast<size_t>(rank) * 3) % 5) + 1; }

template <class T>
std::vector<T> input(int rank, size_t n) {
  std::vector<T> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = static_cast<T>(value(rank, i));
  return v;
}

double reduced(ncclRedOp_t op, int n, size_t i) {
  double r = value(0, i);
  for (int k = 1; k < n; ++k) {
    const double v = value(k, i);
    switch (op) {
      case ncclProd:
        r *= v;
        break;
      case ncclMax:
        r = std::max(r, v);
        break;
      case ncclMin:
        r = std::min(r, v);
        break;
      default:
        r += v;
    }
  }
  return r;
}

template <class T>
void reductions(ncclComm_t comm, int rank, int n, ncclDataType_t type) {
  const auto un = static_cast<size_t>(n);
  for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin}) {
    const std::vector<T> in = input<T>(rank, kCount);
    std::vector<T> out(kCount);
    ASSERT_NCCL(ncclAllReduce(in.data(), out.data(), kCount, type, op, comm, nullptr));
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(out[i], static_cast<T>(reduced(op, n, i))) << i << " op " << op;
    std::vector<T> place = in;
    ASSERT_NCCL(ncclAllReduce(place.data(), place.data(), kCount, type, op, comm, nullptr));
    ASSERT_EQ(place, out);

    std::vector<T> at_root(kCount);
    ASSERT_NCCL(
        ncclReduce(in.data(), rank == n - 1 ? at_root.data() : nullptr, kCount, type, op, n - 1, comm, nullptr));
    if (rank == n - 1) {
      ASSERT_EQ(at_root, out);
    }

    const std::vector<T> wide = input<T>(rank, kCount * un);
    std::vector<T> mine(kCount);
    ASSERT_NCCL(ncclReduceScatter(wide.data(), mine.data(), kCount, type, op, comm, nullptr));
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(mine[i], static_cast<T>(reduced(op, n, kCount * static_cast<size_t>(rank) + i)));
    }
  }
}

template <class T>
void moves(ncclComm_t comm, int rank, int n, ncclDataType_t type) {
  const auto un = static_cast<size_t>(n), ur = static_cast<size_t>(rank);
  const std::vector<T> in = input<T>(rank, kCount);
  std::vector<T> all(kCount * un);
  const auto expect_gathered = [&](const std::vector<T>& got) {
    for (int k = 0; k < n; ++k) {
      for (size_t i = 0; i < kCount; ++i)
        ASSERT_EQ(got[kCount * static_cast<size_t>(k) + i], static_cast<T>(value(k, i)));
    }
  };
  ASSERT_NCCL(ncclAllGather(in.data(), all.data(), kCount, type, comm, nullptr));
  expect_gathered(all);
  std::vector<T> place(kCount * un);
  std::copy(in.begin(), in.end(), place.begin() + static_cast<ptrdiff_t>(kCount * ur));
  ASSERT_NCCL(ncclAllGather(place.data() + kCount * ur, place.data(), kCount, type, comm, nullptr));
  expect_gathered(place);

  std::vector<T> one = in;
  ASSERT_NCCL(ncclBroadcast(in.data(), one.data(), kCount, type, 1, comm, nullptr));
  ASSERT_EQ(one, input<T>(1, kCount));
  one = in;
  ASSERT_NCCL(ncclBcast(one.data(), kCount, type, 0, comm, nullptr));
  ASSERT_EQ(one, input<T>(0, kCount));

  const std::vector<T> wide = input<T>(rank, kCount * un);
  for (const bool other_spelling : {false, true}) {
    std::vector<T> got(kCount * un);
    const auto alltoall = other_spelling ? ncclAllToAll : ncclAlltoAll;
    ASSERT_NCCL(alltoall(wide.data(), got.data(), kCount, type, comm, nullptr));
    for (int k = 0; k < n; ++k) {
      for (size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(got[kCount * static_cast<size_t>(k) + i], static_cast<T>(value(k, kCount * ur + i)));
      }
    }
  }

  std::vector<T> gathered(kCount * un);
  ASSERT_NCCL(ncclGather(in.data(), rank == 0 ? gathered.data() : nullptr, kCount, type, 0, comm, nullptr));
  if (rank == 0) expect_gathered(gathered);
  std::vector<T> part(kCount);
  ASSERT_NCCL(ncclScatter(rank == 0 ? wide.data() : nullptr, part.data(), kCount, type, 0, comm, nullptr));
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(part[i], static_cast<T>(value(0, kCount * ur + i)));
}

// PyTorch turns alltoallv into this: a group of Sends and Recvs of all lengths, including to itself.
void grouped_messages(ncclComm_t comm, int rank, int n) {
  std::vector<std::vector<int32_t>> to, from;
  for (int k = 0; k < n; ++k) {
    to.emplace_back(static_cast<size_t>(rank * 100 + k), rank * 1000 + k);
    from.emplace_back(static_cast<size_t>(k * 100 + rank), -1);
  }
  ASSERT_NCCL(ncclGroupStart());
  for (size_t k = 0; k < static_cast<size_t>(n); ++k) {
    ASSERT_NCCL(ncclSend(to[k].data(), to[k].size(), ncclInt32, static_cast<int>(k), comm, nullptr));
    ASSERT_NCCL(ncclRecv(from[k].data(), from[k].size(), ncclInt32, static_cast<int>(k), comm, nullptr));
  }
  ASSERT_NCCL(ncclGroupEnd());
  for (int k = 0; k < n; ++k) {
    for (const int32_t v : from[static_cast<size_t>(k)]) ASSERT_EQ(v, k * 1000 + rank);
  }
}

void everything(ncclComm_t comm, int rank, int n) {
  reductions<float>(comm, rank, n, ncclFloat32);
  reductions<double>(comm, rank, n, ncclFloat64);
  reductions<int32_t>(comm, rank, n, ncclInt32);
  reductions<uint64_t>(comm, rank, n, ncclUint64);
  moves<uint8_t>(comm, rank, n, ncclUint8);
  moves<int64_t>(comm, rank, n, ncclInt64);
  moves<uint16_t>(comm, rank, n, ncclBfloat16);
  grouped_messages(comm, rank, n);
  std::vector<float> avg(5, static_cast<float>(rank));
  ASSERT_NCCL(ncclAllReduce(avg.data(), avg.data(), 5, ncclFloat32, ncclAvg, comm, nullptr));
  ASSERT_EQ(avg[4], static_cast<float>(n - 1) / 2);
  ASSERT_NCCL(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, comm, nullptr));
}

TEST(ShimCollectives, ServeProcesses) {
  for (int n = 2; n <= 4; ++n) {
    Board* board = new_board();
    in_processes(n, [&](int rank) {
      int version = 0;
      ASSERT_NCCL(ncclGetVersion(&version));
      ASSERT_EQ(version, NCCL_VERSION_CODE) << "not the shim: this program runs under LD_PRELOAD (meson test)";
      ncclComm_t comm = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, n, meet(*board, rank), rank));
      everything(comm, rank, n);
      ASSERT_NCCL(ncclCommFinalize(comm));
      ASSERT_NCCL(ncclCommDestroy(comm));
    });
  }
}

TEST(ShimCollectives, ServeThreadsOfOneProcess) {
  for (int n = 2; n <= 4; ++n) {
    Board* board = new_board();
    in_threads(n, [&](int rank) {
      ncclComm_t comm = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, n, meet(*board, rank), rank));
      everything(comm, rank, n);
      ASSERT_NCCL(ncclCommDestroy(comm));
    });
  }
}

// The single-thread program of NCCL's manual: InitAll, then groups over all communicators.
TEST(ShimCollectives, OneThreadDrivesAllRanksInGroups) {
  in_processes(1, [](int) {
    constexpr int kRanks = 4;
    ncclComm_t comms[kRanks];
    const int devices[kRanks] = {0, 0, 0, 0};  // several ranks on one device: NCCL refuses this, MoECCL serves it
    ASSERT_NCCL(ncclCommInitAll(comms, kRanks, devices));
    std::vector<std::vector<float>> in, out, all;
    for (int r = 0; r < kRanks; ++r) {
      in.push_back(input<float>(r, kCount));
      out.emplace_back(kCount);
      all.emplace_back(kCount * kRanks);
    }
    ASSERT_NCCL(ncclGroupStart());
    for (size_t r = 0; r < kRanks; ++r) {
      ASSERT_NCCL(ncclAllReduce(in[r].data(), out[r].data(), kCount, ncclFloat32, ncclSum, comms[r], nullptr));
    }
    ASSERT_NCCL(ncclGroupStart());  // groups nest
    for (size_t r = 0; r < kRanks; ++r) {
      ASSERT_NCCL(ncclAllGather(in[r].data(), all[r].data(), kCount, ncclFloat32, comms[r], nullptr));
    }
    ASSERT_NCCL(ncclGroupEnd());
    ASSERT_NCCL(ncclGroupEnd());
    for (size_t r = 0; r < kRanks; ++r) {
      for (size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(out[r][i], static_cast<float>(reduced(ncclSum, kRanks, i)));
        ASSERT_EQ(all[r][3 * kCount + i], static_cast<float>(value(3, i)));
      }
      int rank = -1, count = 0, device = -1;
      EXPECT_NCCL(ncclCommUserRank(comms[r], &rank));
      EXPECT_NCCL(ncclCommCount(comms[r], &count));
      EXPECT_NCCL(ncclCommCuDevice(comms[r], &device));
      EXPECT_EQ(rank, static_cast<int>(r));
      EXPECT_EQ(count, kRanks);
      EXPECT_EQ(device, 0);
    }
    for (ncclComm_t comm : comms) EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimCollectives, MemoryOfMemAllocIsShared) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    void *in = nullptr, *out = nullptr, *handle = nullptr;
    constexpr size_t kBytes = 1 << 20;
    ASSERT_NCCL(ncclMemAlloc(&in, kBytes));
    ASSERT_NCCL(ncclMemAlloc(&out, kBytes));
    ASSERT_NCCL(ncclCommRegister(comm, in, kBytes, &handle));
    ncclWindow_t window = nullptr;
    ASSERT_NCCL(ncclCommWindowRegister(comm, out, kBytes, &window, NCCL_WIN_COLL_SYMMETRIC));
    ASSERT_NE(window, nullptr);
    auto* numbers = static_cast<int32_t*>(in);
    for (size_t i = 0; i < kBytes / 4; ++i) numbers[i] = static_cast<int32_t>(i) + rank;
    ASSERT_NCCL(ncclAllReduce(in, out, kBytes / 4, ncclInt32, ncclSum, comm, nullptr));
    for (size_t i = 0; i < kBytes / 4; ++i) ASSERT_EQ(static_cast<int32_t*>(out)[i], 2 * static_cast<int32_t>(i) + 1);
    EXPECT_NCCL(ncclCommWindowDeregister(comm, window));
    EXPECT_EQ(ncclCommWindowDeregister(comm, window), ncclInvalidArgument);
    EXPECT_NCCL(ncclCommDeregister(comm, handle));
    EXPECT_NCCL(ncclCommDestroy(comm));
    EXPECT_NCCL(ncclMemFree(in));
    EXPECT_NCCL(ncclMemFree(out));
    EXPECT_EQ(ncclMemFree(out), ncclInvalidArgument);
  });
}

}  // namespace
}  // namespace moeccl::testing
