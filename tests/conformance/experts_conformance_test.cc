// SPDX-License-Identifier: Apache-2.0
// Replicated experts through the C interface, compared with sums that are formed one by one: random placements that
// change at every call, several replicas on a rank, ranks without slots, odd sizes, 1 to 16 ranks.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

// The placement of one step. Every rank draws the same one.
struct Drawn {
  Drawn(std::mt19937& random, int n_ranks, int n_experts, int most_slots, bool uniform) {
    int total = 0;
    for (int r = 0; r < n_ranks; ++r) {
      counts.push_back(uniform ? most_slots : static_cast<int32_t>(random() % static_cast<uint32_t>(most_slots + 1)));
      first.push_back(total);
      total += counts.back();
    }
    for (; total < n_experts; ++total) ++counts.back();
    for (int s = 0; s < total; ++s)
      experts.push_back(s < n_experts ? s : static_cast<int32_t>(random() % static_cast<uint32_t>(n_experts + 1)) - 1);
    std::shuffle(experts.begin(), experts.end(), random);
    given.n_experts = n_experts;
    given.slot_counts = counts.data();
    given.slot_expert = experts.data();
  }
  int slots(int rank) const { return counts[static_cast<size_t>(rank)]; }
  int expert(int rank, int slot) const { return experts[static_cast<size_t>(first[static_cast<size_t>(rank)] + slot)]; }
  std::vector<int32_t> counts, experts;
  std::vector<int> first;
  moecclPlacement_t given = MOECCL_PLACEMENT_INIT;
};

// Small integers, so that every sum of them is exact in every type and order.
float value(int step, int rank, int slot, size_t i) {
  return static_cast<float>((step * 7 + rank * 5 + slot * 3 + static_cast<int>(i % 97)) % 13 - 6);
}

struct Shape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  int n_experts, most_slots, steps;
  size_t count;
  bool pace = false, has_nodes = false;
  size_t staging_bytes = 0;  // of the communicator; 0: the default
};
std::ostream& operator<<(std::ostream& out, const Shape& s) { return out << s.name; }

