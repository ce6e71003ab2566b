// SPDX-License-Identifier: Apache-2.0
// Plans that are tried in the program's own operations, through the C interface: results are right all the time, and
// all ranks end with the same plan, whatever they do in between.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = 16 << 10;  // floats of a block: 64 KiB
constexpr int kEnough = 170;         // operations that end a trial of the most plans

moecclPlanInfo_t info_of(moecclComm_t comm, moecclOp_t op, size_t count) {
  moecclPlanInfo_t info{};
  info.size = sizeof(info);
  EXPECT_EQ(moecclPlanQuery(comm, op, count, moecclFloat32, &info), moecclSuccess) << moecclGetLastError(comm);
  return info;
}

float value(int from, int to, size_t i) { return static_cast<float>(from * 64 + to) + static_cast<float>(i % 17); }

struct Blocks {
  explicit Blocks(int n, size_t count = kCount)
      : in(static_cast<size_t>(n) * count),
        out(in.size()),
        counts(static_cast<size_t>(n), count),
        displs(counts.size()) {
    std::exclusive_scan(counts.begin(), counts.end(), displs.begin(), size_t{0});
  }
  std::vector<float> in, out;
  std::vector<size_t> counts, displs;

  void fill(int rank) {
    for (size_t i = 0; i < in.size(); ++i) in[i] = value(rank, static_cast<int>(i / counts[0]), i);
  }
  // Checks some elements of every block. The tests of the operations themselves compare all of them.
  void check(int rank, const char* what) {
    for (size_t i = 0; i < out.size(); i += 61) {
      const int from = static_cast<int>(i / counts[0]);
      const size_t source = static_cast<size_t>(rank) * counts[0] + i % counts[0];
      ASSERT_EQ(out[i], value(from, rank, source)) << what << " element " << i;
    }
    std::fill(out.begin(), out.end(), 0.0f);
  }
};

class TrialsOf : public ::testing::TestWithParam<RankMode> {
 protected:
  // Between threads, and between hosts, one plan may be so much cheaper that there is nothing to try.
  static void expect_ended(const moecclPlanInfo_t& info) {
    if (GetParam() == RankMode::kProcesses && std::getenv("MOECCL_TEST_HOSTS") == nullptr) {
      EXPECT_EQ(info.trial, 2);
    } else {
      EXPECT_NE(info.trial, 1);
    }
  }
};

