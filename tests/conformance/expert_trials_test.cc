// SPDX-License-Identifier: Apache-2.0
// Plans of replicated experts and of expert domains that are tried in the program's own operations: a plan that is
// faster than its price says is found, results are right at every step, and all ranks end with the same plan.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4, kExperts = 4;
constexpr size_t kCount = 16 << 10;  // floats of an expert: 64 KiB
constexpr int kEnough = 110;         // operations that end a trial of two or three plans
constexpr size_t kShard = kCount / kRanks;

template <class Call>
std::string text_of(Call&& call) {
  size_t needed = 0;
  EXPECT_EQ(call(nullptr, 0, &needed), moecclSuccess);
  std::string text(needed, '\0');
  EXPECT_EQ(call(text.data(), needed, nullptr), moecclSuccess);
  return text;
}

float value(int expert, size_t i, int step) {
  return static_cast<float>(expert * 1000 + step % 50) + static_cast<float>(i % 509);
}

// Every rank holds every expert, in an order that can change with every step.
struct Everywhere {
  std::vector<int32_t> slots;
  moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
  explicit Everywhere(int turn = 0) {
    for (int r = 0; r < kRanks; ++r)
      for (int s = 0; s < kExperts; ++s) slots.push_back((s + turn * r) % kExperts);
    placement.n_experts = kExperts;
    placement.slots_per_rank = kExperts;
    placement.slot_expert = slots.data();
  }
  int expert(int rank, int slot) const { return slots[static_cast<size_t>(rank * kExperts + slot)]; }
};

std::string page_of(moecclComm_t comm, moecclOp_t op, const moecclPlacement_t& placement) {
  return text_of([&](char* text, size_t bytes, size_t* needed) {
    return moecclExpertExplain(comm, op, kCount, moecclFloat32, &placement, text, bytes, needed);
  });
}

// The weights of all experts; step after step each rank checks all of its slots.
class Weights {
 public:
  explicit Weights(int rank) : rank_(rank), shards_(size_t{kExperts} * kShard), slots_(size_t{kExperts} * kCount) {}

  void place(moecclComm_t comm, const Everywhere& e, int step, moecclStream_t stream = nullptr) {
    for (int x = 0; x < kExperts; ++x)
      for (size_t i = 0; i < kShard; ++i)
        shards_[static_cast<size_t>(x) * kShard + i] = value(x, static_cast<size_t>(rank_) * kShard + i, step);
    MOECCL_ASSERT_COMM_OK(
        moecclPlaceWeights(shards_.data(), slots_.data(), kCount, moecclFloat32, &e.placement, comm, stream), comm);
  }
  void check(const Everywhere& e, int step) const {
    for (int s = 0; s < kExperts; ++s)
      for (size_t i = 0; i < kCount; i += 13)
        ASSERT_EQ(slots_[static_cast<size_t>(s) * kCount + i], value(e.expert(rank_, s), i, step))
            << "slot " << s << " element " << i << " at step " << step;
  }

 private:
  int rank_;
  std::vector<float> shards_, slots_;
};

// The link between the nodes is slow, and the profile says that it is the faster one. "direct" sends every shard over
// it once for each rank of the other node, "nodes" once.
RankOptions misled(RankMode mode) {
  RankOptions options{.mode = mode};
  options.config.topology = "node:2(bw=0.01GB/s,lat=20us) gpu:2(bw=10GB/s,lat=1us)";
  options.config.pace = 1;
  return options;
}
std::string write_lie() {
  const std::string path = "/tmp/moeccl_expert_trials_" + std::to_string(getpid()) + ".json";
  std::ofstream(path) << R"({"moeccl_profile": 1, "levels": [{"name": "node", "alpha_ns": 1000, "bytes_per_ns": 40},
    {"name": "gpu", "alpha_ns": 1000, "bytes_per_ns": 4}]})";
  return path;
}

class ExpertTrials : public ::testing::TestWithParam<RankMode> {};