const Shape kShapes[] = {
    {"OneRank", 1, RankMode::kThreads, "", 5, 9, 10, 33},
    {"TwoRanks", 2, RankMode::kProcesses, "", 4, 6, 20, 1001},
    {"FiveRanks", 5, RankMode::kMixed, "", 7, 4, 20, 257},
    {"NothingToSum", 4, RankMode::kThreads, "", 3, 2, 5, 0},
    {"OneElement", 7, RankMode::kProcesses, "", 6, 3, 20, 1},
    {"TwoNodes", 8, RankMode::kProcesses, "node:2 gpu:4", 10, 4, 20, 511, false, true},
    {"Uneven7And8", 15, RankMode::kThreads, "node:2 gpu:7+8", 12, 3, 10, 129, false, true},
    {"ManyChunks", 4, RankMode::kProcesses, "node:2 gpu:2", 6, 4, 3, 300'001, false, true},
    // As many chunks of fewer elements, for tools/rdma-vm.
    {"ManySmallChunks", 4, RankMode::kProcesses, "node:2 gpu:2", 6, 4, 3, 20'001, false, true, 1 << 20},
    {"PutsOnly", 6, RankMode::kThreads, "node:2(bw=8GB/s,lat=10us) gpu:3", 7, 4, 10, 5001, true, true},
};

class ExpertsConformance : public ::testing::TestWithParam<Shape> {};

void check_all_reduce(const Shape& shape, const Drawn& p, int step, int rank, moecclComm_t comm, bool in_place,
                      bool average) {
  const size_t elements = static_cast<size_t>(p.slots(rank)) * shape.count;
  std::vector<float> send(elements), recv(elements, 77.0f);
  for (int s = 0; s < p.slots(rank); ++s)
    for (size_t i = 0; i < shape.count; ++i) send[static_cast<size_t>(s) * shape.count + i] = value(step, rank, s, i);
  if (in_place) recv = send;
  ASSERT_EQ(moecclExpertAllReduce(in_place ? recv.data() : send.data(), recv.data(), shape.count, moecclFloat32,
                                  average ? moecclAvg : moecclSum, &p.given, comm, nullptr),
            moecclSuccess)
      << moecclGetLastError(comm);
  std::vector<float> sums(static_cast<size_t>(p.given.n_experts) * shape.count);
  std::vector<int> replicas(static_cast<size_t>(p.given.n_experts));
  for (int r = 0; r < shape.n; ++r)
    for (int s = 0; s < p.slots(r); ++s) {
      const int e = p.expert(r, s);
      if (e < 0) continue;
      ++replicas[static_cast<size_t>(e)];
      for (size_t i = 0; i < shape.count; ++i) sums[static_cast<size_t>(e) * shape.count + i] += value(step, r, s, i);
    }
  for (int s = 0; s < p.slots(rank); ++s) {
    const int e = p.expert(rank, s);
    for (size_t i = 0; i < shape.count; ++i) {
      const size_t at = static_cast<size_t>(s) * shape.count + i;
      float wanted = in_place ? send[at] : 77.0f;
      if (e >= 0) wanted = sums[static_cast<size_t>(e) * shape.count + i];
      if (e >= 0 && average && replicas[static_cast<size_t>(e)] > 1)
        wanted /= static_cast<float>(replicas[static_cast<size_t>(e)]);
      ASSERT_EQ(recv[at], wanted) << "step " << step << " slot " << s << " expert " << e << " element " << i;
    }
  }
}

// Checks the shards of the sums, which AllReduce and collection together produce.
void check_reduce(const Shape& shape, const Drawn& p, int step, int rank, moecclComm_t comm, bool average) {
  std::vector<float> send(static_cast<size_t>(p.slots(rank)) * shape.count);
  for (int s = 0; s < p.slots(rank); ++s)
    for (size_t i = 0; i < shape.count; ++i) send[static_cast<size_t>(s) * shape.count + i] = value(step, rank, s, i);
  const size_t shard = moecclExpertShard(shape.count, shape.n);
  const auto n_experts = static_cast<size_t>(p.given.n_experts);
  std::vector<float> shards(n_experts * shard, 77.0f);
  ASSERT_EQ(moecclReduceGradients(send.data(), shards.data(), shape.count, moecclFloat32,
                                  average ? moecclAvg : moecclSum, &p.given, comm, nullptr),
            moecclSuccess)
      << moecclGetLastError(comm);
  std::vector<float> sums(n_experts * shard);
  std::vector<int> replicas(n_experts);
  const size_t first = static_cast<size_t>(rank) * shard, last = std::min(shape.count, first + shard);
  for (int r = 0; r < shape.n; ++r)
    for (int s = 0; s < p.slots(r); ++s) {
      if (p.expert(r, s) < 0) continue;
      const auto e = static_cast<size_t>(p.expert(r, s));
      ++replicas[e];
      for (size_t i = first; i < last; ++i) sums[e * shard + i - first] += value(step, r, s, i);
    }
  for (size_t e = 0; e < n_experts; ++e)
    for (size_t i = 0; i < shard; ++i) {
      float wanted = first + i < last ? sums[e * shard + i] : 77.0f;
      if (first + i < last && average && replicas[e] > 1) wanted /= static_cast<float>(replicas[e]);
      ASSERT_EQ(shards[e * shard + i], wanted) << "step " << step << " expert " << e << " element " << i;
    }
}

void check_shards(const Shape& shape, const Drawn& p, const Drawn& next, int step, int rank, moecclComm_t comm) {
  const auto weight = [&](int e, size_t i) { return static_cast<int16_t>(step * 31 + e * 1009 + static_cast<int>(i)); };
  const size_t shard = moecclExpertShard(shape.count, shape.n);
  std::vector<int16_t> slots(static_cast<size_t>(p.slots(rank)) * shape.count);
  for (int s = 0; s < p.slots(rank); ++s)
    for (size_t i = 0; i < shape.count; ++i)
      slots[static_cast<size_t>(s) * shape.count + i] = weight(p.expert(rank, s), i);
  std::vector<int16_t> shards(static_cast<size_t>(p.given.n_experts) * shard, -1);
  ASSERT_EQ(moecclCollectGradients(slots.data(), shards.data(), shape.count, moecclBfloat16, &p.given, comm, nullptr),
            moecclSuccess)
      << moecclGetLastError(comm);
  for (int e = 0; e < p.given.n_experts; ++e)
    for (size_t i = 0; i < shard; ++i) {
      const size_t at = static_cast<size_t>(rank) * shard + i;
      ASSERT_EQ(shards[static_cast<size_t>(e) * shard + i], at < shape.count ? weight(e, at) : int16_t{-1})
          << "shard of expert " << e << " element " << i;
    }
  std::vector<int16_t> placed(static_cast<size_t>(next.slots(rank)) * shape.count, -1);
  ASSERT_EQ(moecclPlaceWeights(shards.data(), placed.data(), shape.count, moecclBfloat16, &next.given, comm, nullptr),
            moecclSuccess)
      << moecclGetLastError(comm);
  for (int s = 0; s < next.slots(rank); ++s)
    for (size_t i = 0; i < shape.count; ++i)
      ASSERT_EQ(placed[static_cast<size_t>(s) * shape.count + i],
                next.expert(rank, s) < 0 ? int16_t{-1} : weight(next.expert(rank, s), i))
          << "slot " << s << " element " << i;
}

TEST_P(ExpertsConformance, EveryStepHasItsOwnPlacement) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode};
  options.config.topology = shape.topology[0] == 0 ? nullptr : shape.topology;
  options.config.pace = shape.pace;
  options.config.staging_bytes = shape.staging_bytes;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        std::mt19937 random(static_cast<uint32_t>(test_seed()));
        for (int step = 0; step < shape.steps; ++step) {
          set_note("step " + std::to_string(step));
          const Drawn p(random, shape.n, shape.n_experts, shape.most_slots, step % 3 == 0);
          const Drawn next(random, shape.n, shape.n_experts, shape.most_slots, false);
          check_all_reduce(shape, p, step, rank, comm, step % 2 == 0, step % 4 < 2);
          if (::testing::Test::HasFatalFailure()) return;
          for (const char* name : {static_cast<const char*>(nullptr), "direct", "nodes"}) {
            if (name != nullptr && name[0] == 'n' && !shape.has_nodes) continue;
            MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpReduceGradients, name), comm);
            check_reduce(shape, p, step, rank, comm, step % 4 < 2);
            if (::testing::Test::HasFatalFailure()) return;
          }
          check_shards(shape, p, next, step, rank, comm);
          if (::testing::Test::HasFatalFailure()) return;
        }
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExpertsConformance, ::testing::ValuesIn(kShapes),
                         [](const auto& info) { return std::string(info.param.name); });

