// SPDX-License-Identifier: Apache-2.0
// Compressed return of gradients through the C interface, against a naive reference: owners get their own gradient and
// what the codec keeps of the others, bit for bit, holders keep the rest as remainders, and nothing is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/gradient_returning.h"

namespace moeccl::testing {
namespace {

constexpr RankMode kT = RankMode::kThreads, kP = RankMode::kProcesses, kM = RankMode::kMixed;
constexpr int kSteps = 5;
using Shape = GradientShape;

std::vector<int32_t> evenly(int experts, int ranks) {
  std::vector<int32_t> owner;
  for (int e = 0; e < experts; ++e) owner.push_back(e * ranks / experts);
  return owner;
}

void run_steps(const Shape& shape) {
  RankOptions options{.mode = shape.mode};
  options.config.topology = shape.topology.empty() ? nullptr : shape.topology.c_str();
  options.config.pace = shape.pace;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        Returning s(shape, rank, comm);
        if (::testing::Test::HasFailure()) return;
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        for (int step = 0; step < kSteps; ++step) {
          std::vector<std::vector<unsigned char>> held, own;
          for (int l = 0; l < shape.layers; ++l) {
            held.push_back(s.held(l, step));
            own.emplace_back(s.own_bytes(), static_cast<unsigned char>(0xee));
          }
          // In every other step the layers run on a stream.
          const bool later = step % 2 == 1;
          for (int l = 0; l < shape.layers; ++l) {
            const auto at = static_cast<size_t>(l);
            MOECCL_ASSERT_COMM_OK(
                moecclGradientReturnReduce(s.gradients, l, held[at].data(), own[at].data(), later ? stream : nullptr),
                comm);
          }
          MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
          for (int l = 0; l < shape.layers; ++l) s.check(l, step, own[static_cast<size_t>(l)]);
          if (::testing::Test::HasFailure()) return;
        }
        for (int l = 0; l < shape.layers && shape.integers; ++l) s.check_sums(l);
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
      },
      options);
}

class GradientReturn : public ::testing::TestWithParam<Shape> {};

TEST_P(GradientReturn, OwnersGetWhatTheCodecKeepsAndHoldersKeepTheRest) { run_steps(GetParam()); }

