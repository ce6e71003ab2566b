// SPDX-License-Identifier: Apache-2.0
// Expert swap at run time through the C interface: an expert's state and the tokens that choose it stay together
// wherever the expert goes, on all ranks alike; training gives the same bits; misuse gives a sentence.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/conformance/swapping_layer.h"

namespace moeccl::testing {
namespace {

constexpr RankMode kT = RankMode::kThreads, kP = RankMode::kProcesses, kM = RankMode::kMixed;

using Shape = SwapShape;

const Shape kShapes[] = {
    {"TwoRanksAuto", 2, kP, "", nullptr, 8, 2, 2, 12},
    {"ThreeRanksUneven", 3, kT, "node:2 gpu:1+2", nullptr, 7, 3, 2, 12},
    {"FourRanksAuto", 4, kT, "node:2 gpu:2", nullptr, 16, 4, 3, 12},
    {"FourRanksCapacity", 4, kM, "node:2 gpu:2", "hier:2", 12, 3, 1, 10, 5},
    {"FourRanksRows", 4, kT, "node:2 gpu:2", "hier:2", 16, 4, 2, 10, 0, moecclLayoutRows},
    {"FiveRanksFlat", 5, kM, "", "flat", 10, 2, 2, 10},
    {"EightRanks2dh", 8, kT, "node:2 gpu:4", "2dh", 16, 4, 2, 8},
    {"EightRanksAuto", 8, kT, "node:2 qpi:2 gpu:2", nullptr, 32, 6, 3, 8},
};

void same_everywhere(moecclComm_t comm, const moecclExpertSwapInfo_t& info, int n, int n_experts) {
  const auto experts = static_cast<size_t>(n_experts);
  std::vector<int32_t> all(static_cast<size_t>(n) * experts);
  MOECCL_ASSERT_COMM_OK(moecclAllGather(info.slot_of, all.data(), experts, moecclInt32, comm, nullptr), comm);
  for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], info.slot_of[i % experts]) << "rank " << i / experts;
  for (size_t e = 0; e < experts; ++e) ASSERT_EQ(info.expert_in[info.slot_of[e]], static_cast<int32_t>(e));
}

class SwapConformance : public ::testing::TestWithParam<Shape> {};