// 16 experts in 64 slots of 16 ranks, 1000 placements (issue: "sums right every time, no setup calls").
TEST(Experts, AThousandPlacements) {
  const Shape shape{"", 16, RankMode::kThreads, "", 16, 4, 0, 64};
  run_ranks(16, [&](int rank, moecclComm_t comm) {
    std::mt19937 random(static_cast<uint32_t>(test_seed()));
    size_t before = 0, after = 0;
    MOECCL_ASSERT_COMM_OK(moecclCommMemoryUsage(comm, &before), comm);
    for (int step = 0; step < scaled(1000); ++step) {
      const Drawn p(random, 16, 16, 4, true);
      check_all_reduce(shape, p, step, rank, comm, true, false);
      if (::testing::Test::HasFatalFailure()) return;
    }
    MOECCL_ASSERT_COMM_OK(moecclCommMemoryUsage(comm, &after), comm);
    EXPECT_EQ(before, after) << "the communicator grew";
  });
}

// Three layers in one call give the same as one call for each, with different placements and buffers anywhere.
TEST(Experts, SeveralLayersInOneCall) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = "node:2 gpu:2";
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        constexpr size_t kLayers = 3, kCount = 1003;
        std::mt19937 random(static_cast<uint32_t>(test_seed()));
        const size_t shard = moecclExpertShard(kCount, 4);
        for (int step = 0; step < 6; ++step) {
          set_note("step " + std::to_string(step));
          std::vector<Drawn> placements;
          for (size_t l = 0; l < kLayers; ++l) placements.emplace_back(random, 4, 3 + static_cast<int>(l), 3, l == 1);
          std::vector<std::vector<float>> slots, shards, apart, placed, placed_apart;
          for (size_t l = 0; l < kLayers; ++l) {
            const Drawn& p = placements[l];
            slots.emplace_back(static_cast<size_t>(p.slots(rank)) * kCount);
            for (size_t i = 0; i < slots[l].size(); ++i) slots[l][i] = value(step + static_cast<int>(l), rank, 0, i);
            shards.emplace_back(static_cast<size_t>(p.given.n_experts) * shard, 7.0f);
            placed.emplace_back(slots[l].size(), 8.0f);
          }
          apart = shards;
          placed_apart = placed;
          std::vector<moecclExpertLayer_t> layers;
          for (size_t l = 0; l < kLayers; ++l)
            layers.push_back({&placements[l].given, slots[l].data(), shards[l].data()});
          const auto at_once = [&](moecclOp_t what) {
            MOECCL_ASSERT_COMM_OK(
                moecclExpertLayers(what, layers.data(), kLayers, kCount, moecclFloat32, moecclAvg, comm, nullptr),
                comm);
          };
          at_once(moecclOpReduceGradients);
          for (size_t l = 0; l < kLayers; ++l)
            MOECCL_ASSERT_COMM_OK(moecclReduceGradients(slots[l].data(), apart[l].data(), kCount, moecclFloat32,
                                                        moecclAvg, &placements[l].given, comm, nullptr),
                                  comm);
          EXPECT_EQ(shards, apart);
          for (size_t l = 0; l < kLayers; ++l) layers[l].slots = placed[l].data();
          at_once(moecclOpPlaceWeights);
          for (size_t l = 0; l < kLayers; ++l)
            MOECCL_ASSERT_COMM_OK(moecclPlaceWeights(shards[l].data(), placed_apart[l].data(), kCount, moecclFloat32,
                                                     &placements[l].given, comm, nullptr),
                                  comm);
          EXPECT_EQ(placed, placed_apart);
          // Replicas are equal now. The space after the last ranks' shorter shards must stay unchanged.
          for (size_t l = 0; l < kLayers; ++l) std::fill(shards[l].begin(), shards[l].end(), 7.0f);
          at_once(moecclOpCollectGradients);
          EXPECT_EQ(shards, apart);
        }
      },
      options);
}

