// SPDX-License-Identifier: Apache-2.0
// Dispatch, combine and both backward passes compared with the definition, for the shapes that break such libraries: no
// tokens, ranks without experts, odd row sizes, all tokens to one expert, uneven nodes; in both layouts, with every
// algorithm.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/conformance/moe_checker.h"

namespace moeccl::testing {
namespace {

constexpr const char* kAlgorithms[] = {"flat", "flat:ordered", "2dh", "hier:1", "hier:2", "hier:3", "auto"};
using enum Tokens;
using enum Choices;
using enum Owners;
constexpr RankMode kT = RankMode::kThreads, kP = RankMode::kProcesses, kM = RankMode::kMixed;

const MoeShape kShapes[] = {
    {"OneRank", 1, kT, "", 64, moecclBfloat16, 2, 4, 17},
    {"TwoNodesOfFour", 8, kP, "node:2 gpu:4", 512, moecclBfloat16, 8, 64, 40},
    {"ThreeLevels", 8, kM, "node:2 socket:2 gpu:2", 256, moecclFloat32, 4, 32, 33},
    {"UnevenNodes7And8", 15, kT, "node:2 gpu:7+8", 128, moecclFloat16, 6, 45, 20, kRagged},
    {"UnevenNodes1And4And3", 8, kP, "node:3 gpu:1+4+3", 128, moecclBfloat16, 4, 16, 24, kRagged},
    {"NoTokensOnSomeRanks", 5, kP, "", 96, moecclBfloat16, 3, 10, 16, kSomeZero},
    {"NoTokensAtAll", 4, kT, "node:2 gpu:2", 96, moecclBfloat16, 3, 8, 16, kAllZero},
    {"ExpertsNotDivisible", 3, kP, "", 64, moecclFloat32, 2, 7, 30, kRagged},
    {"FewerExpertsThanRanks", 8, kT, "node:2 gpu:4", 64, moecclFloat32, 2, 3, 20},
    {"RanksWithoutExperts", 7, kM, "", 64, moecclFloat64, 4, 12, 25, kRagged, kUniform, kFewRanks},
    {"ExpertsRoundRobin", 8, kP, "node:2 gpu:4", 64, moecclFloat32, 4, 30, 25, kEven, kUniform, kRoundRobin},
    {"HiddenOfOneByte", 4, kP, "node:2 gpu:2", 1, moecclInt8, 4, 16, 50, kRagged},
    {"HiddenOf13Bytes", 4, kT, "node:2 gpu:2", 13, moecclUint8, 4, 16, 50, kRagged},
    {"HiddenOf16383Bytes", 3, kP, "", 16383, moecclInt8, 2, 6, 12},
    {"HiddenOf7168", 4, kP, "node:2 gpu:2", 14336, moecclBfloat16, 8, 32, 10},
    {"HiddenOf13BytesFp8", 5, kT, "", 13, moecclFloat8e4m3, 2, 10, 30},
    {"AllTokensToOneExpert", 8, kP, "node:2 gpu:4", 256, moecclBfloat16, 1, 16, 60, kEven, kOneExpert},
    {"TopKOf1", 5, kT, "", 64, moecclBfloat16, 1, 20, 40, kRagged},
    {"TopKOf32", 4, kP, "node:2 gpu:2", 64, moecclFloat32, 32, 64, 20},
    {"TopKOfAllExperts", 4, kT, "", 64, moecclFloat32, 8, 8, 20},
    {"SkewedRouting", 8, kM, "node:2 gpu:4", 128, moecclBfloat16, 4, 32, 50, kRagged, kSkewed},
    {"ChoicesLeftEmpty", 4, kP, "node:2 gpu:2", 64, moecclFloat32, 4, 16, 30, kRagged, kHoles},
    {"AlignedGroups", 4, kT, "node:2 gpu:2", 64, moecclBfloat16, 4, 14, 30, kRagged, kUniform, kDefault, 8},
    {"AlignedTo128", 3, kP, "", 32, moecclBfloat16, 2, 6, 30, kSomeZero, kUniform, kDefault, 128},
    {"CapacityDrops", 4, kP, "node:2 gpu:2", 64, moecclFloat32, 4, 8, 40, kEven, kSkewed, kDefault, 0, 5},
    {"CapacityAndAlignment", 5, kT, "", 64, moecclBfloat16, 2, 11, 40, kRagged, kOneExpert, kRoundRobin, 4, 3},
    {"SixteenRanks", 16, kT, "node:4 gpu:4", 64, moecclBfloat16, 8, 64, 12},
    // Slots of 3 rows: a block of the second hop, with rows of 8 origins, takes 3 of them.
    {"WideBlocks", 16, kM, "node:8 gpu:2", 512, moecclBfloat16, 2, 32, 40, kRagged, kSkewed, kDefault, 0, 0, 102400},
    {"TwoHostsOfOne", 2, kP, "node:2 gpu:1", 64, moecclFloat32, 3, 6, 30, kRagged},
};

std::vector<int> groups_of_level_0(const MoeShape& shape) {
  std::vector<int> group;
  const std::string topology = shape.topology;
  if (topology.starts_with("node:2 gpu:4") || topology == "node:2 socket:2 gpu:2") group = {0, 0, 0, 0, 1, 1, 1, 1};
  if (topology == "node:2 gpu:7+8") group = {0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  if (topology == "node:8 gpu:2") group = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
  if (topology == "node:3 gpu:1+4+3") group = {0, 1, 1, 1, 1, 2, 2, 2};
  return group;
}

// With dedup, the rows that cross the outermost level are the distinct (token, group) pairs (HierMoE Eq. 7).
void check_crossings(const MoeRank& me, const MoeReference& reference, const moecclRoutingInfo_t& info) {
  const std::vector<int> group = groups_of_level_0(me.shape);
  const std::string algorithm = info.algorithm;
  if (group.empty() || (algorithm != "hier:2" && algorithm != "hier:3")) return;
  ASSERT_GE(info.n_levels, 2);
  EXPECT_EQ(info.levels[0].rows, reference.crossings(me.rank, group));
  EXPECT_EQ(info.levels[0].bytes, info.levels[0].rows * me.shape.hidden_bytes);
}

void check_routing(const MoeRank& me, moecclRouting_t routing, const MoeReference& reference) {
  MoeChecker checker(me, reference, routing);
  if (!checker.info()) return;
  check_crossings(me, reference, checker.facts());
  checker.dispatch();
  checker.combine(false);
  checker.combine(true);
  checker.combine_backward();
}

// Runs one layer for two steps on the same routing object.
void run_layer(const MoeRank& me, const char* algorithm, uint64_t seed) {
  const std::vector<int32_t> given = owners_of(me.shape);
  const moecclMoeConfig_t config = config_for(me.shape, me.layout, algorithm, given.empty() ? nullptr : given.data());
  char why[512] = "";
  const char* topology = me.shape.topology[0] == 0 ? nullptr : me.shape.topology;
  if (moecclMoeCheck(&config, me.shape.n, topology, why, sizeof(why)) != moecclSuccess) {
    const std::string needs_levels[] = {"2dh", "hier:2", "hier:3"};
    EXPECT_NE(std::find(std::begin(needs_levels), std::end(needs_levels), algorithm), std::end(needs_levels))
        << algorithm << ": " << why;
    EXPECT_NE(why[0], 0);
    return;  // fewer levels than the algorithm needs, the same on all ranks
  }
  moecclMoe_t moe = nullptr;
  ASSERT_EQ(moecclMoeCreate(&moe, me.comm, &config), moecclSuccess) << moecclGetLastError(me.comm);
  moecclRouting_t routing = nullptr;
  std::vector<int> owner = {given.begin(), given.end()};
  for (uint64_t step = 0; step < 2; ++step) {
    // Tokens and choices do not depend on the owners, which are learned from the first routing.
    const MoeReference draft(me.shape, me.layout, std::vector<int>(static_cast<size_t>(me.shape.n_experts)),
                             seed + step);
    const int32_t* index = draft.index(me.rank);
    const float* weight = draft.weight(me.rank);
    const size_t tokens = draft.n_tokens(me.rank);
    const moecclResult_t made = step == 0 ? moecclRoutingCreate(&routing, moe, index, weight, tokens)
                                          : moecclRoutingUpdate(routing, index, weight, tokens);
    ASSERT_EQ(made, moecclSuccess) << moecclGetLastError(me.comm);
    if (step == 0) {
      moecclRoutingInfo_t info{};
      info.size = sizeof(info);
      ASSERT_EQ(moecclRoutingGetInfo(routing, &info), moecclSuccess);
      owner = learn_owners(me, given, info);
    }
    check_routing(me, routing, MoeReference(me.shape, me.layout, owner, seed + step));
  }
  EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess) << moecclGetLastError(me.comm);
  EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess) << moecclGetLastError(me.comm);
}

class MoeConformance : public ::testing::TestWithParam<MoeShape> {};

TEST_P(MoeConformance, MatchesTheDefinition) {
  const MoeShape& shape = GetParam();
  RankOptions options{.mode = shape.mode, .deadline_ms = 120'000};
  options.config.topology = shape.topology[0] == 0 ? nullptr : shape.topology;
  options.config.staging_bytes = shape.staging_bytes;
  SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed());
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        for (moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
          for (const char* algorithm : kAlgorithms) {
            const std::string what = std::string(layout == moecclLayoutRows ? "rows, " : "expert-major, ") + algorithm;
            set_note(what);
            SCOPED_TRACE(what);
            run_layer({shape, layout, rank, comm}, algorithm, mix(test_seed()));
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, MoeConformance, ::testing::ValuesIn(kShapes),
                         [](const ::testing::TestParamInfo<MoeShape>& info) { return info.param.name; });

// Routing records are small compared with the rows: under 1 % at DeepSeek-V3's row of 7168 bf16.
TEST(MoeTraffic, MetadataIsUnderOnePercentOfPayload) {
  const MoeShape shape{"Metadata", 8, RankMode::kThreads, "node:2 gpu:4", 14336, moecclBfloat16, 8, 256, 128};
  RankOptions options;
  options.config.topology = shape.topology;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        const MoeReference reference(shape, moecclLayoutRows, std::vector<int>(256), test_seed());
        const moecclMoeConfig_t config = config_for(shape, moecclLayoutRows, "hier:2", nullptr);
        moecclMoe_t moe = nullptr;
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, reference.index(rank), reference.weight(rank), 128),
                              comm);
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
        for (int l = 0; l < info.n_levels; ++l) {
          EXPECT_LT(info.levels[l].metadata_bytes * 100, info.levels[l].bytes) << info.levels[l].name;
        }
        EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
      },
      options);
}

