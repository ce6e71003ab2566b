// SPDX-License-Identifier: Apache-2.0
// Rows with scales: scaled dispatch delivers the same as a dispatch of rows and scales side by side, with every layout,
// algorithm and kind of rank, and refuses with a remedy what it cannot do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

struct Case {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  const char* algorithm;
  moecclMoeLayout_t layout;
  size_t hidden_bytes, row_bytes, scale_bytes;
  size_t staging_bytes = 0;  // of the communicator; 0: the default
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

constexpr Case kCases[] = {
    {"Fp8RowsOfABf16Layer", 4, RankMode::kThreads, "node:2 gpu:2", "auto", moecclLayoutExpertMajor, 1024, 512, 16},
    {"RowsLayoutFlat", 4, RankMode::kProcesses, nullptr, "flat", moecclLayoutRows, 256, 0, 8},
    {"ScalesLargerThanTheRest", 3, RankMode::kProcesses, nullptr, "auto", moecclLayoutExpertMajor, 24, 7, 33},
    {"ThreeLevels", 8, RankMode::kMixed, "node:2 socket:2 gpu:2", "hier:3", moecclLayoutExpertMajor, 96, 96, 3},
    {"UnevenNodes", 5, RankMode::kThreads, "node:2 gpu:3+2", "hier:2", moecclLayoutRows, 130, 65, 5},
    {"OneRank", 1, RankMode::kThreads, nullptr, "auto", moecclLayoutExpertMajor, 64, 32, 4},
    {"WideBlocks", 16, RankMode::kMixed, "node:8 gpu:2", "hier:2", moecclLayoutRows, 1024, 960, 40, 204800},
};

moecclMoe_t make_layer(const Case& c, moecclComm_t comm, size_t hidden, size_t row, size_t scale) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = hidden;
  config.type = moecclUint8;
  config.top_k = 3;
  config.n_experts = 11;
  config.max_tokens = 50;
  config.layout = c.layout;
  config.align_rows = c.layout == moecclLayoutExpertMajor ? 4 : 0;
  config.algorithm = c.algorithm;
  config.scaled_row_bytes = row;
  config.scale_bytes = scale;
  moecclMoe_t moe = nullptr;
  EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclSuccess) << moecclGetLastError(comm);
  return moe;
}

size_t rows_of(moecclRouting_t routing) {
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  EXPECT_EQ(moecclRoutingGetInfo(routing, &info), moecclSuccess);
  return info.n_rows;
}

class ScaledDispatch : public ::testing::TestWithParam<Case> {};