TEST(Experts, LayersThatCannotBeOneCallAreNamed) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const int32_t experts[2] = {0, 1};
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = 2;
    p.slots_per_rank = 2;
    p.slot_expert = experts;
    float v[64] = {};
    moecclExpertLayer_t layers[2] = {{&p, v, v + 16}, {&p, v + 32, v + 48}};
    const auto fails = [&](moecclOp_t what, size_t n, const char* word) {
      EXPECT_EQ(moecclExpertLayers(what, layers, n, 4, moecclFloat32, moecclSum, comm, nullptr), moecclInvalidArgument);
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(word), std::string::npos) << moecclGetLastError(comm);
    };
    MOECCL_EXPECT_COMM_OK(
        moecclExpertLayers(moecclOpReduceGradients, layers, 2, 4, moecclFloat32, moecclSum, comm, nullptr), comm);
    fails(moecclOpExpertAllReduce, 2, "what is 12");
    fails(moecclOpPlaceWeights, 0, "n_layers");
    layers[1].shards = v + 18;
    fails(moecclOpReduceGradients, 2, "layers[0].shards and layers[1].shards overlap");
    layers[1].shards = reinterpret_cast<char*>(v + 48) + 2;
    fails(moecclOpReduceGradients, 2, "130 bytes apart");
    layers[1].shards = nullptr;
    fails(moecclOpReduceGradients, 2, "layers[1].shards is NULL");
    layers[1] = {nullptr, v + 32, v + 48};
    fails(moecclOpReduceGradients, 2, "layers[1]");
    EXPECT_EQ(moecclExpertLayers(moecclOpReduceGradients, layers, 1, 4, moecclFloat32, moecclMax, comm, nullptr),
              moecclInvalidArgument);
  });
}

