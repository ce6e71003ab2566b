// SPDX-License-Identifier: Apache-2.0
// Hybrid placement through the C interface: experts are gathered, tokens are dispatched, each row is multiplied by the
// contents of the gathered expert, and rows are combined. The result is right only when every choice was computed once,
// by a rank that had received that expert's bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

struct Shape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;  // "": one level
  std::vector<int32_t> domain;
  int n_experts, top_k;
  size_t tokens;    // rank r has (tokens * (r + 1)) / n tokens; 0: no rank has any
  size_t elements;  // of an expert
  bool round_robin = false, pace = false;
  size_t staging_bytes = 0;  // of the communicator; 0: the default
};
std::ostream& operator<<(std::ostream& out, const Shape& s) { return out << s.name; }

constexpr RankMode kT = RankMode::kThreads, kP = RankMode::kProcesses, kM = RankMode::kMixed;
const Shape kShapes[] = {
    {"OneRank", 1, kT, "", {1}, 3, 2, 9, 33},
    {"TwoRanksOneDomain", 2, kP, "", {2}, 4, 2, 20, 7},
    {"PlainExpertParallelism", 4, kP, "", {1}, 8, 3, 20, 5},
    {"FourDomainsOfTwo", 8, kP, "", {2}, 16, 4, 24, 129},
    {"DomainsDoNotDivide", 7, kT, "", {3}, 9, 3, 20, 1},
    {"DataCentresAreOneDomain", 8, kM, "dc:2 gpu:4", {2, 1}, 8, 2, 24, 511},
    {"BothLevels", 8, kP, "dc:2 gpu:4", {2, 2}, 16, 3, 24, 65},
    {"ThreeLevels", 8, kT, "dc:2 node:2 gpu:2", {2, 1, 2}, 11, 3, 17, 13},
    {"Uneven7And8", 15, kT, "node:2 gpu:7+8", {2, 3}, 30, 4, 12, 17},
    {"Uneven1And4And3", 8, kP, "node:3 gpu:1+4+3", {2, 2}, 19, 4, 20, 3},
    {"RanksWithoutExperts", 6, kT, "dc:2 gpu:3", {2, 1}, 4, 2, 16, 9},
    {"ExpertsRoundRobin", 8, kM, "dc:2 gpu:4", {2, 4}, 20, 5, 16, 40, true},
    {"NoTokensAtAll", 4, kP, "", {2}, 8, 2, 0, 31},
    {"LargeExperts", 4, kP, "dc:2 gpu:2", {2, 2}, 4, 2, 8, 300'001},
    {"ManySmallChunks", 4, kP, "dc:2 gpu:2", {2, 2}, 4, 2, 8, 20'001, false, false, 1 << 20},  // for tools/rdma-vm
    {"TwoHostsOfOne", 2, kP, "node:2 gpu:1", {2, 1}, 6, 2, 20, 33},
    {"SixteenRanks", 16, kT, "dc:4 gpu:4", {2, 2}, 32, 8, 12, 21},
    {"PutsOnly", 8, kT, "dc:2(bw=8GB/s,lat=10us) gpu:4", {2, 1}, 16, 3, 12, 5001, false, true},
};

float scale_of(int expert) { return static_cast<float>(expert % 7 + 1); }
float element_of(int expert, size_t i) {
  return i == 0 ? scale_of(expert) : static_cast<float>((expert * 31 + static_cast<int>(i % 1009)) % 251);
}
float token_value(int rank, size_t token, size_t i) {
  return static_cast<float>((rank * 5 + static_cast<int>(token) * 3 + static_cast<int>(i)) % 11 - 5);
}

struct Choices {
  Choices(const Shape& s, int rank) : n(s.tokens * static_cast<size_t>(rank + 1) / static_cast<size_t>(s.n)) {
    const auto k = static_cast<size_t>(s.top_k);
    for (size_t t = 0; t < n; ++t) {
      // Experts are distinct: a step that does not divide the number of experts repeats only after all of them.
      const int first = static_cast<int>(t * 7 + static_cast<size_t>(rank) * 13) % s.n_experts;
      for (size_t j = 0; j < k; ++j) {
        const bool none = (t + j) % 11 == 10;
        index.push_back(none ? -1 : (first + static_cast<int>(j)) % s.n_experts);
        weight.push_back(0.25f * static_cast<float>((t + j) % 5 + 1));
      }
    }
  }
  size_t n;
  std::vector<int32_t> index;
  std::vector<float> weight;
};

std::vector<float> gathered(const Shape& shape, moecclHybrid_t hybrid, const moecclHybridInfo_t& info,
                            moecclComm_t comm) {
  std::vector<float> own, held(static_cast<size_t>(info.n_held) * shape.elements + 1, -77);
  for (int32_t e = 0; e < info.n_own; ++e)
    for (size_t i = 0; i < shape.elements; ++i) own.push_back(element_of(info.own_experts[e], i));
  EXPECT_EQ(moecclHybridGather(hybrid, own.data(), held.data(), shape.elements * sizeof(float), nullptr), moecclSuccess)
      << moecclGetLastError(comm);
  size_t wrong = 0;
  for (int32_t h = 0; h < info.n_held; ++h)
    for (size_t i = 0; i < shape.elements; ++i)
      wrong += held[static_cast<size_t>(h) * shape.elements + i] != element_of(info.held_experts[h], i);
  EXPECT_EQ(wrong, 0u) << "elements of " << info.n_held << " gathered experts";
  EXPECT_EQ(held.back(), -77) << "written beyond the experts";
  return held;
}

// Gradients of gathered experts return to their owners. Rank r's part of expert e is a number that depends on both,
// small enough that sums are exact in any order.
void reduced(const Shape& shape, int rank, moecclHybrid_t hybrid, const moecclHybridInfo_t& info,
             const std::vector<std::vector<int32_t>>& held_by, moecclComm_t comm) {
  const auto part = [](int r, int expert, size_t i) {
    return static_cast<float>((r * 7 + expert * 3 + static_cast<int>(i % 89)) % 15 - 7);
  };
  std::vector<float> held, own(static_cast<size_t>(info.n_own) * shape.elements + 1, -77);
  for (int32_t h = 0; h < info.n_held; ++h)
    for (size_t i = 0; i < shape.elements; ++i) held.push_back(part(rank, info.held_experts[h], i));
  held.push_back(0);
  MOECCL_ASSERT_COMM_OK(moecclHybridReduce(hybrid, held.data(), own.data(), shape.elements, moecclFloat32, nullptr),
                        comm);
  size_t wrong = 0;
  for (int32_t e = 0; e < info.n_own; ++e) {
    const int expert = info.own_experts[e];
    for (size_t i = 0; i < shape.elements; ++i) {
      float sum = 0;
      for (const int32_t r : held_by[static_cast<size_t>(expert)]) sum += part(r, expert, i);
      wrong += own[static_cast<size_t>(e) * shape.elements + i] != sum;
    }
  }
  EXPECT_EQ(wrong, 0u) << "elements of the sums of " << info.n_own << " own experts";
  EXPECT_EQ(own.back(), -77) << "written beyond the experts";
}

// Returns the ranks that hold each expert, [n_experts].
std::vector<std::vector<int32_t>> holders(const Shape& shape, const moecclHybridInfo_t& info, int rank,
                                          moecclComm_t comm) {
  const auto n = static_cast<size_t>(shape.n), experts = static_cast<size_t>(shape.n_experts);
  std::vector<int32_t> mine(experts, 0), all(n * experts);
  for (int32_t h = 0; h < info.n_held; ++h) mine[static_cast<size_t>(info.held_experts[h])] = 1;
  EXPECT_EQ(moecclAllGather(mine.data(), all.data(), experts, moecclInt32, comm, nullptr), moecclSuccess);
  EXPECT_EQ(memcmp(mine.data(), &all[static_cast<size_t>(rank) * experts], experts * 4), 0);
  std::vector<std::vector<int32_t>> by(experts);
  for (size_t r = 0; r < n; ++r)
    for (size_t e = 0; e < experts; ++e)
      if (all[r * experts + e] != 0) by[e].push_back(static_cast<int32_t>(r));
  return by;
}

void round_trip(const Shape& shape, int rank, moecclComm_t comm, moecclMoe_t moe, const moecclHybridInfo_t& hybrid,
                const std::vector<float>& held) {
  const Choices mine(shape, rank);
  constexpr size_t kWidth = 6;
  moecclRouting_t routing = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, mine.index.data(), mine.weight.data(), mine.n), comm);
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
  ASSERT_EQ(info.n_local_experts, hybrid.n_held);
  for (int32_t e = 0; e < hybrid.n_held; ++e) EXPECT_EQ(info.local_experts[e], hybrid.held_experts[e]);
  std::vector<float> in(mine.n * kWidth + 1), rows(info.n_rows * kWidth + 1, -9), out(mine.n * kWidth + 1, -9);
  for (size_t t = 0; t < mine.n; ++t)
    for (size_t i = 0; i < kWidth; ++i) in[t * kWidth + i] = token_value(rank, t, i);
  MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), rows.data(), nullptr), comm);
  size_t wrong = 0, at_home = 0;
  for (int32_t e = 0; e < info.n_local_experts; ++e) {
    const float scale = held[static_cast<size_t>(e) * shape.elements];
    for (auto r = static_cast<size_t>(info.expert_offsets[e]); r < static_cast<size_t>(info.expert_offsets[e + 1]);
         ++r) {
      at_home += info.row_source[r] == rank;
      for (size_t i = 0; i < kWidth; ++i) {
        wrong += rows[r * kWidth + i] != token_value(info.row_source[r], static_cast<size_t>(info.row_token[r]), i);
        rows[r * kWidth + i] *= scale;
      }
    }
  }
  EXPECT_EQ(wrong, 0u) << "elements of " << info.n_rows << " dispatched rows";
  MOECCL_ASSERT_COMM_OK(moecclCombine(routing, rows.data(), out.data(), nullptr), comm);
  size_t local = 0;
  wrong = 0;
  for (size_t t = 0; t < mine.n; ++t) {
    float factor = 0;
    for (size_t j = 0; j < static_cast<size_t>(shape.top_k); ++j) {
      const size_t c = t * static_cast<size_t>(shape.top_k) + j;
      if (mine.index[c] < 0) continue;
      factor += mine.weight[c] * scale_of(mine.index[c]);
      for (int32_t h = 0; h < hybrid.n_held; ++h) local += hybrid.held_experts[h] == mine.index[c];
    }
    for (size_t i = 0; i < kWidth; ++i) wrong += out[t * kWidth + i] != factor * token_value(rank, t, i);
  }
  EXPECT_EQ(wrong, 0u) << "elements of " << mine.n << " combined tokens";
  EXPECT_EQ(out.back(), -9) << "written beyond the tokens";
  EXPECT_EQ(at_home, local) << "choices of experts that this rank holds stay here";
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
}