TEST_P(ExpertTrials, FindAPlanThatIsFasterThanItsPrice) {
  for (const bool tries : {true, false}) {
    ASSERT_EQ(setenv("MOECCL_TRIALS", tries ? "1" : "0", 1), 0);
    const std::string lie = write_lie();
    run_ranks(
        kRanks,
        [&](int rank, moecclComm_t comm) {
          MOECCL_ASSERT_COMM_OK(moecclProfileLoad(comm, lie.c_str()), comm);
          Weights weights(rank);
          const Everywhere e;
          const std::string before = page_of(comm, moecclOpPlaceWeights, e.placement);
          EXPECT_EQ(before.find("PlaceWeights with direct, for this placement"), 0U) << before;
          EXPECT_EQ(before.find("a trial of direct and nodes has not ended") != std::string::npos, tries) << before;
          for (int step = 0; step < (tries ? kEnough : 10); ++step) {
            weights.place(comm, e, step);
            weights.check(e, step);
            if (::testing::Test::HasFatalFailure()) return;
          }
          const std::string after = page_of(comm, moecclOpPlaceWeights, e.placement);
          EXPECT_EQ(after.find(tries ? "PlaceWeights with nodes, tried: direct " : "PlaceWeights with direct, for"), 0U)
              << after;
          // What is forced is not tried.
          MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpPlaceWeights, "direct"), comm);
          weights.place(comm, e, 1);
          weights.check(e, 1);
          const std::string forced = page_of(comm, moecclOpPlaceWeights, e.placement);
          EXPECT_EQ(forced.find("PlaceWeights with direct, forced"), 0U) << forced;
        },
        misled(GetParam()));
    std::remove(lie.c_str());
  }
  unsetenv("MOECCL_TRIALS");
}

// Ranks prepare their calls at different times: with a stream, in a group, or alone. Placements change all the time.
TEST_P(ExpertTrials, RanksMayCallDifferently) {
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        Weights first(rank), second(rank);
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclStreamCreate(&stream), comm);
        for (int step = 0; step < kEnough; ++step) {
          const Everywhere e(step % 3), f(step % 2);
          const bool async = rank == 0 || (rank == 1 && step % 5 < 2), group = rank == 2 && step % 4 == 1;
          if (group) {
            MOECCL_ASSERT_COMM_OK(moecclGroupStart(), comm);
          }
          first.place(comm, e, step, async ? stream : nullptr);
          second.place(comm, f, step + 7, async ? stream : nullptr);
          if (group) {
            MOECCL_ASSERT_COMM_OK(moecclGroupEnd(), comm);
          }
          if (async) {
            MOECCL_ASSERT_COMM_OK(moecclStreamSynchronize(stream), comm);
          }
          first.check(e, step);
          second.check(f, step + 7);
          float one = 1, sum = 0;
          if (step % 7 == 3) {
            MOECCL_ASSERT_COMM_OK(moecclAllReduce(&one, &sum, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
          }
          if (::testing::Test::HasFatalFailure()) return;
        }
        const Everywhere e;
        // Prices depend on the machine's cores, so there may be nothing to try.
        const std::string page = page_of(comm, moecclOpPlaceWeights, e.placement);
        EXPECT_EQ(page.find("has not ended"), std::string::npos) << page;
        MOECCL_ASSERT_COMM_OK(moecclStreamDestroy(stream), comm);
      },
      [] {
        RankOptions options{.mode = GetParam()};
        options.config.topology = "node:2 gpu:2";
        return options;
      }());
}

// Both placements are of one class, for which their first call decides. Their prices choose another plan, or try
// others, so a rank that had decided by a call that it alone made would soon run another plan than the others.
TEST_P(ExpertTrials, AWrongCallDecidesNothing) {
  RankOptions options{.mode = GetParam()};
  options.config.topology = "node:2(bw=0.01GB/s,lat=20us) gpu:2(bw=10GB/s,lat=1us)";
  run_ranks(
      kRanks,
      [](int rank, moecclComm_t comm) {
        static constexpr int32_t kInsideNodes[] = {0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7};
        static constexpr int32_t kAcross[] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
        moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
        placement.n_experts = 8, placement.slots_per_rank = 4, placement.slot_expert = kInsideNodes;
        const std::string inside = page_of(comm, moecclOpExpertAllReduce, placement);
        EXPECT_NE(inside.find("\nmoecclAvg: "), std::string::npos) << inside;
        std::vector<float> in(4 * kCount, 1.0f), out(4 * kCount);
        const auto sum = [&](float* recv) {
          return moecclExpertAllReduce(in.data(), recv, kCount, moecclFloat32, moecclSum, &placement, comm, nullptr);
        };
        if (rank == 0) {
          EXPECT_EQ(sum(in.data() + 1), moecclInvalidArgument);
        }
        placement.slot_expert = kAcross;
        const std::string across = page_of(comm, moecclOpExpertAllReduce, placement);
        EXPECT_NE(inside.substr(0, inside.find('\n')), across.substr(0, across.find('\n'))) << "nothing to differ in";
        for (int step = 0; step < 20; ++step) {
          MOECCL_ASSERT_COMM_OK(sum(out.data()), comm);
          for (size_t i = 0; i < out.size(); i += 13) ASSERT_EQ(out[i], 2.0f) << "element " << i << " at " << step;
        }
      },
      options);
}