// An expert is on more ranks, and in more slots, than fit in 64 bits.
TEST(Experts, OneExpertOnEightyRanks) {
  constexpr int kRanks = 80;
  RankOptions options{.mode = RankMode::kThreads};
  options.config.topology = "node:10 gpu:8";
  const Shape shape{"", kRanks, RankMode::kThreads, "node:10 gpu:8", 3, 2, 0, 170};
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        std::mt19937 random(static_cast<uint32_t>(test_seed()));
        Drawn p(random, kRanks, 3, 2, true);
        for (size_t s = 0; s < p.experts.size(); ++s) p.experts[s] = s % 23 == 0 ? static_cast<int32_t>(s % 2 + 1) : 0;
        for (int step = 0; step < 2; ++step) {
          check_all_reduce(shape, p, step, rank, comm, step == 0, step == 1);
          if (::testing::Test::HasFatalFailure()) return;
          check_reduce(shape, p, step, rank, comm, step == 1);
          if (::testing::Test::HasFatalFailure()) return;
          check_shards(shape, p, p, step, rank, comm);
          if (::testing::Test::HasFatalFailure()) return;
        }
      },
      options);
}

TEST(Experts, ReplicasGetTheSameBitsAndEveryRunTheSame) {
  run_ranks(4, [](int rank, moecclComm_t comm) {
    const int32_t experts[] = {0, 0, 1, 0, 1, 1, 0, 1};
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = 2;
    p.slots_per_rank = 2;
    p.slot_expert = experts;
    constexpr size_t kCount = 10'007;
    std::mt19937 random(static_cast<uint32_t>(rank + 1));
    std::vector<float> send(2 * kCount), recv(2 * kCount), again(2 * kCount);
    for (float& v : send) v = static_cast<float>(random()) / 1e7f;
    MOECCL_ASSERT_COMM_OK(
        moecclExpertAllReduce(send.data(), recv.data(), kCount, moecclFloat32, moecclAvg, &p, comm, nullptr), comm);
    MOECCL_ASSERT_COMM_OK(
        moecclExpertAllReduce(send.data(), again.data(), kCount, moecclFloat32, moecclAvg, &p, comm, nullptr), comm);
    EXPECT_EQ(std::memcmp(recv.data(), again.data(), recv.size() * 4), 0);
    std::vector<float> all(4 * 2 * kCount);
    MOECCL_ASSERT_COMM_OK(moecclAllGather(recv.data(), all.data(), 2 * kCount, moecclFloat32, comm, nullptr), comm);
    for (size_t s = 0; s < 8; ++s) {
      const size_t first = experts[s] == 0 ? 0 : 2;  // slots 0 and 2 hold the experts' first replicas
      EXPECT_EQ(std::memcmp(&all[s * kCount], &all[first * kCount], kCount * 4), 0) << "slot " << s;
    }
  });
}