TEST_P(SwapConformance, ExpertsMoveAndTokensFollow) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode};
  options.config.topology = *shape.topology != '\0' ? shape.topology : nullptr;
  run_ranks(
      shape.n,
      [&](int, moecclComm_t comm) {
        moecclExpertSwap_t swap = nullptr;
        const moecclExpertSwapConfig_t config = eager();
        MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);
        uint64_t swaps = 0;
        {
          std::vector<std::unique_ptr<Swapping>> layers;
          for (int l = 0; l < shape.layers; ++l) layers.push_back(std::make_unique<Swapping>(shape, comm, swap, l));
          for (int step = 0; step < shape.steps; ++step) {
            for (auto& l : layers) l->run(step);
            int32_t n = -1, done = -1;
            if (step > 0) {
              MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, &n), comm);
              swaps += static_cast<uint64_t>(n);
            }
            MOECCL_ASSERT_COMM_OK(moecclExpertSwapTest(swap, &done), comm);
            ASSERT_EQ(done, 1);
            MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
            if (::testing::Test::HasFailure()) return;
          }
          MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, nullptr), comm);
          MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, nullptr), comm);
          for (int l = 0; l < shape.layers; ++l) {
            moecclExpertSwapInfo_t info{};
            info.size = sizeof(info);
            MOECCL_ASSERT_COMM_OK(moecclExpertSwapGetInfo(swap, l, &info), comm);
            EXPECT_EQ(info.n_counts, static_cast<uint64_t>(shape.steps));
            same_everywhere(comm, info, shape.n, shape.n_experts);
          }
        }
        EXPECT_GE(swaps, static_cast<uint64_t>(2 * shape.layers)) << "popular experts lie together";
        EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(All, SwapConformance, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

// Trains out = x + sum of gate * expert(x) by momentum, in plain floats, with swaps and without, in step.
class Trainer {
 public:
  static constexpr int kExperts = 8, kTopK = 2;
  Trainer(moecclComm_t comm, int n, int rank, moecclExpertSwap_t swap) : comm_(comm), rank_(rank) {
    set_up(comm, n, rank, swap);
  }
  void set_up(moecclComm_t comm, int n, int rank, moecclExpertSwap_t swap) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kHidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = kTopK;
    config.n_experts = kExperts;
    config.max_tokens = kTokens;
    config.layout = moecclLayoutExpertMajor;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe_, comm, &config), comm);
    slots_ = kExperts / n;
    for (int s = 0; s < slots_; ++s)
      for (size_t h = 0; h < kHidden; ++h)
        weight_.push_back(0.1f * static_cast<float>(rank * slots_ + s + 1) / static_cast<float>(h + 3));
    moment_.resize(weight_.size());
    grad_.resize(weight_.size());
    if (swap == nullptr) return;
    const uint64_t bytes = kHidden * sizeof(float);
    const moecclSwapTensor_t tensors[] = {
        {weight_.data(), bytes, 0, 0}, {moment_.data(), bytes, 0, 0}, {grad_.data(), bytes, 1, 0}};
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe_, tensors, 3, nullptr, nullptr), comm);
  }
  ~Trainer() {
    EXPECT_EQ(moecclRoutingDestroy(routing_), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe_), moecclSuccess);
  }

  // Runs forward and backward of one step. Returns this rank's loss.
  float run(int step) {
    SwapRandom random{static_cast<uint64_t>(rank_ * 100000 + step)};
    std::vector<int32_t> topk;
    std::vector<float> gate, x(kTokens * kHidden), out(x.size());
    // Popularity drifts, so that swaps continue.
    for (size_t t = 0; t < kTokens; ++t) {
      const uint64_t a = (random.below(3) * random.below(3) + static_cast<uint64_t>(step) / 40) % kExperts;
      topk.push_back(static_cast<int32_t>(a));
      topk.push_back(static_cast<int32_t>((a + 1 + random.below(kExperts - 1)) % kExperts));
      const float g = static_cast<float>(random.below(1000)) / 1000.0f;
      gate.push_back(g), gate.push_back(1 - g);
    }
    for (float& v : x) v = static_cast<float>(random.below(2001)) / 1000.0f - 1;
    EXPECT_EQ(routing_ == nullptr ? moecclRoutingCreate(&routing_, moe_, topk.data(), gate.data(), kTokens)
                                  : moecclRoutingUpdate(routing_, topk.data(), gate.data(), kTokens),
              moecclSuccess)
        << moecclGetLastError(comm_);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    EXPECT_EQ(moecclRoutingGetInfo(routing_, &info), moecclSuccess);
    std::vector<float> rows(info.n_rows * kHidden + 1), y(rows.size()), dy(rows.size());
    EXPECT_EQ(moecclDispatch(routing_, x.data(), rows.data(), nullptr), moecclSuccess) << moecclGetLastError(comm_);
    each_row(info, [&](size_t w, size_t r) { y[r] = weight_[w] * rows[r]; });
    EXPECT_EQ(moecclCombine(routing_, y.data(), out.data(), nullptr), moecclSuccess);
    float loss = 0;
    std::vector<float> dout(out.size());
    for (size_t i = 0; i < out.size(); ++i) {
      dout[i] = out[i] - 0.5f * x[i];
      loss += dout[i] * dout[i];
    }
    EXPECT_EQ(moecclCombineBackward(routing_, dout.data(), dy.data(), nullptr, nullptr, nullptr), moecclSuccess);
    grad_.assign(grad_.size(), 0);
    each_row(info, [&](size_t w, size_t r) { grad_[w] += dy[r] * rows[r]; });
    std::vector<float> dx(x.size());
    each_row(info, [&](size_t w, size_t r) { y[r] = weight_[w] * dy[r]; });
    EXPECT_EQ(moecclDispatchBackward(routing_, y.data(), dx.data(), nullptr), moecclSuccess);
    for (const float v : dx) loss += 1e-3f * v;
    return loss;
  }
  void learn() {
    for (size_t w = 0; w < weight_.size(); ++w) {
      moment_[w] = 0.9f * moment_[w] + grad_[w];
      weight_[w] -= 1e-4f * moment_[w];
    }
  }

 private:
  template <class Body>
  void each_row(const moecclRoutingInfo_t& info, Body&& body) const {
    for (size_t s = 0; s < static_cast<size_t>(slots_); ++s)
      for (auto r = static_cast<size_t>(info.expert_offsets[s]); r < static_cast<size_t>(info.expert_offsets[s + 1]);
           ++r)
        for (size_t h = 0; h < kHidden; ++h) body(s * kHidden + h, r * kHidden + h);
  }

  moecclComm_t comm_;
  int rank_, slots_ = 0;
  moecclMoe_t moe_ = nullptr;
  moecclRouting_t routing_ = nullptr;
  std::vector<float> weight_, moment_, grad_;
};