TEST_P(ScaledDispatch, BringsRowsAndScalesTogether) {
  const Case& c = GetParam();
  RankOptions options{.mode = c.mode, .deadline_ms = 120'000};
  options.config.topology = c.topology;
  options.config.staging_bytes = c.staging_bytes;
  run_ranks(
      c.n,
      [&](int rank, moecclComm_t comm) {
        const size_t row = c.row_bytes > 0 ? c.row_bytes : c.hidden_bytes, scale = c.scale_bytes, both = row + scale;
        const moecclMoe_t scaled_layer = make_layer(c, comm, c.hidden_bytes, c.row_bytes, scale);
        const moecclMoe_t plain_layer = make_layer(c, comm, both, 0, 0);
        ASSERT_TRUE(scaled_layer != nullptr && plain_layer != nullptr);
        std::mt19937_64 random(test_seed() * 977 + static_cast<uint64_t>(rank));
        for (int step = 0; step < std::max(2, scaled(4)); ++step) {
          const size_t tokens = step == 1 && rank == 0 ? 0 : random() % 51;
          std::vector<int32_t> topk(tokens * 3);
          for (size_t t = 0; t < tokens; ++t)
            for (size_t k = 0; k < 3; ++k)
              topk[t * 3 + k] = static_cast<int32_t>((t + rank + k * 4 + random() % 3) % 11);
          for (size_t t = 0; t < tokens; ++t)  // distinct, or none
            for (size_t k = 1; k < 3; ++k)
              for (size_t j = 0; j < k; ++j)
                if (topk[t * 3 + j] == topk[t * 3 + k]) topk[t * 3 + k] = -1;
          moecclRouting_t scaled_routing = nullptr, plain_routing = nullptr;
          ASSERT_EQ(moecclRoutingCreate(&scaled_routing, scaled_layer, topk.data(), nullptr, tokens), moecclSuccess)
              << moecclGetLastError(comm);
          ASSERT_EQ(moecclRoutingCreate(&plain_routing, plain_layer, topk.data(), nullptr, tokens), moecclSuccess)
              << moecclGetLastError(comm);
          const size_t rows = rows_of(scaled_routing);
          ASSERT_EQ(rows, rows_of(plain_routing));
          std::vector<char> in(tokens * row + 1), in_scales(tokens * scale + 1), side(tokens * both + 1);
          for (char& b : in) b = static_cast<char>(random());
          for (char& b : in_scales) b = static_cast<char>(random());
          for (size_t t = 0; t < tokens; ++t) {
            std::memcpy(&side[t * both], &in[t * row], row);
            std::memcpy(&side[t * both + row], &in_scales[t * scale], scale);
          }
          std::vector<char> out(rows * row + 1, 'x'), out_scales(rows * scale + 1, 'x'), want(rows * both + 1);
          ASSERT_EQ(
              moecclDispatchScaled(scaled_routing, in.data(), in_scales.data(), out.data(), out_scales.data(), nullptr),
              moecclSuccess)
              << moecclGetLastError(comm);
          ASSERT_EQ(moecclDispatch(plain_routing, side.data(), want.data(), nullptr), moecclSuccess);
          size_t wrong = 0;
          for (size_t r = 0; r < rows; ++r) {
            wrong += std::memcmp(&out[r * row], &want[r * both], row) != 0;
            wrong += std::memcmp(&out_scales[r * scale], &want[r * both + row], scale) != 0;
          }
          EXPECT_EQ(wrong, 0u) << "of " << rows << " rows, step " << step;
          EXPECT_EQ(out.back(), 'x');
          EXPECT_EQ(out_scales.back(), 'x');
          // Ordinary rows of the layer still work on the same routing.
          std::vector<char> wide(tokens * c.hidden_bytes + 1, 3), wide_out(rows * c.hidden_bytes + 1, 'x');
          ASSERT_EQ(moecclDispatch(scaled_routing, wide.data(), wide_out.data(), nullptr), moecclSuccess)
              << moecclGetLastError(comm);
          EXPECT_EQ(wide_out.back(), 'x');
          EXPECT_EQ(moecclRoutingDestroy(scaled_routing), moecclSuccess);
          EXPECT_EQ(moecclRoutingDestroy(plain_routing), moecclSuccess);
        }
        EXPECT_EQ(moecclMoeDestroy(scaled_layer), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(plain_layer), moecclSuccess);
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Cases, ScaledDispatch, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& info) { return std::string(info.param.name); });

TEST(ScaledDispatch, IsRefusedWithARemedyWhereItCannotBe) {
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    const Case& c = kCases[1];
    const moecclMoe_t plain = make_layer(c, comm, 64, 0, 0), scaled_layer = make_layer(c, comm, 64, 32, 4);
    moecclRouting_t routing = nullptr, scaled_routing = nullptr;
    const int32_t topk[3] = {0, 4, 8};
    ASSERT_EQ(moecclRoutingCreate(&routing, plain, topk, nullptr, 1), moecclSuccess);
    ASSERT_EQ(moecclRoutingCreate(&scaled_routing, scaled_layer, topk, nullptr, 1), moecclSuccess);
    char buffer[4096] = {};
    EXPECT_EQ(moecclDispatchScaled(routing, buffer, buffer, buffer, buffer, nullptr), moecclInvalidUsage);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("scale_bytes"), std::string::npos) << moecclGetLastError(comm);
    EXPECT_EQ(moecclDispatchScaled(scaled_routing, buffer, nullptr, buffer, buffer, nullptr), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("in_scales"), std::string::npos) << moecclGetLastError(comm);
    // Only the ranks together can notice that one rank dispatches with scales and another without.
    const moecclResult_t result =
        rank == 0 ? moecclDispatch(scaled_routing, buffer, buffer + 2048, nullptr)
                  : moecclDispatchScaled(scaled_routing, buffer, buffer + 512, buffer + 1024, buffer + 2048, nullptr);
    EXPECT_EQ(result, moecclMismatch) << moecclGetLastError(comm);
    (void)moecclRoutingDestroy(routing);
    (void)moecclRoutingDestroy(scaled_routing);
    (void)moecclMoeDestroy(plain);
    (void)moecclMoeDestroy(scaled_layer);
  });
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 64;
  config.top_k = 1;
  config.n_experts = 2;
  config.max_tokens = 8;
  config.scaled_row_bytes = 32;
  char message[512] = {};
  EXPECT_EQ(moecclMoeCheck(&config, 2, nullptr, message, sizeof(message)), moecclInvalidArgument);
  EXPECT_NE(std::string(message).find("scale_bytes"), std::string::npos) << message;
  config.scaled_row_bytes = 0;
  config.hidden_bytes = UINT32_MAX;  // and the scales
  config.scale_bytes = 8;
  EXPECT_EQ(moecclMoeCheck(&config, 2, nullptr, message, sizeof(message)), moecclInvalidArgument);
  EXPECT_NE(std::string(message).find("at most 4294967295 together"), std::string::npos) << message;
}

}  // namespace
}  // namespace moeccl::testing