class HybridConformance : public ::testing::TestWithParam<Shape> {};

TEST_P(HybridConformance, EveryChoiceIsComputedOnceByAHolderOfItsExpert) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode};
  // Name the level, so that ranks on several hosts have no additional level.
  const std::string one_level = "gpu:" + std::to_string(shape.n);
  options.config.topology = *shape.topology != '\0' ? shape.topology : one_level.c_str();
  options.config.pace = shape.pace;
  options.config.staging_bytes = shape.staging_bytes;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        std::vector<int32_t> owner;
        for (int e = 0; e < shape.n_experts && shape.round_robin; ++e) owner.push_back(e % shape.n);
        moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
        config.n_experts = shape.n_experts;
        config.expert_rank = shape.round_robin ? owner.data() : nullptr;
        config.n_levels = static_cast<int32_t>(shape.domain.size());
        config.domain = shape.domain.data();
        moecclHybrid_t hybrid = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
        moecclHybridInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclHybridGetInfo(hybrid, &info), comm);
        const std::vector<float> held = gathered(shape, hybrid, info, comm);
        reduced(shape, rank, hybrid, info, holders(shape, info, rank, comm), comm);
        if (::testing::Test::HasFailure()) return;
        for (const char* algorithm : {"auto", "flat", "hier:1", "hier:2"}) {
          if (std::string(algorithm) == "hier:2" && shape.domain.size() < 2) continue;
          moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
          layer.hidden_bytes = 6 * sizeof(float);
          layer.type = moecclFloat32;
          layer.top_k = shape.top_k;
          layer.max_tokens = std::max<size_t>(1, shape.tokens);
          layer.layout = moecclLayoutExpertMajor;
          layer.algorithm = algorithm;
          moecclMoe_t moe = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclHybridMoeCreate(&moe, hybrid, comm, &layer), comm);
          set_note(algorithm);
          round_trip(shape, rank, comm, moe, info, held);
          MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
          if (::testing::Test::HasFailure()) return;
        }
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, HybridConformance, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