TEST(Experts, StreamsAndGroupsRunThem) {
  run_ranks(3, [](int rank, moecclComm_t comm) {
    const int32_t experts[] = {0, 1, 1, 0, 0, 2};
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = 3;
    p.slots_per_rank = 2;
    p.slot_expert = experts;
    std::vector<int32_t> a(2 * 100, rank + 1), b(2 * 100, 10);
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    MOECCL_ASSERT_COMM_OK(moecclExpertAllReduce(a.data(), a.data(), 100, moecclInt32, moecclSum, &p, comm, stream),
                          comm);
    MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
    MOECCL_ASSERT_OK(moecclStreamDestroy(stream));
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_ASSERT_COMM_OK(moecclExpertAllReduce(b.data(), b.data(), 100, moecclInt32, moecclSum, &p, comm, nullptr),
                          comm);
    MOECCL_ASSERT_OK(moecclGroupEnd());
    const int32_t sum_a[] = {1 + 2 + 3, 1 + 2, 3}, sum_b[] = {30, 20, 10};
    for (int s = 0; s < 2; ++s) {
      EXPECT_EQ(a[static_cast<size_t>(s) * 100 + 50], sum_a[experts[rank * 2 + s]]);
      EXPECT_EQ(b[static_cast<size_t>(s) * 100 + 99], sum_b[experts[rank * 2 + s]]);
    }
  });
}

TEST(Experts, PopularityThatIsRefusedRefusesItsGroup) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const int32_t choices[2] = {0, 7};
    int64_t counts[4] = {};
    int32_t value = 3, sum = -1;
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &sum, 1, moecclInt32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(moecclExpertPopularity(choices, 2, 4, counts, comm, nullptr), moecclInvalidArgument);
    EXPECT_EQ(moecclGroupEnd(), moecclInvalidArgument);
    EXPECT_EQ(sum, -1) << "the group's other call has run";
  });
}

TEST(Experts, PopularityCountsChoicesOfAllRanks) {
  run_ranks(3, [](int rank, moecclComm_t comm) {
    const int32_t choices[] = {0, 1, -1, 3, 3};
    int64_t counts[4] = {9, 9, 9, 9};
    // Rank 2 has no tokens.
    MOECCL_ASSERT_COMM_OK(moecclExpertPopularity(choices, rank == 2 ? 0 : 5, 4, counts, comm, nullptr), comm);
    const int64_t wanted[4] = {2, 2, 0, 4};
    EXPECT_EQ(std::memcmp(counts, wanted, sizeof(wanted)), 0);
  });
}

TEST(Experts, DifferentPlacementsAreNamed) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const int32_t experts[2][2] = {{0, 1}, {0, 0}};
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = 2;
    p.slots_per_rank = 1;
    p.slot_expert = experts[rank];
    int32_t v[100] = {};
    const moecclResult_t result = moecclExpertAllReduce(v, v, 100, moecclInt32, moecclSum, &p, comm, nullptr);
    // A rank whose placement needs nothing from the other rank may finish before it learns of the mismatch.
    if (rank == 1 || result != moecclSuccess) {
      EXPECT_EQ(result, moecclMismatch) << moecclGetLastError(comm);
      EXPECT_NE(std::string(moecclGetLastError(comm)).find("placement"), std::string::npos) << moecclGetLastError(comm);
    }
  });
}

// Grok-1's experts have 604 million elements, 2.4 GB of fp32 gradients.
TEST(Experts, AnExpertMayHaveGigabytes) {
  run_ranks(2, [](int, moecclComm_t comm) {
    const int32_t experts[] = {0, 1, 1, 0};
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = 2;
    p.slots_per_rank = 2;
    p.slot_expert = experts;
    for (const moecclOp_t op :
         {moecclOpExpertAllReduce, moecclOpCollectGradients, moecclOpReduceGradients, moecclOpPlaceWeights}) {
      size_t needed = 0;
      MOECCL_EXPECT_COMM_OK(moecclExpertExplain(comm, op, 603'979'776, moecclFloat32, &p, nullptr, 0, &needed), comm);
      for (const size_t count : {size_t{1} << 37, SIZE_MAX / 4, SIZE_MAX}) {
        EXPECT_EQ(moecclExpertExplain(comm, op, count, moecclFloat32, &p, nullptr, 0, &needed), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("fits in memory"), std::string::npos)
            << moecclGetLastError(comm);
      }
    }
    std::vector<float> v(4);
    const moecclExpertLayer_t layer = {&p, v.data(), v.data()};
    EXPECT_EQ(moecclExpertLayers(moecclOpReduceGradients, &layer, 1, SIZE_MAX, moecclFloat32, moecclSum, comm, nullptr),
              moecclInvalidArgument);
  });
}