const Shape kShapes[] = {
    {"OneRank", 1, kT, "", {1}, {0, 0}, 300, 50},
    {"FiftyTimes", 4, kP, "dc:2 gpu:2", {2, 2}, evenly(8, 4), 70'001, 50, moecclFloat32, 2},
    {"FiftyTimesBf16", 4, kP, "dc:2 gpu:2", {2, 2}, evenly(4, 4), 70'001, 50, moecclBfloat16},
    {"IntegersLoseNothing",
     7,
     kM,
     "dc:2 gpu:4+3",
     {2, 2},
     {6, 0, 0, 3, 1, 5, 5, 5, 2},
     4096,
     50,
     moecclFloat32,
     2,
     true},
    {"IntegersLoseNothingBf16", 8, kT, "dc:2 gpu:4", {2, 4}, evenly(8, 8), 1000, 8, moecclBfloat16, 1, true},
    {"NoElements", 3, kT, "", {3}, evenly(4, 3), 0, 50},
    {"OneElementIsKept", 3, kT, "", {3}, evenly(3, 3), 20, 50, moecclFloat32, 1, true},
    {"NoDomains", 4, kT, "", {1}, evenly(8, 4), 100, 50},
    {"RanksWithoutExperts", 4, kP, "gpu:4", {4}, {2, 2, 1}, 512, 4, moecclFloat32, 1, true},
    {"Paced", 8, kT, "dc:2(bw=4GB/s,lat=20us) gpu:4", {2, 1}, evenly(16, 8), 20'000, 8, moecclFloat32, 1, false, true},
    {"SixteenRanks", 16, kT, "dc:4 gpu:4", {4, 4}, evenly(16, 16), 600, 50, moecclFloat32, 1, true},
};
INSTANTIATE_TEST_SUITE_P(Shapes, GradientReturn, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return info.param.name; });

TEST(GradientReturnRandom, AnyTreeDomainsAndOwners) {
  const std::pair<int, const char*> trees[] = {{2, "gpu:2"},
                                               {5, "gpu:5"},
                                               {6, "dc:3 gpu:2"},
                                               {7, "node:2 gpu:3+4"},
                                               {8, "node:3 gpu:1+4+3"},
                                               {8, "dc:2 node:2 gpu:2"}};
  std::mt19937 random(static_cast<unsigned>(test_seed()));
  const auto below = [&](size_t n) { return static_cast<size_t>(random()) % n; };
  for (int round = 0; round < scaled(12); ++round) {
    const auto& [n, topology] = trees[below(std::size(trees))];
    Shape s{"Random", n, std::vector{kT, kP, kM}[below(3)], topology, {}, {}, 1 + below(3000), 0};
    const std::string text = topology;
    for (auto levels = std::count(text.begin(), text.end(), ':'); levels > 0; --levels)
      s.domain.push_back(static_cast<int32_t>(1 + below(4)));
    for (size_t experts = 1 + below(12); experts > 0; --experts)
      s.owner.push_back(static_cast<int32_t>(below(static_cast<size_t>(n))));
    s.ratio = std::vector{1.5, 4.0, 50.0}[below(3)];
    s.type = below(2) == 0 ? moecclFloat32 : moecclBfloat16;
    s.layers = static_cast<int>(1 + below(2));
    s.integers = below(2) == 0;
    SCOPED_TRACE(::testing::PrintToString(s));
    run_steps(s);
    if (HasFailure()) return;
  }
}

// The ratio keeps less than one of ten elements. Still each of them arrives, one call after another.
TEST(GradientReturnExact, ShortGradientsArriveToo) {
  static constexpr size_t kCount = 10;
  run_ranks(2, [](int, moecclComm_t comm) {
    const int32_t domain = 2;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = 2, config.n_levels = 1, config.domain = &domain;
    moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    back.count = kCount;
    moecclHybrid_t hybrid = nullptr;
    moecclGradientReturn_t gradients = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    MOECCL_ASSERT_COMM_OK(moecclGradientReturnCreate(&gradients, hybrid, nullptr, &back), comm);
    const std::vector<float> held(2 * kCount, 1.0f);
    std::vector<float> own(kCount), sum(kCount);
    for (size_t step = 0; step < kCount; ++step) {
      MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(gradients, 0, held.data(), own.data(), nullptr), comm);
      for (size_t i = 0; i < kCount; ++i) sum[i] += own[i];
    }
    for (const float s : sum) EXPECT_GT(s, kCount) << "the other rank's gradient has not come";
    EXPECT_EQ(moecclGradientReturnDestroy(gradients), moecclSuccess);
    EXPECT_EQ(moecclHybridDestroy(hybrid), moecclSuccess);
  });
}

TEST(GradientReturnExact, RatioOneIsHybridReduce) {
  for (const moecclDataType_t type : {moecclFloat32, moecclBfloat16}) {
    const Shape shape{"", 8, kP, "dc:2 gpu:4", {2, 2}, {7, 1, 1, 0, 3, 4, 6, 6, 2}, 1001, 1, type, 1, true};
    RankOptions options{.mode = shape.mode};
    options.config.topology = shape.topology.c_str();
    run_ranks(
        shape.n,
        [&](int rank, moecclComm_t comm) {
          Returning s(shape, rank, comm);
          const std::vector<unsigned char> held = s.held(0, 0);
          std::vector<unsigned char> exact(s.own_bytes()), own(s.own_bytes());
          MOECCL_ASSERT_COMM_OK(moecclHybridReduce(s.hybrid, held.data(), exact.data(), shape.count, type, nullptr),
                                comm);
          MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(s.gradients, 0, held.data(), own.data(), nullptr), comm);
          EXPECT_EQ(own, exact);
          const moecclGradientReturnInfo_t f = s.facts(0);
          EXPECT_EQ(f.n_remainders, 0);
          EXPECT_EQ(f.remainders, nullptr);
          EXPECT_EQ(f.expert_bytes, shape.count * moecclTypeSize(type));
          MOECCL_EXPECT_COMM_OK(moecclGradientReturnReset(s.gradients, 0), comm);
        },
        options);
  }
}