// Table VII: counts the messages that ranks really send. There is one small expert per rank, so that a link's message
// is one store, and every rank has a token for every expert, so that every link is used.
TEST(HybridTraffic, MessagesOfRealRunsAreThoseOfTableVII) {
  const struct {
    int32_t size;
    uint64_t tokens, gather;
  } rows[] = {{1, 56, 0}, {2, 24, 8}, {4, 8, 24}, {8, 0, 56}};
  RankOptions options{.mode = kP};
  options.config.topology = "gpu:8";
  for (const auto& row : rows) {
    run_ranks(
        8,
        [&](int rank, moecclComm_t comm) {
          moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
          config.n_experts = 8;
          config.n_levels = 1;
          config.domain = &row.size;
          moecclHybrid_t hybrid = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
          moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
          layer.hidden_bytes = 64;
          layer.top_k = 1;
          layer.max_tokens = 8;
          moecclMoe_t moe = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclHybridMoeCreate(&moe, hybrid, comm, &layer), comm);
          const int32_t index[8] = {0, 1, 2, 3, 4, 5, 6, 7};
          moecclRouting_t routing = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index, nullptr, 8), comm);
          moecclRoutingInfo_t rows_info{};
          rows_info.size = sizeof(rows_info);
          MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &rows_info), comm);
          std::vector<char> in(8 * 64), out(rows_info.n_rows * 64 + 1), own(100), held(800);
          const auto messages = [&] {
            moecclTraffic_t to[8];
            EXPECT_EQ(moecclCommTraffic(comm, to, 8), moecclSuccess);
            uint64_t sum = 0;
            for (const moecclTraffic_t& t : to) sum += t.messages;
            return sum;
          };
          const auto of_all_ranks = [&](uint64_t mine) {
            uint64_t sum = 0;
            EXPECT_EQ(moecclAllReduce(&mine, &sum, 1, moecclUint64, moecclSum, comm, nullptr), moecclSuccess);
            return sum;
          };
          uint64_t before = messages();
          MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), out.data(), nullptr), comm);
          const uint64_t tokens = messages() - before;
          EXPECT_EQ(of_all_ranks(tokens), row.tokens) << "domains of " << row.size;
          before = messages();
          MOECCL_ASSERT_COMM_OK(moecclHybridGather(hybrid, own.data(), held.data(), 100, nullptr), comm);
          const uint64_t gather = messages() - before;
          EXPECT_EQ(of_all_ranks(gather), row.gather) << "domains of " << row.size;
          MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
          MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
          MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
          (void)rank;
        },
        options);
  }
}