// Above 64 ranks, sizes of records go to the ranks that need them alone.
TEST(MoeMany, SixtySixRanksExchangeTheSizesOfTheirRecords) {
  constexpr int kRanks = 66;
  run_ranks(kRanks, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = sizeof(int32_t), config.type = moecclInt32;
    config.top_k = 2, config.n_experts = kRanks, config.max_tokens = 2;
    config.layout = moecclLayoutExpertMajor;
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    const int32_t n_tokens = rank % 3;
    std::vector<int32_t> index, in, out(static_cast<size_t>(n_tokens));
    for (int32_t t = 0; t < n_tokens; ++t) {
      index.insert(index.end(), {(rank + 7 * t) % kRanks, (rank + 7 * t + 33) % kRanks});
      in.push_back(100 * rank + t);
    }
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, static_cast<size_t>(n_tokens)),
                          comm);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
    std::vector<int32_t> rows(static_cast<size_t>(info.n_rows));
    MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), rows.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclCombine(routing, rows.data(), out.data(), nullptr), comm);
    for (size_t t = 0; t < in.size(); ++t) EXPECT_EQ(out[t], 2 * in[t]);
    MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
    MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  });
}

// Negative products wrap in unsigned types, and so exceed what a double holds: partial sums pass on every bit of them.
TEST(MoeIntegers, SumsOfNegativeProductsWrapInEveryPlan) {
  constexpr int kRanks = 4, kExperts = 8, kTopK = 4, kTokens = 8;
  RankOptions options;
  options.config.topology = "node:2 gpu:2";
  for (const int deterministic : {0, 1}) {
    options.config.deterministic = deterministic;
    for (const char* algorithm : {"flat", "2dh", "hier:1", "hier:2"}) {
      SCOPED_TRACE(std::string(algorithm) + (deterministic ? ", deterministic" : ""));
      run_ranks(
          kRanks,
          [&](int, moecclComm_t comm) {
            moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
            config.hidden_bytes = sizeof(uint64_t), config.type = moecclUint64;
            config.top_k = kTopK, config.n_experts = kExperts, config.max_tokens = kTokens;
            config.layout = moecclLayoutExpertMajor, config.algorithm = algorithm;
            std::vector<int32_t> index;
            std::vector<float> weight;
            std::vector<uint64_t> want(kTokens), out(kTokens);
            for (int32_t t = 0; t < kTokens; ++t)
              for (int32_t k = 0; k < kTopK; ++k) {
                index.push_back((t + k) % kExperts);
                weight.push_back(k % 2 == 0 ? -2.0f : 1.0f);
                want[static_cast<size_t>(t)] += static_cast<uint64_t>((k % 2 == 0 ? -2 : 1) * (index.back() + 1));
              }
            moecclMoe_t moe = nullptr;
            moecclRouting_t routing = nullptr;
            MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
            MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), kTokens), comm);
            moecclRoutingInfo_t info{};
            info.size = sizeof(info);
            MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
            std::vector<uint64_t> rows;  // expert e gives e + 1
            for (int32_t l = 0; l < info.n_local_experts; ++l)
              rows.resize(static_cast<size_t>(info.expert_offsets[l + 1]),
                          static_cast<uint64_t>(info.local_experts[l]) + 1);
            MOECCL_ASSERT_COMM_OK(moecclCombine(routing, rows.data(), out.data(), nullptr), comm);
            EXPECT_EQ(out, want);
            MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
            MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
          },
          options);
    }
  }
}

}  // namespace
}  // namespace moeccl::testing