const Shape kFour{"", 4, kP, "", {4}, {0, 1, 2, 3}, 30'000, 50};

TEST(GradientReturnWire, BytesAreAsComputed) {
  RankOptions options{.mode = kP};
  options.config.topology = "node:4(bw=4GB/s,lat=20us) gpu:1";
  options.config.pace = true;  // all data then travels over links, where it is counted
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        const Shape four{"", 4, kP, "", {4, 1}, {0, 1, 2, 3}, 30'000, 50};
        Returning s(four, rank, comm);
        const moecclGradientReturnInfo_t f = s.facts(0);
        EXPECT_EQ(f.sent_bytes, 3 * f.expert_bytes);
        EXPECT_LE(f.expert_bytes, four.count * sizeof(float) / 50 + 32);
        EXPECT_GE(f.memory_bytes, 3 * four.count * sizeof(float));
        const auto sent = [&] {
          std::vector<moecclTraffic_t> to(4);
          EXPECT_EQ(moecclCommTraffic(comm, to.data(), 4), moecclSuccess);
          uint64_t sum = 0;
          for (const moecclTraffic_t& t : to) sum += t.bytes;
          return sum;
        };
        const std::vector<unsigned char> held = s.held(0, 0);
        std::vector<unsigned char> own(s.own_bytes());
        const uint64_t before = sent();
        MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(s.gradients, 0, held.data(), own.data(), nullptr), comm);
        EXPECT_GE(sent() - before, f.sent_bytes);
        EXPECT_LE(sent() - before, f.sent_bytes + 1024);
      },
      options);
}

// A program that restores the remainders of a checkpoint goes on with the same bits; Reset begins anew.
TEST(GradientReturnState, RemaindersCanBeReadWrittenAndReset) {
  run_ranks(4, [](int rank, moecclComm_t comm) {
    Returning s(kFour, rank, comm);
    const auto turn = [&](int step) {
      const std::vector<unsigned char> held = s.held(0, step);
      std::vector<unsigned char> own(s.own_bytes());
      MOECCL_EXPECT_COMM_OK(moecclGradientReturnReduce(s.gradients, 0, held.data(), own.data(), nullptr), comm);
      return own;
    };
    const moecclGradientReturnInfo_t f = s.facts(0);
    const size_t n = static_cast<size_t>(f.n_remainders) * kFour.count;
    const std::vector<unsigned char> first = turn(0);
    const Values kept(f.remainders, f.remainders + n);
    const std::vector<unsigned char> second = turn(1);
    EXPECT_NE(Values(f.remainders, f.remainders + n), kept);
    std::copy(kept.begin(), kept.end(), f.remainders);
    EXPECT_EQ(turn(1), second);
    MOECCL_EXPECT_COMM_OK(moecclGradientReturnReset(s.gradients, 0), comm);
    EXPECT_EQ(turn(0), first);
    EXPECT_EQ(Values(f.remainders, f.remainders + n), kept);
  });
}