TEST(Swap, TrainingWithSwapsHasTheBitsOfTrainingWithout) {
  for (const int n : {2, 4}) {
    RankOptions options;
    options.config.topology = n == 4 ? "node:2 gpu:2" : nullptr;
    run_ranks(
        n,
        [&](int rank, moecclComm_t comm) {
          moecclExpertSwap_t swap = nullptr;
          moecclExpertSwapConfig_t config = eager();
          config.interval = 3;
          MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);
          int32_t swaps = 0;
          {
            Trainer with(comm, n, rank, swap), without(comm, n, rank, nullptr);
            const int steps = scaled(500);
            for (int step = 0; step < steps; ++step) {
              const float a = with.run(step), b = without.run(step);
              uint32_t bits_a, bits_b;
              std::memcpy(&bits_a, &a, 4), std::memcpy(&bits_b, &b, 4);
              ASSERT_EQ(bits_a, bits_b) << "step " << step << ": " << a << " and " << b;
              int32_t now = 0;
              MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, &now), comm);
              swaps += now;
              with.learn(), without.learn();
              MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
            }
            MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, nullptr), comm);
            EXPECT_GE(swaps, steps / 50);
          }
          EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
        },
        options);
  }
}

TEST(Swap, StaysWhereASwapDoesNotPay) {
  run_ranks(2, [](int, moecclComm_t comm) {
    const Shape shape{"", 2, kT, "", nullptr, 8, 2, 1, 6};
    moecclExpertSwap_t swap = nullptr;
    moecclExpertSwapConfig_t config = eager();
    config.horizon = 1;
    config.swap_us = 1e12;
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);
    {
      Swapping layer(shape, comm, swap, 0);
      for (int step = 0; step < shape.steps; ++step) {
        layer.run(step);
        MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
        int32_t n = -1;
        MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, &n), comm);
        EXPECT_EQ(n, 0);
      }
      moecclExpertSwapInfo_t info{};
      info.size = sizeof(info);
      MOECCL_ASSERT_COMM_OK(moecclExpertSwapGetInfo(swap, 0, &info), comm);
      EXPECT_GE(info.n_unpaid, 1u);
      EXPECT_GT(info.gain, 0);
      EXPECT_GT(info.step_us, 0);
      EXPECT_EQ(info.n_swaps, 0u);
    }
    EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
  });
}

moecclMoeConfig_t sixteen_experts() {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 4;
  config.type = moecclFloat32;
  config.top_k = 1;
  config.n_experts = 16;
  config.max_tokens = kTokens;
  return config;
}

// Ranks 0 and 1 hold shards of 24 bytes, ranks 2 and 3 of 8, so experts stay within their pair of ranks.
TEST(Swap, ExpertsKeepToRanksWithShardsOfTheirSize) {
  run_ranks(4, [](int rank, moecclComm_t comm) {
    const moecclMoeConfig_t config = sixteen_experts();
    moecclMoe_t moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    moecclExpertSwap_t swap = nullptr;
    const moecclExpertSwapConfig_t options = eager();
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &options), comm);
    const size_t bytes = rank < 2 ? 24 : 8;
    std::vector<unsigned char> shards(4 * bytes);
    for (size_t i = 0; i < shards.size(); ++i)
      shards[i] = static_cast<unsigned char>(rank * 4 + static_cast<int>(i / bytes));
    const moecclSwapTensor_t tensor{shards.data(), bytes, 0, 0};
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe, &tensor, 1, nullptr, nullptr), comm);
    moecclRouting_t routing = nullptr;
    int32_t swaps = 0;
    for (int step = 0; step < 12; ++step) {
      std::vector<int32_t> topk;
      SwapRandom random{static_cast<uint64_t>(step * 4 + rank)};
      for (size_t t = 0; t < kTokens; ++t) topk.push_back(static_cast<int32_t>(random.below(4) * random.below(4) + 4));
      MOECCL_ASSERT_COMM_OK(routing == nullptr ? moecclRoutingCreate(&routing, moe, topk.data(), nullptr, kTokens)
                                               : moecclRoutingUpdate(routing, topk.data(), nullptr, kTokens),
                            comm);
      MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
      int32_t n = 0;
      MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, &n), comm);
      swaps += n;
    }
    EXPECT_GE(swaps, 1);
    moecclExpertSwapInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapGetInfo(swap, 0, &info), comm);
    for (int32_t e = 0; e < 16; ++e) EXPECT_EQ(info.slot_of[e] < 8, e < 8) << "expert " << e;
    for (size_t i = 0; i < shards.size(); ++i)
      ASSERT_EQ(shards[i], info.expert_in[rank * 4 + static_cast<int>(i / bytes)]);
    EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
    EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