TEST_P(TrialsOf, AllToAllEndWithOnePlanOnAllRanks) {
  constexpr int n = 4;
  Shared<std::array<moecclPlanInfo_t, n>> plans;
  run_ranks(n,
            [&](int rank, moecclComm_t comm) {
              Blocks b(n);
              b.fill(rank);
              for (int i = 0; i < kEnough; ++i) {
                MOECCL_ASSERT_COMM_OK(moecclAllToAll(b.in.data(), b.out.data(), kCount, moecclFloat32, comm, nullptr),
                                      comm);
                b.check(rank, "alltoall");
                if (::testing::Test::HasFatalFailure()) return;
                // Small operations in between are not tried, but votes and timings share their entries.
                float one = 1, sum = 0;
                if (i % 7 == 3) {
                  MOECCL_ASSERT_COMM_OK(moecclAllReduce(&one, &sum, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
                }
              }
              const moecclPlanInfo_t info = info_of(comm, moecclOpAllToAll, kCount);
              expect_ended(info);
              (*plans)[static_cast<size_t>(rank)] = info;
              char text[8192];
              MOECCL_ASSERT_COMM_OK(
                  moecclPlanExplain(comm, moecclOpAllToAll, kCount, moecclFloat32, text, sizeof(text), nullptr), comm);
              EXPECT_EQ(std::strstr(text, "tried: ") != nullptr, info.trial == 2) << text;
            },
            {.mode = GetParam()});
  for (const moecclPlanInfo_t& info : *plans) EXPECT_STREQ(info.algorithm, plans->front().algorithm);
}

// Ranks may differ in in-place buffers, groups and streams. The plan that they run stays the same.
TEST_P(TrialsOf, RanksMayCallDifferently) {
  constexpr int n = 3;
  run_ranks(n,
            [&](int rank, moecclComm_t comm) {
              std::vector<float> in(kCount), out(n * kCount);
              moecclStream_t stream = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclStreamCreate(&stream), comm);
              for (int i = 0; i < kEnough; ++i) {
                for (size_t k = 0; k < kCount; ++k) in[k] = value(rank, i, k);
                const bool in_place = rank == 1 || (rank == 2 && i % 3 == 0);
                float* const mine = out.data() + static_cast<size_t>(rank) * kCount;
                if (in_place) std::copy(in.begin(), in.end(), mine);
                const bool async = rank == 0 && i % 5 == 0, group = rank == 2 && i % 4 == 1;
                if (group) {
                  MOECCL_ASSERT_COMM_OK(moecclGroupStart(), comm);
                }
                MOECCL_ASSERT_COMM_OK(moecclAllGather(in_place ? mine : in.data(), out.data(), kCount, moecclFloat32,
                                                      comm, async ? stream : nullptr),
                                      comm);
                if (group) {
                  MOECCL_ASSERT_COMM_OK(moecclGroupEnd(), comm);
                }
                if (async) {
                  MOECCL_ASSERT_COMM_OK(moecclStreamSynchronize(stream), comm);
                }
                for (int r = 0; r < n; ++r)
                  ASSERT_EQ(out[static_cast<size_t>(r) * kCount + 5], value(r, i, 5)) << "from " << r << " at " << i;
              }
              expect_ended(info_of(comm, moecclOpAllGather, kCount));
              MOECCL_ASSERT_COMM_OK(moecclStreamDestroy(stream), comm);
            },
            {.mode = GetParam()});
}

TEST_P(TrialsOf, AllToAllvOfChangingSizes) {
  constexpr int n = 4;
  run_ranks(n,
            [&](int rank, moecclComm_t comm) {
              const size_t sizes[] = {16, 4 << 10, 32 << 10};
              std::vector<Blocks> b;
              for (const size_t size : sizes) b.emplace_back(n, size).fill(rank);
              for (int i = 0; i < 3 * kEnough; ++i) {
                Blocks& e = b[static_cast<size_t>(i < 2 * kEnough ? i / kEnough + 1 : i % 3)];
                MOECCL_ASSERT_COMM_OK(moecclAllToAllv(e.in.data(), e.counts.data(), e.displs.data(), e.out.data(),
                                                      e.counts.data(), e.displs.data(), moecclFloat32, comm, nullptr),
                                      comm);
                e.check(rank, "alltoallv");
                if (::testing::Test::HasFatalFailure()) return;
              }
            },
            {.mode = GetParam()});
}

// Forcing a plan neither ends nor breaks a trial: all ranks force between the same operations.
TEST_P(TrialsOf, ForcedPlansRunMeanwhile) {
  constexpr int n = 2;
  run_ranks(n,
            [&](int rank, moecclComm_t comm) {
              Blocks b(n);
              b.fill(rank);
              for (int i = 0; i < 2 * kEnough; ++i) {
                if (i % 50 == 20) {
                  MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllToAll, "flat"), comm);
                }
                if (i % 50 == 22) {
                  EXPECT_STREQ(info_of(comm, moecclOpAllToAll, kCount).algorithm, "flat");
                  EXPECT_EQ(info_of(comm, moecclOpAllToAll, kCount).trial, 0);
                }
                if (i % 50 == 30) {
                  MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllToAll, "auto"), comm);
                }
                MOECCL_ASSERT_COMM_OK(moecclAllToAll(b.in.data(), b.out.data(), kCount, moecclFloat32, comm, nullptr),
                                      comm);
                b.check(rank, "alltoall");
                if (::testing::Test::HasFatalFailure()) return;
              }
              expect_ended(info_of(comm, moecclOpAllToAll, kCount));
            },
            {.mode = GetParam()});
}

// Without measured plans, sums are tried among plans that all add in rank order.
TEST_P(TrialsOf, SumsKeepTheirBitsThroughATrial) {
  for (const int deterministic : {0, 1}) {
    RankOptions options{.mode = GetParam()};
    options.config.deterministic = deterministic;
    run_ranks(
        3,
        [&](int rank, moecclComm_t comm) {
          std::vector<float> in(kCount), out(kCount), first(kCount);
          for (size_t i = 0; i < kCount; ++i) in[i] = 1.0f / static_cast<float>(1 + i + static_cast<size_t>(rank));
          for (int i = 0; i < kEnough; ++i) {
            MOECCL_ASSERT_COMM_OK(
                moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, comm, nullptr), comm);
            if (i == 0) first = out;
            ASSERT_EQ(out, first) << "at " << i;
          }
          const moecclPlanInfo_t info = info_of(comm, moecclOpAllReduce, kCount);
          if (deterministic == 1) {
            expect_ended(info);
          } else {
            EXPECT_NE(info.trial, 1);
          }
        },
        options);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, TrialsOf, ::testing::Values(RankMode::kThreads, RankMode::kProcesses, RankMode::kMixed),
                         [](const auto& info) { return std::string(mode_name(info.param)); });

}  // namespace
}  // namespace moeccl::testing