// Sums of three terms, and means, keep the plan that prices choose. Two terms have one sum, so their plans are tried.
TEST_P(ExpertTrials, SumsKeepTheirBits) {
  for (const int n_replicas : {2, 3}) {
    for (const int deterministic : {0, 1}) {
      RankOptions options{.mode = GetParam()};
      options.config.topology = "node:2 gpu:2";
      options.config.deterministic = deterministic;
      run_ranks(
          kRanks,
          [&](int rank, moecclComm_t comm) {
            // Expert e is on the ranks e, e + 1, ... (modulo).
            std::vector<int32_t> slots;
            for (int r = 0; r < kRanks; ++r)
              for (int s = 0; s < n_replicas; ++s) slots.push_back((r + kRanks - s) % kRanks);
            moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
            placement.n_experts = kRanks;
            placement.slots_per_rank = n_replicas;
            placement.slot_expert = slots.data();
            std::vector<float> in(static_cast<size_t>(n_replicas) * kCount), out(in.size()), mean(in.size()),
                shards(kRanks * kShard);
            for (size_t i = 0; i < in.size(); ++i)
              in[i] = 1.0f / static_cast<float>(1 + (i * 31 + static_cast<size_t>(rank) * 17) % 8191);
            std::vector<float> first, first_mean, first_shards;
            for (int step = 0; step < kEnough; ++step) {
              MOECCL_ASSERT_COMM_OK(moecclExpertAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum,
                                                          &placement, comm, nullptr),
                                    comm);
              MOECCL_ASSERT_COMM_OK(moecclExpertAllReduce(in.data(), mean.data(), kCount, moecclFloat32, moecclAvg,
                                                          &placement, comm, nullptr),
                                    comm);
              MOECCL_ASSERT_COMM_OK(moecclReduceGradients(in.data(), shards.data(), kCount, moecclFloat32, moecclSum,
                                                          &placement, comm, nullptr),
                                    comm);
              if (step == 0) first = out, first_mean = mean, first_shards = shards;
              ASSERT_EQ(out, first) << "at " << step;
              ASSERT_EQ(mean, first_mean) << "at " << step;
              ASSERT_EQ(shards, first_shards) << "at " << step;
            }
            for (const moecclOp_t op : {moecclOpExpertAllReduce, moecclOpReduceGradients}) {
              const std::string page = page_of(comm, op, placement);
              EXPECT_EQ(page.find("has not ended"), std::string::npos) << page;
              if (n_replicas == 3 || deterministic == 1) {
                EXPECT_EQ(page.find("tried: "), std::string::npos) << page;
              }
            }
          },
          options);
    }
  }
}

// Gathers and returns of expert domains, forward and back, as in a training step.
TEST_P(ExpertTrials, DomainsGatherAndReturnRightAtEveryStep) {
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        static constexpr int32_t kDomain[] = {2, 2};
        moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
        config.n_experts = kExperts, config.n_levels = 2, config.domain = kDomain;
        moecclHybrid_t hybrid = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
        std::vector<float> own(kCount), held(kExperts * kCount), back(kCount), first;
        for (int step = 0; step < kEnough; ++step) {
          for (size_t i = 0; i < kCount; ++i) own[i] = value(rank, i, step);
          MOECCL_ASSERT_COMM_OK(moecclHybridGather(hybrid, own.data(), held.data(), kCount * sizeof(float), nullptr),
                                comm);
          for (int x = 0; x < kExperts; ++x)
            for (size_t i = 0; i < kCount; i += 7)
              ASSERT_EQ(held[static_cast<size_t>(x) * kCount + i], value(x, i, step))
                  << "expert " << x << " at " << step;
          for (size_t i = 0; i < held.size(); ++i) held[i] = 1.0f / static_cast<float>(1 + (i + i / kCount) % 8191);
          for (float& h : held) h *= static_cast<float>(rank + 1);
          MOECCL_ASSERT_COMM_OK(moecclHybridReduce(hybrid, held.data(), back.data(), kCount, moecclFloat32, nullptr),
                                comm);
          if (step == 0) first = back;
          ASSERT_EQ(back, first) << "at " << step;
        }
        const std::string page = text_of([&](char* text, size_t bytes, size_t* needed) {
          return moecclHybridExplain(hybrid, kCount * sizeof(float), text, bytes, needed);
        });
        EXPECT_EQ(page.find("has not ended"), std::string::npos) << page;
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
      },
      [] {
        RankOptions options{.mode = GetParam()};
        options.config.topology = "node:2 gpu:2";
        return options;
      }());
}

INSTANTIATE_TEST_SUITE_P(, ExpertTrials, ::testing::Values(RankMode::kThreads, RankMode::kProcesses, RankMode::kMixed),
                         [](const auto& info) { return std::string(mode_name(info.param)); });

}  // namespace
}  // namespace moeccl::testing