TEST(Swap, ACheckpointsPlacesComeBack) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 4;
    config.type = moecclFloat32;
    config.top_k = 1;
    config.n_experts = 4;
    config.max_tokens = 4;
    config.layout = moecclLayoutExpertMajor;
    moecclMoe_t moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    const int32_t topk[] = {0, 1, 2, 3};
    moecclRouting_t routing = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, topk, nullptr, 4), comm);
    moecclExpertSwap_t swap = nullptr;
    const moecclExpertSwapConfig_t options = eager();
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &options), comm);
    const int32_t slot_of[] = {3, 1, 0, 2};
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe, nullptr, 0, slot_of, nullptr), comm);
    float in[4] = {0, 1, 2, 3}, rows[8];
    EXPECT_EQ(moecclDispatch(routing, in, rows, nullptr), moecclInvalidUsage) << "a routing from before the map";
    MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, topk, nullptr, 4), comm);
    MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in, rows, nullptr), comm);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
    EXPECT_EQ(info.local_experts[0], rank == 0 ? 2 : 3);
    EXPECT_EQ(info.local_experts[1], rank == 0 ? 1 : 0);
    for (size_t r = 0; r < info.n_rows; ++r) EXPECT_EQ(rows[r], static_cast<float>(info.local_experts[r / 2]));
    EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
    EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
  });
}

TEST(Swap, MisuseHasASentence) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const auto says = [&](moecclResult_t got, moecclResult_t want, const char* word) {
      EXPECT_EQ(got, want) << word;
      EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
    };
    moecclExpertSwap_t swap = nullptr;
    moecclExpertSwapConfig_t config = MOECCL_EXPERT_SWAP_CONFIG_INIT;
    config.gamma = 0.5;
    says(moecclExpertSwapCreate(&swap, comm, &config), moecclInvalidArgument, "config.gamma is 0.5");
    config.gamma = 0;
    config.interval = rank + 1;
    says(moecclExpertSwapCreate(&swap, comm, &config), moecclMismatch, "interval");
    EXPECT_EQ(swap, nullptr);
    config.interval = 1;
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);

    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = 4;
    layer.type = moecclFloat32;
    layer.top_k = 1;
    layer.n_experts = 1;
    layer.max_tokens = 4;
    moecclMoe_t one = nullptr, moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&one, comm, &layer), comm);
    says(moecclExpertSwapAttach(swap, one, nullptr, 0, nullptr, nullptr), moecclUnsupported, "1 experts on 2 ranks");
    layer.n_experts = 4;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &layer), comm);
    const auto attach = [&](moecclSwapTensor_t t, const int32_t* slot_of) {
      return moecclExpertSwapAttach(swap, moe, &t, 1, slot_of, nullptr);
    };
    int64_t memory[4] = {};
    says(attach({nullptr, 8, 0, 0}, nullptr), moecclInvalidArgument, "tensors[0].slots is NULL");
    says(attach({memory, 8, 2, 0}, nullptr), moecclInvalidArgument, "tensors[0].at_finish is 2");
    says(attach({memory, 8, rank, 0}, nullptr), moecclMismatch, "at_finish");
    const int32_t twice[] = {0, 0, 1, 2}, straight[] = {0, 1, 2, 3}, turned[] = {1, 0, 2, 3};
    says(attach({memory, 8, 0, 0}, twice), moecclInvalidArgument, "slot_of[1] is 0");
    says(attach({memory, 8, 0, 0}, rank == 0 ? straight : turned), moecclMismatch, "slot_of");
    // An error of one rank makes all ranks fail.
    says(attach({memory, 8, rank == 0 ? 0 : 7, 0}, nullptr), rank == 0 ? moecclRemoteError : moecclInvalidArgument,
         rank == 0 ? "rank 1 fails in moecclExpertSwapAttach" : "at_finish is 7");
    says(attach({memory, 8, 0, 77}, nullptr), moecclInvalidArgument, "tensors[0].reserved is 77");
    moecclRouting_t earlier = nullptr;
    const int32_t first[] = {0};
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&earlier, moe, first, nullptr, 1), comm);
    MOECCL_ASSERT_COMM_OK(attach({memory, 8, 0, 0}, nullptr), comm);
    says(attach({memory, 8, 0, 0}, nullptr), moecclInvalidUsage, "attached");
    const float token = 0;
    float arrived[2] = {};
    says(moecclDispatch(earlier, &token, arrived, nullptr), moecclInvalidUsage, "was attached to expert swap after");
    MOECCL_EXPECT_OK(moecclRoutingDestroy(earlier));
    says(moecclExpertSwapGetInfo(swap, 1, nullptr), moecclInvalidArgument, "info is NULL");
    moecclExpertSwapInfo_t info{};
    info.size = sizeof(info);
    says(moecclExpertSwapGetInfo(swap, 1, &info), moecclInvalidArgument, "layer is 1");
    says(moecclExpertSwapTest(swap, nullptr), moecclInvalidArgument, "done is NULL");
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
    says(moecclExpertSwapBegin(swap), moecclInvalidUsage, "moecclExpertSwapFinish first");
    says(moecclExpertSwapAttach(swap, one, nullptr, 0, nullptr, nullptr), moecclInvalidUsage,
         "moecclExpertSwapFinish first");
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, nullptr), comm);
    // For a number that is not one of the layer's experts, the sentence is the layer's own.
    moecclRouting_t routing = nullptr;
    const int32_t wrong[] = {4};
    says(moecclRoutingCreate(&routing, moe, wrong, nullptr, 1), moecclInvalidArgument, "topk_index[0][0] is 4");
    EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
    says(moecclExpertSwapBegin(swap), moecclInvalidArgument, "swap is not a live");
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);
    says(attach({memory, 8, 0, 0}, nullptr), moecclInvalidUsage, "attached to an object of expert swap before");
    EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(one), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// Ranks 0 and 1 hold shards of 24 bytes, ranks 2 and 3 of 8, so a pair is of ranks 0 and 1 or of ranks 2 and 3. The