TEST(HybridChoice, AutoTakesOneDomainOverSlowLinksAndNoneForHugeExperts) {
  RankOptions options;
  options.config.topology = "dc:2(bw=10MB/s) gpu:2(bw=1GB/s)";
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
        config.n_experts = 8;
        config.data_bytes = 1e8;
        config.expert_bytes = 1e5;
        moecclHybrid_t hybrid = nullptr;
        moecclHybridInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
        MOECCL_ASSERT_COMM_OK(moecclHybridGetInfo(hybrid, &info), comm);
        EXPECT_EQ(info.domain[0], 2);
        EXPECT_LT(info.after_us, info.before_us);
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
        config.data_bytes = 1e3;
        config.expert_bytes = 1e9;
        MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
        MOECCL_ASSERT_COMM_OK(moecclHybridGetInfo(hybrid, &info), comm);
        EXPECT_EQ(info.domain[0], 1);
        EXPECT_EQ(info.domain[1], 1);
        char page[8192];
        MOECCL_EXPECT_OK(moecclHybridExplain(hybrid, 1000, page, sizeof(page), nullptr));
        EXPECT_NE(std::string(page).find("stream model"), std::string::npos) << page;
        EXPECT_NE(std::string(page).find("ExpertReduce"), std::string::npos) << page;
        EXPECT_EQ(moecclHybridExplain(hybrid, size_t{1} << 41, page, sizeof(page), nullptr), moecclInvalidArgument);
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
      },
      options);
}