// Calls of similar sizes share a choice, which a rank's own question must not make.
TEST(Experts, AnExplanationOnOneRankChangesNoChoice) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = "node:2(bw=1GB/s,lat=20us) gpu:4";
  run_ranks(
      8,
      [](int rank, moecclComm_t comm) {
        // All ranks have all experts.
        const int32_t experts[] = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1};
        moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
        p.n_experts = 2;
        p.slots_per_rank = 2;
        p.slot_expert = experts;
        for (size_t count = 2; count <= (1u << 18); count *= 2) {
          size_t needed = 0;
          if (rank == 0) {
            MOECCL_EXPECT_COMM_OK(moecclExpertExplain(comm, moecclOpExpertAllReduce, 2 * count - 1, moecclFloat32, &p,
                                                      nullptr, 0, &needed),
                                  comm);
          }
          std::vector<float> data(2 * count, 1.0f);
          MOECCL_ASSERT_COMM_OK(
              moecclExpertAllReduce(data.data(), data.data(), count, moecclFloat32, moecclSum, &p, comm, nullptr),
              comm);
        }
      },
      options);
}

TEST(Experts, BadArgumentsAreNamed) {
  run_ranks(1, [](int, moecclComm_t comm) {
    int32_t experts[2] = {0, 1};
    moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
    p.n_experts = 2;
    p.slots_per_rank = 2;
    p.slot_expert = experts;
    float v[64] = {};
    const auto fails = [&](moecclResult_t result, const char* word) {
      EXPECT_EQ(result, moecclInvalidArgument);
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(word), std::string::npos) << moecclGetLastError(comm);
    };
    fails(moecclExpertAllReduce(v, v, 4, moecclFloat32, moecclMax, &p, comm, nullptr), "moecclAvg");
    fails(moecclExpertAllReduce(v, v, 4, moecclFloat32, moecclSum, nullptr, comm, nullptr), "placement is NULL");
    fails(moecclExpertAllReduce(v, v + 1, 4, moecclFloat32, moecclSum, &p, comm, nullptr), "overlap");
    fails(moecclExpertAllReduce(nullptr, v, 4, moecclFloat32, moecclSum, &p, comm, nullptr), "send is NULL");
    fails(moecclCollectGradients(v, v, 4, moecclFloat32, &p, comm, nullptr), "overlap");
    experts[1] = 5;
    fails(moecclExpertAllReduce(v, v, 4, moecclFloat32, moecclSum, &p, comm, nullptr), "slot_expert[1]");
    experts[1] = 0;
    fails(moecclCollectGradients(v, v + 32, 4, moecclFloat32, &p, comm, nullptr), "expert 1");
    p.size = 3;
    fails(moecclPlaceWeights(v, v + 32, 4, moecclFloat32, &p, comm, nullptr), "placement.size");
    EXPECT_EQ(moecclExpertShard(10, 4), 3u);
    size_t needed = 0;
    p.size = sizeof(p);
    MOECCL_EXPECT_COMM_OK(
        moecclExpertExplain(comm, moecclOpExpertAllReduce, 100, moecclFloat32, &p, nullptr, 0, &needed), comm);
    EXPECT_GT(needed, 100u);
  });
}

}  // namespace
}  // namespace moeccl::testing
