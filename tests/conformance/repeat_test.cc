// SPDX-License-Identifier: Apache-2.0
// Repeated calls: cached data of a small call is never used for a call that differs.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kRoom = 4096;  // floats of a buffer

float value(int rank, int round, size_t i) {
  return static_cast<float>((rank + 1) * 3 + round % 50) + static_cast<float>(i % 13);
}

// Buffers that move from round to round, as an allocator's do.
struct Buffers {
  std::vector<float> in = std::vector<float>(kRoom), out = std::vector<float>(kRoom);
  size_t at = 0;
  float* input() { return in.data() + at; }
  float* output() { return out.data() + at; }
  void fill(int rank, int round, size_t count) {
    at = static_cast<size_t>(round % 7) * 64;
    for (size_t i = 0; i < count; ++i) input()[i] = value(rank, round, i);
    std::fill(out.begin(), out.end(), -1.0f);
  }
};

struct Kind {
  moecclOp_t op;
  size_t count;
};

void run_and_check(const Kind& kind, int n, int rank, int round, bool in_place, Buffers& b, moecclComm_t comm) {
  const auto un = static_cast<size_t>(n), ur = static_cast<size_t>(rank);
  const size_t count = kind.count;
  b.fill(rank, round, count * un);
  float* const out = in_place ? b.input() : b.output();
  const auto block = [&](int from, size_t first) {
    for (size_t i = 0; i < count; ++i)
      ASSERT_EQ(out[static_cast<size_t>(from) * count + i], value(from, round, first + i)) << "round " << round;
  };
  switch (kind.op) {
    case moecclOpAllReduce: {
      MOECCL_ASSERT_OK(moecclAllReduce(b.input(), out, count, moecclFloat32, moecclSum, comm, nullptr));
      for (size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < n; ++r) sum += value(r, round, i);
        ASSERT_EQ(out[i], sum) << "round " << round;
      }
      return;
    }
    case moecclOpBroadcast: {
      const int root = round % 2;
      MOECCL_ASSERT_OK(moecclBroadcast(b.input(), out, count, moecclFloat32, root, comm, nullptr));
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(out[i], value(root, round, i)) << "round " << round;
      return;
    }
    case moecclOpAllGather: {
      const float* from = in_place ? out + ur * count : b.input();
      const size_t first = in_place ? ur * count : 0;
      MOECCL_ASSERT_OK(moecclAllGather(from, out, count, moecclFloat32, comm, nullptr));
      for (int r = 0; r < n; ++r) block(r, in_place ? static_cast<size_t>(r) * count : first);
      return;
    }
    case moecclOpAllToAll: {
      MOECCL_ASSERT_OK(moecclAllToAll(b.input(), out, count, moecclFloat32, comm, nullptr));
      for (int r = 0; r < n; ++r) block(r, ur * count);
      return;
    }
    default: {  // an AllToAllv whose sizes differ from call to call
      std::vector<size_t> counts(un), displs(un);
      const auto between = [&](size_t a, size_t c) { return (a * c + static_cast<size_t>(round)) % (count + 1); };
      for (size_t r = 0; r < un; ++r) {
        counts[r] = between(ur + 1, r + 1);
        displs[r] = r * count;
      }
      MOECCL_ASSERT_OK(moecclAllToAllv(b.input(), counts.data(), displs.data(), b.output(), counts.data(),
                                       displs.data(), moecclFloat32, comm, nullptr));
      for (size_t r = 0; r < un; ++r) {
        for (size_t i = 0; i < count; ++i) {
          const float wanted = i < counts[r] ? value(static_cast<int>(r), round, ur * count + i) : -1.0f;
          ASSERT_EQ(b.output()[r * count + i], wanted) << "round " << round << " from " << r;
        }
      }
    }
  }
}

class Repeated : public ::testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, Repeated, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const auto& p) { return mode_name(p.param); });

TEST_P(Repeated, CallsMixWithOthersAndMoveTheirBuffers) {
  const Kind kinds[] = {{moecclOpAllReduce, 2}, {moecclOpAllReduce, 50}, {moecclOpAllGather, 8},
                        {moecclOpAllToAll, 8},  {moecclOpAllToAllv, 8},  {moecclOpAllToAllv, 700},
                        {moecclOpBroadcast, 9}, {moecclOpAllToAll, 1000}};
  const int rounds = scaled(600);
  for (const int n : {2, 3}) {
    run_ranks(n,
              [&](int rank, moecclComm_t comm) {
                std::mt19937_64 random(test_seed());
                Buffers b;
                size_t kind = 0;
                bool in_place = false;
                for (int round = 0; round < rounds && !::testing::Test::HasFailure(); ++round) {
                  if (random() % 3 == 0) kind = random() % std::size(kinds);  // else the same kind again
                  if (random() % 4 == 0) in_place = !in_place;
                  run_and_check(kinds[kind], n, rank, round, in_place, b, comm);
                }
              },
              {.mode = GetParam()});
  }
}