// Experts at 50x that take no time to encode and decode make one domain of the data centres. The codec's time at the
// library's own rates is more than tokens take.
TEST(HybridChoice, TheCodecCostsWhatTheHardwareTakes) {
  RankOptions options;
  options.config.topology = "dc:2(bw=1GB/s) gpu:2(bw=20GB/s)";
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
        config.n_experts = 32;
        config.top_k = 2;
        config.data_bytes = 2e6;
        config.expert_bytes = 16e6;
        config.pre_expert_s = 5e-3;
        config.compression = config.gradient_ratio = 50;
        const auto made = [&](double encode, double decode) {
          config.encode_bandwidth = encode, config.decode_bandwidth = decode;
          moecclHybrid_t hybrid = nullptr;
          moecclHybridInfo_t info{};
          info.size = sizeof(info);
          MOECCL_EXPECT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
          MOECCL_EXPECT_COMM_OK(moecclHybridGetInfo(hybrid, &info), comm);
          MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
          return info;
        };
        EXPECT_EQ(made(-1, -1).domain[0], 2) << "a codec that takes no time";
        EXPECT_EQ(made(-1, -1).codec_us, 0);
        EXPECT_EQ(made(0, 0).domain[0], 1) << "the default rates";
        EXPECT_EQ(made(1e15, 1e15).domain[0], 2) << "given rates";
        const int32_t sizes[] = {2, 1};
        config.domain = sizes, config.n_levels = 2;
        EXPECT_GT(made(0, 0).codec_us, 16e6 / 30e3);  // 30 GB/s: more than any core
        config.compression = config.gradient_ratio = 1;
        EXPECT_EQ(made(0, 0).codec_us, 0) << "nothing is encoded";
      },
      options);
}

TEST(HybridErrors, NameTheArgumentAndTheRemedy) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclHybrid_t hybrid = nullptr;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = 4;
    EXPECT_EQ(moecclHybridCreate(&hybrid, comm, &config), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("config.domain is NULL"), std::string::npos);
    const int32_t two[2] = {2, 2}, mine = rank + 1;
    config.domain = two;
    config.n_levels = 2;
    EXPECT_EQ(moecclHybridCreate(&hybrid, comm, &config), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("has 1 level, give a domain size for each"),
              std::string::npos);
    config.n_levels = 1;
    config.domain = &mine;
    EXPECT_EQ(moecclHybridCreate(&hybrid, comm, &config), moecclMismatch);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("domain size of level 0"), std::string::npos);
    config.domain = two;
    config.compression = 0.5;
    EXPECT_EQ(moecclHybridCreate(&hybrid, comm, &config), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("config.compression is 0.5"), std::string::npos);
    config.compression = 0;
    config.pre_expert_s = 1;  // alone it is not the figures of a model
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclHybridInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &info));
    EXPECT_EQ(info.before_us, 0);
    EXPECT_EQ(info.after_us, 0);
    char experts[16] = {};
    EXPECT_EQ(moecclHybridGather(hybrid, experts, nullptr, 2, nullptr), moecclInvalidArgument);
    EXPECT_EQ(moecclHybridGather(hybrid, experts, experts, 2, nullptr), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("overlap"), std::string::npos);
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = 8;
    layer.top_k = 1;
    layer.max_tokens = 4;
    layer.n_experts = 5;
    moecclMoe_t moe = nullptr;
    EXPECT_EQ(moecclHybridMoeCreate(&moe, hybrid, comm, &layer), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("config.n_experts is 5"), std::string::npos);
    moecclTraffic_t to[2];
    EXPECT_EQ(moecclCommTraffic(comm, to, 3), moecclInvalidArgument);
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
    EXPECT_EQ(moecclHybridDestroy(hybrid), moecclInvalidArgument);
    EXPECT_EQ(moecclHybridGather(hybrid, experts, experts + 8, 2, nullptr), moecclInvalidArgument);
  });
}

// The tables of a placement's domains have no rows for another number of ranks.
TEST(HybridErrors, ACommunicatorOfMoreOrFewerRanksIsRefusedByAll) {
  run_ranks(4, [](int rank, moecclComm_t comm) {
    moecclComm_t half = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank / 2, rank, &half, nullptr), comm);
    const int32_t domain = 2;
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = 8, layer.top_k = 1, layer.max_tokens = 4;
    const auto refused = [&](moecclComm_t home, moecclComm_t other, const char* numbers) {
      moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
      config.n_experts = 4, config.n_levels = 1, config.domain = &domain;
      moecclHybrid_t hybrid = nullptr;
      MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, home, &config), home);
      moecclMoe_t moe = nullptr;
      EXPECT_EQ(moecclHybridMoeCreate(&moe, hybrid, other, &layer), moecclInvalidArgument);
      EXPECT_NE(std::string(moecclGetLastError(other)).find(numbers), std::string::npos) << moecclGetLastError(other);
      MOECCL_ASSERT_COMM_OK(moecclHybridMoeCreate(&moe, hybrid, home, &layer), home);
      MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
      MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
    };
    refused(half, comm, "comm has 4 ranks");
    refused(comm, half, "comm has 2 ranks");
    MOECCL_EXPECT_OK(moecclCommDestroy(half));
  });
}