// first swap is between ranks 0 and 1 and slow, because rank 1 comes late to Finish. The second one is between the
// others.
TEST(Swap, TheLastSwapSetsThePriceOfTheNext) {
  static constexpr int kSlowMs = 400;
  run_ranks(4, [](int rank, moecclComm_t comm) {
    const moecclMoeConfig_t config = sixteen_experts();
    moecclMoe_t moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    moecclExpertSwap_t swap = nullptr;
    moecclExpertSwapConfig_t options = eager();
    options.max_tokens = kTokens;  // those of one step
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &options), comm);
    const size_t bytes = rank < 2 ? 24 : 8;
    std::vector<unsigned char> shards(4 * bytes);
    const moecclSwapTensor_t tensor{shards.data(), bytes, 1, 0};
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe, &tensor, 1, nullptr, nullptr), comm);
    moecclRouting_t routing = nullptr;
    // All tokens choose two experts of one rank: of rank 0 first, then of rank 2, then of none that another place
    // helps.
    constexpr int32_t kFirst[] = {0, 8, 0};
    for (int step = 0; step < 3; ++step) {
      std::vector<int32_t> topk(kTokens);
      for (size_t t = 0; t < kTokens; ++t)
        topk[t] = step < 2 ? kFirst[step] + static_cast<int32_t>(t % 2) : static_cast<int32_t>(t % 16);
      const moecclResult_t routed = routing == nullptr
                                        ? moecclRoutingCreate(&routing, moe, topk.data(), nullptr, kTokens)
                                        : moecclRoutingUpdate(routing, topk.data(), nullptr, kTokens);
      MOECCL_ASSERT_COMM_OK(routed, comm);
      MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
      int32_t round_is_over = step == 0 && rank == 1 ? 0 : 1;
      while (round_is_over == 0) MOECCL_ASSERT_COMM_OK(moecclExpertSwapTest(swap, &round_is_over), comm);
      if (step == 0 && rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(kSlowMs));
      MOECCL_ASSERT_COMM_OK(moecclExpertSwapFinish(swap, nullptr), comm);
      moecclExpertSwapInfo_t info{};
      info.size = sizeof(info);
      MOECCL_ASSERT_COMM_OK(moecclExpertSwapGetInfo(swap, 0, &info), comm);
      if (step < 2) {
        ASSERT_EQ(info.n_swaps, static_cast<uint64_t>(step) + 1);
        for (const int32_t expert : info.pair) EXPECT_EQ(expert / 8, step) << "expert " << expert;
      }
      if (step == 1) {
        EXPECT_GE(info.swap_us, kSlowMs * 800.0) << "the first swap was slow";
      }
      if (step == 2) {
        EXPECT_LT(info.swap_us, kSlowMs * 500.0) << "the second swap was not";
        EXPECT_GT(info.swap_us, 0);
      }
    }
    MOECCL_EXPECT_COMM_OK(moecclRoutingDestroy(routing), comm);
    EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

}  // namespace
}  // namespace moeccl::testing
