// SPDX-License-Identifier: Apache-2.0
// A layer and its routing hold at most the memory that moecclMoeQuerySize reports, whatever the routing. malloc counts
// it in a process that holds one rank, so the count includes memory that the library's own accounting might miss.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4;
constexpr int kExperts = 32;
constexpr size_t kHidden = 64;

enum class Spread { kUniform, kOneRank, kOneExpertFirst };

struct Shape {
  const char* name;
  const char* algorithm;
  moecclMoeLayout_t layout;
  int32_t top_k, align_rows;
  size_t tokens;
  Spread spread;
};
void PrintTo(const Shape& s, std::ostream* out) { *out << s.name; }

constexpr Shape kShapes[] = {
    {"RowsAuto", nullptr, moecclLayoutRows, 8, 0, 2000, Spread::kUniform},
    {"RowsFlat", "flat", moecclLayoutRows, 8, 0, 2000, Spread::kUniform},
    {"ExpertMajorHier", "hier:2", moecclLayoutExpertMajor, 8, 16, 2000, Spread::kUniform},
    {"EverythingToOneRank", nullptr, moecclLayoutExpertMajor, 8, 0, 2000, Spread::kOneRank},
    {"EverythingToOneRankIn2dh", "2dh", moecclLayoutExpertMajor, 8, 0, 2000, Spread::kOneRank},
    {"EverythingToOneRankAsRows", "hier:2", moecclLayoutRows, 8, 0, 2000, Spread::kOneRank},
    {"TopKOf1ToOneExpert", nullptr, moecclLayoutExpertMajor, 1, 0, 3000, Spread::kOneExpertFirst},
    {"AllExperts", "hier:1", moecclLayoutExpertMajor, 32, 0, 500, Spread::kUniform},
};

size_t heap_bytes() {
  const struct mallinfo2 m = mallinfo2();
  return m.uordblks + m.hblkhd;
}

int32_t choice(const Shape& shape, int rank, size_t token, int k) {
  const size_t first = shape.spread == Spread::kUniform ? token * 7 + static_cast<size_t>(rank) * 3 : 0;
  return static_cast<int32_t>((first + static_cast<size_t>(k)) % kExperts);  // 8 experts on each rank: contiguous
}

class MoeMemory : public ::testing::TestWithParam<Shape> {};

TEST_P(MoeMemory, StaysBelowTheQueriedSize) {
  if (sanitized()) GTEST_SKIP() << "sanitizers have an allocator of their own";
  const Shape& shape = GetParam();
  // Staging is small, so that it hides nothing: the tables alone are several times as large.
  setenv("MOECCL_STAGING_BYTES", "1048576", 1);
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = "node:2 gpu:2";
  options.config.staging_bytes = 1 << 20;
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = kHidden;
        config.top_k = shape.top_k;
        config.n_experts = kExperts;
        config.max_tokens = shape.tokens;
        config.layout = shape.layout;
        config.align_rows = shape.align_rows;
        config.algorithm = shape.algorithm;
        size_t promised = 0;
        MOECCL_ASSERT_OK(moecclMoeQuerySize(&config, kRanks, "node:2 gpu:2", &promised));
        std::vector<int32_t> index;
        for (size_t t = 0; t < shape.tokens; ++t) {
          for (int k = 0; k < shape.top_k; ++k) index.push_back(choice(shape, rank, t, k));
        }
        const std::vector<float> weight(index.size(), 0.5f);
        const std::vector<std::byte> in(shape.tokens * kHidden);
        const size_t before = heap_bytes();
        moecclMoe_t moe = nullptr;
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), shape.tokens), comm);
        const size_t created = heap_bytes() - before;
        EXPECT_LE(created, promised);
        EXPECT_GT(created, index.size()) << "the tables are counted at all";
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
        std::vector<std::byte> out(info.n_rows * kHidden), back(in.size());
        const size_t buffers = out.capacity() + back.capacity();
        for (int step = 0; step < 2; ++step) {
          MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, index.data(), weight.data(), shape.tokens), comm);
          MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), out.data(), nullptr), comm);
          MOECCL_ASSERT_COMM_OK(moecclCombine(routing, out.data(), back.data(), nullptr), comm);
          EXPECT_LE(heap_bytes() - before, promised + buffers) << "after step " << step;
        }
        MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        if (rank == 0) {
          printf("%s: %zu KiB on the heap after create, %zu KiB promised (with up to 512 KiB of staging)\n", shape.name,
                 created >> 10, promised >> 10);
          fflush(stdout);
        }
      },
      options);
  unsetenv("MOECCL_STAGING_BYTES");
}

INSTANTIATE_TEST_SUITE_P(Shapes, MoeMemory, ::testing::ValuesIn(kShapes),
                         [](const ::testing::TestParamInfo<Shape>& info) { return info.param.name; });

}  // namespace
}  // namespace moeccl::testing