TEST(HybridErrors, ARankWithoutAConfigTellsTheOthers) {
  constexpr int64_t kTimeoutMs = 5000, kLimitMs = 1500;
  RankOptions options;
  options.config.timeout_ms = static_cast<int32_t>(patient_ms(kTimeoutMs));
  Meeting told;
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        const int32_t domain = 2;
        moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
        config.n_experts = 4, config.n_levels = 1, config.domain = &domain;
        moecclHybrid_t hybrid = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
        moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT, short_one = layer;
        layer.hidden_bytes = 8, layer.top_k = 1, layer.max_tokens = 4;
        short_one.size = 3;
        moecclMoe_t moe = nullptr;
        const moecclMoeConfig_t* const wrong_ones[] = {nullptr, &short_one};
        for (const moecclMoeConfig_t* wrong : wrong_ones) {
          const Stopwatch watch;
          EXPECT_EQ(moecclHybridMoeCreate(&moe, hybrid, comm, rank == 1 ? wrong : &layer),
                    rank == 1 ? moecclInvalidArgument : moecclRemoteError);
          const std::string said = moecclGetLastError(comm);
          EXPECT_NE(said.find(rank == 1 ? "config" : "rank 1 could not create the layer"), std::string::npos) << said;
          MOECCL_EXPECT_WITHIN(watch, kLimitMs);
        }
        EXPECT_EQ(moecclHybridMoeCreate(&moe, hybrid, comm, &layer), moecclSuccess) << "comm works as before";
        EXPECT_TRUE(told.meet(2));  // a rank that leaves would end the other's wait
        MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
      },
      options);
}

// The same ranks in another order would take each other's experts for their own.
TEST(HybridErrors, AnotherOrderOfTheRanksIsRefusedByAll) {
  run_ranks(3, [](int rank, moecclComm_t comm) {
    const int32_t owners[5] = {0, 1, 1, 2, 0}, domain = 3;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = 5, config.expert_rank = owners, config.n_levels = 1, config.domain = &domain;
    moecclHybrid_t hybrid = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    moecclComm_t turned = nullptr;  // ranks 1 and 2 change places, and rank 0 stays
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, -rank * (rank > 0) + 3 * (rank > 0), &turned, nullptr), comm);
    const auto refused = [&](moecclResult_t result) {
      EXPECT_EQ(result, rank == 0 ? moecclRemoteError : moecclInvalidArgument);
      const std::string said = moecclGetLastError(turned);
      EXPECT_NE(said.find(rank == 0 ? "rank 1" : "in the same order"), std::string::npos) << said;
    };
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = 8, layer.top_k = 1, layer.max_tokens = 4;
    moecclMoe_t moe = nullptr;
    refused(moecclHybridMoeCreate(&moe, hybrid, turned, &layer));
    moecclGradientReturnConfig_t gradients = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    gradients.count = 64;
    moecclGradientReturn_t returned = nullptr;
    moecclMigrationConfig_t migration = MOECCL_MIGRATION_CONFIG_INIT;
    migration.count = 64;
    moecclMigration_t moved = nullptr;
    EXPECT_EQ(moecclGradientReturnCreate(&returned, hybrid, turned, &gradients),
              rank == 0 ? moecclRemoteError : moecclInvalidArgument);
    EXPECT_EQ(moecclMigrationCreate(&moved, hybrid, turned, &migration),
              rank == 0 ? moecclRemoteError : moecclInvalidArgument);
    MOECCL_EXPECT_OK(moecclCommDestroy(turned));
    // Placements with the same domains and other homes are different, too.
    const int32_t others[5] = {0, 1, 2, 2, 0};
    config.expert_rank = others;
    moecclHybrid_t other = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&other, comm, &config), comm);
    EXPECT_EQ(moecclGradientReturnCreate(&returned, rank == 0 ? hybrid : other, nullptr, &gradients), moecclMismatch);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("homes"), std::string::npos) << moecclGetLastError(comm);
    EXPECT_EQ(moecclMigrationCreate(&moved, rank == 0 ? hybrid : other, nullptr, &migration), moecclMismatch);
    MOECCL_EXPECT_OK(moecclHybridDestroy(other));
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

}  // namespace
}  // namespace moeccl::testing