TEST(GradientReturnState, NumbersThatAreNotFiniteLeaveNoRemainder) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const Shape two{"", 2, kT, "", {2}, {0, 1}, 1000, 50};
    Returning s(two, rank, comm);
    std::vector<unsigned char> held = s.held(0, 0), own(s.own_bytes());
    for (const size_t i : {size_t{5}, size_t{999}, size_t{1005}, size_t{1999}})
      reinterpret_cast<float*>(held.data())[i] = i % 2 == 0 ? std::nanf("") : INFINITY;
    MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(s.gradients, 0, held.data(), own.data(), nullptr), comm);
    const moecclGradientReturnInfo_t f = s.facts(0);
    for (size_t i = 0; i < two.count; ++i) EXPECT_TRUE(std::isfinite(f.remainders[i])) << i;
    EXPECT_FALSE(std::isfinite(reinterpret_cast<float*>(own.data())[5]));
  });
}

// types.h: Finalize and Destroy wait for running operations, which end when `own` and the remainders are written.
TEST(GradientReturnStream, FinalizeAndDestroyWaitForTheDecoding) {
  RankOptions options;
  options.destroy = false;
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        const Shape two{"", 2, kT, "", {2}, {0, 0, 0, 0, 1, 1, 1, 1}, 500'003, 8};
        Returning s(two, rank, comm);
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        const std::vector<unsigned char> held = s.held(0, 0);
        const moecclGradientReturnInfo_t f = s.facts(0);
        const size_t n = static_cast<size_t>(f.n_remainders) * two.count;
        std::vector<unsigned char> want(s.own_bytes());
        MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(s.gradients, 0, held.data(), want.data(), nullptr), comm);
        const Values kept(f.remainders, f.remainders + n);
        for (const bool destroys : {false, true}) {
          std::vector<unsigned char> own(want.size(), static_cast<unsigned char>(0xee));
          MOECCL_ASSERT_COMM_OK(moecclGradientReturnReset(s.gradients, 0), comm);
          MOECCL_ASSERT_COMM_OK(moecclGradientReturnReduce(s.gradients, 0, held.data(), own.data(), stream), comm);
          MOECCL_EXPECT_OK(destroys ? moecclCommDestroy(comm) : moecclCommFinalize(comm));
          EXPECT_TRUE(own == want) << (destroys ? "Destroy" : "Finalize")
                                   << " returned before the gradients were there";
          EXPECT_TRUE(Values(f.remainders, f.remainders + n) == kept) << "remainders";
        }
        MOECCL_EXPECT_OK(moecclStreamSynchronize(stream));
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
      },
      options);
}

// The sentence belongs to the communicator that the call was given.
TEST(GradientReturnErrors, AnotherCommunicatorKeepsItsSentence) {
  run_ranks(1, [](int rank, moecclComm_t comm) {
    const Shape one{"", 1, kT, "", {1}, {0, 0}, 64, 50};
    Returning s(one, rank, comm);
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, 0, &other, nullptr), comm);
    moecclGradientReturnConfig_t bad = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    bad.count = 4, bad.ratio = NAN;
    moecclGradientReturn_t none = nullptr;
    EXPECT_EQ(moecclGradientReturnCreate(&none, s.hybrid, other, &bad), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(other)).find("config.ratio is nan"), std::string::npos)
        << moecclGetLastError(other);
    MOECCL_EXPECT_OK(moecclCommDestroy(other));
  });
}