TEST_P(Repeated, ABadArgumentIsFoundInTheSecondCallToo) {
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        Buffers b;
        for (int round = 0; round < 3; ++round) {
          run_and_check({moecclOpAllToAll, 8}, 2, rank, round, false, b, comm);
          EXPECT_EQ(moecclAllToAll(nullptr, b.output(), 8, moecclFloat32, comm, nullptr), moecclInvalidArgument);
          EXPECT_EQ(moecclAllToAll(b.input(), nullptr, 8, moecclFloat32, comm, nullptr), moecclInvalidArgument);
          EXPECT_EQ(moecclAllToAll(b.input(), b.input() + 1, 8, moecclFloat32, comm, nullptr), moecclInvalidArgument);
          EXPECT_NE(std::strstr(moecclGetLastError(comm), "overlap"), nullptr) << moecclGetLastError(comm);
          const size_t counts[] = {4, 4}, displs[] = {0, 4}, other[] = {3, 3};
          const size_t* mine = rank == 0 ? counts : other;  // differs from what it receives from itself
          const size_t* own = rank == 0 ? other : counts;
          MOECCL_ASSERT_OK(
              moecclAllToAllv(b.input(), counts, displs, b.output(), counts, displs, moecclFloat32, comm, nullptr));
          EXPECT_EQ(moecclAllToAllv(b.input(), mine, displs, b.output(), own, displs, moecclFloat32, comm, nullptr),
                    moecclInvalidArgument);
          EXPECT_EQ(
              moecclAllToAllv(b.input(), nullptr, displs, b.output(), counts, displs, moecclFloat32, comm, nullptr),
              moecclInvalidArgument);
        }
      },
      {.mode = GetParam()});
}

TEST_P(Repeated, AForcedPlanRunsInTheNextCall) {
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        Buffers b;
        for (int round = 0; round < 4; ++round) run_and_check({moecclOpAllReduce, 8}, 2, rank, round, false, b, comm);
        MOECCL_ASSERT_OK(moecclPlanForce(comm, moecclOpAllReduce, "ring"));
        for (int round = 0; round < 4; ++round) run_and_check({moecclOpAllReduce, 8}, 2, rank, round, false, b, comm);
        // Only one rank forces a plan. The other ranks' mismatch shows that it did not run its prepared operation.
        if (rank == 1) {
          MOECCL_ASSERT_OK(moecclPlanForce(comm, moecclOpAllReduce, "oneshot"));
        }
        EXPECT_EQ(moecclAllReduce(b.input(), b.output(), 8, moecclFloat32, moecclSum, comm, nullptr), moecclMismatch)
            << moecclGetLastError(comm);
      },
      {.mode = GetParam()});
}

// A rank sends its data before it publishes its call. The difference must be named nevertheless, every time.
TEST_P(Repeated, ADifferenceAfterAlikeCallsNamesBothRanks) {
  for (int turn = 0; turn < scaled(20); ++turn) {
    run_ranks(2,
              [turn](int rank, moecclComm_t comm) {
                Buffers b;
                for (int round = 0; round < 5 + turn; ++round)
                  run_and_check({moecclOpAllGather, 8}, 2, rank, round, false, b, comm);
                const size_t count = rank == 0 ? 8 : 9;
                ASSERT_EQ(moecclAllGather(b.input(), b.output(), count, moecclFloat32, comm, nullptr), moecclMismatch);
                const std::string said = moecclGetLastError(comm);
                EXPECT_NE(said.find("rank 0 calls allgather with 8, rank 1 calls allgather with 9"), std::string::npos)
                    << said;
              },
              {.mode = GetParam()});
  }
}

TEST_P(Repeated, AnAbortEndsThem) {
  Meeting before;
  run_ranks(2,
            [&before](int rank, moecclComm_t comm) {
              Buffers b;
              for (int round = 0; round < 4; ++round)
                run_and_check({moecclOpAllReduce, 8}, 2, rank, round, false, b, comm);
              ASSERT_TRUE(before.meet(2));
              MOECCL_ASSERT_OK(moecclCommAbort(comm));
              EXPECT_NE(moecclAllReduce(b.input(), b.output(), 8, moecclFloat32, moecclSum, comm, nullptr),
                        moecclSuccess);
            },
            {.mode = GetParam(), .destroy = false});
}

}  // namespace
}  // namespace moeccl::testing