TEST(GradientReturnErrors, RanksThatDifferAreNamed) {
  run_ranks(3,
            [](int rank, moecclComm_t comm) {
              const auto says = [&](const char* text) {
                EXPECT_NE(std::string(moecclGetLastError(comm)).find(text), std::string::npos)
                    << moecclGetLastError(comm);
              };
              const Shape three{"", 3, kP, "", {3}, {0, 1, 2}, 256, 4, moecclFloat32, 2};
              Returning s(three, rank, comm);
              moecclGradientReturnConfig_t c = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
              c.count = 256;
              c.ratio = rank == 2 ? 8 : 4;
              moecclGradientReturn_t none = nullptr;
              EXPECT_EQ(moecclGradientReturnCreate(&none, s.hybrid, nullptr, &c), moecclMismatch);
              says("ratio");
              c.ratio = rank == 1 ? 0.5 : 4;
              EXPECT_EQ(moecclGradientReturnCreate(&none, s.hybrid, nullptr, &c),
                        rank == 1 ? moecclInvalidArgument : moecclRemoteError);
              says(rank == 1 ? "config.ratio is 0.5" : "rank 1");
              EXPECT_EQ(none, nullptr);
              // Another layer on one rank: no rank takes other gradients for its own.
              std::vector<unsigned char> held = s.held(0, 0), own(s.own_bytes());
              EXPECT_EQ(moecclGradientReturnReduce(s.gradients, rank == 1 ? 1 : 0, held.data(), own.data(), nullptr),
                        moecclMismatch);
              says("layer");
              const moecclGradientReturnInfo_t f = s.facts(0);
              for (size_t i = 0; i < 2 * three.count; ++i) ASSERT_EQ(f.remainders[i], 0);
            },
            {.mode = kP});
}

TEST(GradientReturnErrors, MisuseHasASentence) {
  run_ranks(1, [](int rank, moecclComm_t comm) {
    const Shape one{"", 1, kT, "", {1}, {0, 0}, 64, 50};
    Returning s(one, rank, comm);
    std::vector<unsigned char> held = s.held(0, 0), own(s.own_bytes());
    const auto fails = [&](moecclResult_t got, moecclResult_t want, const char* text) {
      EXPECT_EQ(got, want);
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(text), std::string::npos) << moecclGetLastError(comm);
    };
    const auto reduce = [&](int layer, const void* from, void* to) {
      return moecclGradientReturnReduce(s.gradients, layer, from, to, nullptr);
    };
    fails(reduce(1, held.data(), own.data()), moecclInvalidArgument,
          "layer is 1: the gradient return has layers 0 to 0");
    fails(reduce(-1, held.data(), own.data()), moecclInvalidArgument, "layer is -1");
    fails(reduce(0, nullptr, own.data()), moecclInvalidArgument, "held is NULL");
    fails(reduce(0, held.data(), nullptr), moecclInvalidArgument, "own is NULL");
    fails(reduce(0, held.data(), held.data() + 4), moecclInvalidArgument, "overlap");
    fails(moecclGradientReturnReset(s.gradients, 7), moecclInvalidArgument, "layer is 7");
    fails(moecclGradientReturnGetInfo(s.gradients, 0, nullptr), moecclInvalidArgument, "info");
    EXPECT_EQ(moecclGradientReturnReduce(nullptr, 0, held.data(), own.data(), nullptr), moecclInvalidArgument);
    MOECCL_EXPECT_OK(moecclGroupStart());
    fails(reduce(0, held.data(), own.data()), moecclInvalidUsage, "moecclGradientReturnReduce");
    EXPECT_EQ(moecclGroupEnd(), moecclInvalidUsage);
    const auto create = [&](auto change) {
      moecclGradientReturnConfig_t c = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
      c.count = 4;
      change(c);
      moecclGradientReturn_t none = nullptr;
      const moecclResult_t result = moecclGradientReturnCreate(&none, s.hybrid, comm, &c);
      EXPECT_EQ(none, nullptr);
      return result;
    };
    using Config = moecclGradientReturnConfig_t;
    fails(create([](Config& c) { c.ratio = NAN; }), moecclInvalidArgument, "config.ratio is nan");
    fails(create([](Config& c) { c.type = moecclInt32; }), moecclInvalidArgument, "config.type is");
    fails(create([](Config& c) { c.count = SIZE_MAX; }), moecclInvalidArgument, "config.count is");
    fails(create([](Config& c) { c.n_layers = -1; }), moecclInvalidArgument, "config.n_layers is -1");
    fails(create([](Config& c) { c.size = 4; }), moecclInvalidArgument, "config");
  });
}

}  // namespace
}  // namespace moeccl::testing
