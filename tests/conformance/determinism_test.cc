// SPDX-License-Identifier: Apache-2.0
// Deterministic mode gives the same bits with every plan and in every run, with values whose sums depend on their
// order.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/conformance/moe_checker.h"

namespace moeccl::testing {
namespace {

// Real numbers of mixed magnitude: adding them in another order changes low bits.
Number ragged_number(uint64_t h) {
  const double mantissa = static_cast<double>(h >> 20 & 0xffff) / 65536 - 0.5;
  return {std::ldexp(mantissa, static_cast<int>(h % 9)), 0};
}

std::vector<unsigned char> ragged_input(moecclDataType_t type, size_t count, uint64_t seed) {
  std::vector<unsigned char> bytes(count * moecclTypeSize(type));
  for (size_t i = 0; i < count; ++i) store(type, bytes.data(), i, ragged_number(mix(seed, i)));
  return bytes;
}

class Determinism : public ::testing::TestWithParam<RankMode> {};

TEST_P(Determinism, AllReduceGivesTheSameBitsByEveryPlanAndInEveryRun) {
  RankOptions options{.mode = GetParam()};
  options.config.deterministic = 1;
  options.config.topology = "node:2 gpu:3";
  options.config.staging_bytes = 512 << 10;
  const int runs = scaled(100);
  run_ranks(
      6,
      [&](int rank, moecclComm_t comm) {
        constexpr size_t kCount = 20011;
        for (moecclDataType_t type : {moecclFloat32, moecclBfloat16, moecclFloat16, moecclFloat64}) {
          const auto in = ragged_input(type, kCount, mix(test_seed(), static_cast<uint64_t>(rank)));
          std::vector<unsigned char> first(in.size()), out(in.size());
          MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), first.data(), kCount, type, moecclSum, comm, nullptr), comm);
          for (const char* plan : {"oneshot", "direct", "staged", "rd", "tree", "flat", "ring", "2dh", "hier"}) {
            if (moecclPlanForce(comm, moecclOpAllReduce, plan) != moecclSuccess)
              continue;  // no such plan for AllReduce
            MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), kCount, type, moecclSum, comm, nullptr), comm);
            EXPECT_EQ(memcmp(first.data(), out.data(), out.size()), 0) << plan << " differs for " << type_name(type);
          }
          MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, nullptr), comm);
          for (int i = 0; i < runs; ++i) {
            MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), kCount, type, moecclSum, comm, nullptr), comm);
            ASSERT_EQ(memcmp(first.data(), out.data(), out.size()), 0)
                << "run " << i << " differs for " << type_name(type);
          }
        }
      },
      options);
}

// The sum of 8 ranks is out of range, their average is not.
TEST_P(Determinism, AveragesOfNarrowFloatsDoNotOverflow) {
  RankOptions options{.mode = GetParam()};
  options.config.topology = "node:2 gpu:4";
  run_ranks(
      8,
      [&](int, moecclComm_t comm) {
        const std::pair<moecclDataType_t, float> largest[] = {
            {moecclFloat16, 65504.0F}, {moecclFloat8e4m3, 448.0F}, {moecclFloat8e5m2, 57344.0F}};
        for (const auto& [type, value] : largest) {
          for (const size_t count : {size_t{8}, size_t{4096}, size_t{300001}}) {
            std::vector<unsigned char> in(count * moecclTypeSize(type)), out(in.size());
            for (size_t i = 0; i < count; ++i) store(type, in.data(), i, {value, 0});
            for (const char* plan :
                 {"auto", "oneshot", "direct", "staged", "rd", "tree", "halving", "flat", "ring", "hier"}) {
              if (moecclPlanForce(comm, moecclOpAllReduce, plan) != moecclSuccess) continue;
              MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, type, moecclAvg, comm, nullptr),
                                    comm);
              const double got = load(type, out.data(), count - 1).f;
              // Partial sums of fp8 are rounded to 3 or 2 bits.
              EXPECT_NEAR(got, value, type == moecclFloat16 ? 0 : value / 6) << plan << ", " << type_name(type);
            }
          }
        }
      },
      options);
}

// Two slots on each rank hold one expert, so the order of the sum shows.
TEST_P(Determinism, SumsOfReplicasHaveTheSameBitsWhateverIsForcedAndWhereverBuffersAre) {
  RankOptions options{.mode = GetParam()};
  options.config.deterministic = 1;
  options.config.topology = "node:2 gpu:2";
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        constexpr size_t kCount = 70001;
        const std::vector<int32_t> slot_expert(8, 0);
        moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
        placement.n_experts = 1;
        placement.slots_per_rank = 2;
        placement.slot_expert = slot_expert.data();
        const size_t shard = moecclExpertShard(kCount, 4);
        for (const moecclDataType_t type : {moecclFloat32, moecclBfloat16}) {
          const auto in = ragged_input(type, 2 * kCount, mix(test_seed(), static_cast<uint64_t>(rank)));
          std::vector<unsigned char> first(in.size()), out(in.size());
          std::vector<unsigned char> sum(shard * moecclTypeSize(type)), again(sum.size());
          void *heap_in = nullptr, *heap_out = nullptr;
          ASSERT_EQ(moecclMemAlloc(&heap_in, in.size()), moecclSuccess);
          ASSERT_EQ(moecclMemAlloc(&heap_out, in.size()), moecclSuccess);
          memcpy(heap_in, in.data(), in.size());
          MOECCL_ASSERT_COMM_OK(
              moecclExpertAllReduce(in.data(), first.data(), kCount, type, moecclSum, &placement, comm, nullptr), comm);
          MOECCL_ASSERT_COMM_OK(
              moecclReduceGradients(in.data(), sum.data(), kCount, type, moecclSum, &placement, comm, nullptr), comm);
          for (const char* kind : {"auto", "direct", "nodes", "flat"}) {
            const char* const forced = std::string_view(kind) == "auto" ? nullptr : kind;
            const moecclResult_t force = moecclPlanForce(comm, moecclOpExpertAllReduce, forced);
            // "direct" needs a way from every rank to every other rank's memory, which there is not between hosts.
            if (force == moecclUnsupported && forced != nullptr) continue;
            MOECCL_ASSERT_COMM_OK(force, comm);
            MOECCL_ASSERT_COMM_OK(
                moecclExpertAllReduce(in.data(), out.data(), kCount, type, moecclSum, &placement, comm, nullptr), comm);
            EXPECT_EQ(memcmp(first.data(), out.data(), out.size()), 0) << kind << " differs for " << type_name(type);
            MOECCL_ASSERT_COMM_OK(
                moecclExpertAllReduce(heap_in, heap_out, kCount, type, moecclSum, &placement, comm, nullptr), comm);
            EXPECT_EQ(memcmp(first.data(), heap_out, out.size()), 0)
                << kind << " in the heap differs for " << type_name(type);
            if (moecclPlanForce(comm, moecclOpReduceGradients, forced) != moecclSuccess) continue;  // no such plan
            MOECCL_ASSERT_COMM_OK(
                moecclReduceGradients(in.data(), again.data(), kCount, type, moecclSum, &placement, comm, nullptr),
                comm);
            EXPECT_EQ(memcmp(sum.data(), again.data(), sum.size()), 0) << kind << " differs for " << type_name(type);
          }
          MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpExpertAllReduce, nullptr), comm);
          MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpReduceGradients, nullptr), comm);
          float one = 1;  // no rank frees what a peer may still read
          MOECCL_ASSERT_COMM_OK(moecclAllReduce(&one, &one, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
          MOECCL_EXPECT_OK(moecclMemFree(heap_in));
          MOECCL_EXPECT_OK(moecclMemFree(heap_out));
        }
      },
      options);
}

// Sums of numbers times a third, which no type holds exactly: a rank rounds its own product as the other ranks do.
TEST_P(Determinism, ScaledSumsAreTheSameOnEveryRankAndByEveryDeterministicPlan) {
  for (const bool deterministic : {false, true}) {
    RankOptions options{.mode = GetParam()};
    options.config.deterministic = deterministic ? 1 : 0;
    run_ranks(
        3,
        [&](int rank, moecclComm_t comm) {
          for (const size_t count : {500, 20011}) {
            for (const moecclDataType_t type : {moecclFloat32, moecclBfloat16, moecclFloat16, moecclFloat8e4m3}) {
              std::vector<unsigned char> scalar(moecclTypeSize(type));
              store(type, scalar.data(), 0, {1.0 / 3, 0});
              moecclRedOp_t op{};
              MOECCL_ASSERT_COMM_OK(moecclRedOpCreatePreMulSum(&op, scalar.data(), type, comm), comm);
              const auto in = ragged_input(type, count, mix(test_seed(), static_cast<uint64_t>(rank)));
              std::vector<unsigned char> first, out(in.size()), of_rank_0(in.size());
              for (const char* plan : {"auto", "oneshot", "staged", "rd", "tree", "flat", "ring"}) {
                if (moecclPlanForce(comm, moecclOpAllReduce, plan) != moecclSuccess) continue;
                MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, type, op, comm, nullptr), comm);
                of_rank_0 = out;
                MOECCL_ASSERT_COMM_OK(moecclBroadcast(out.data(), of_rank_0.data(), count, type, 0, comm, nullptr),
                                      comm);
                EXPECT_EQ(memcmp(of_rank_0.data(), out.data(), out.size()), 0)
                    << plan << ": rank " << rank << " differs for " << count << " of " << type_name(type);
                if (first.empty()) first = out;
                EXPECT_TRUE(!deterministic || first == out)
                    << plan << " differs for " << count << " of " << type_name(type);
              }
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, nullptr), comm);
              MOECCL_ASSERT_COMM_OK(moecclRedOpDestroy(op, comm), comm);
            }
          }
        },
        options);
  }
}

struct Combined {
  std::vector<unsigned char> out;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
};

// Combines ragged rows. A row's contents depend only on its token, not on the plan.
void combine_once(const MoeShape& shape, const moecclRoutingInfo_t& info, size_t tokens, Combined* c) {
  const size_t elements = shape.elements();
  std::vector<unsigned char> in(info.n_rows * shape.hidden_bytes);
  for (size_t r = 0; r < info.n_rows; ++r) {
    const uint64_t who = mix(static_cast<uint64_t>(info.row_source[r]) << 32 | static_cast<uint32_t>(info.row_token[r]),
                             static_cast<uint64_t>(info.n_local_experts > 0 ? info.local_experts[0] : 0) + (r << 40));
    for (size_t e = 0; e < elements; ++e) store(shape.type, in.data(), r * elements + e, ragged_number(mix(who, e)));
  }
  c->out.assign(tokens * shape.hidden_bytes, 0);
  ASSERT_EQ(moecclCombine(c->routing, in.data(), c->out.data(), nullptr), moecclSuccess);
}

TEST_P(Determinism, CombineGivesTheSameBitsByEveryAlgorithmAndInEveryRun) {
  MoeShape shape{"", 8, GetParam(), "node:2 socket:2 gpu:2", 512, moecclBfloat16, 8, 64, 50, Tokens::kRagged};
  RankOptions options{.mode = GetParam()};
  options.config.deterministic = 1;
  options.config.topology = shape.topology;
  const int runs = scaled(100);
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        for (moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
          const MoeReference reference(shape, layout, std::vector<int>(64), test_seed());
          std::vector<float> weight(reference.weight(rank), reference.weight(rank) + reference.n_tokens(rank) * 8);
          for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(mix(test_seed(), i) % 1000) / 1000;
          std::vector<unsigned char> first;
          for (const char* algorithm : {"flat", "2dh", "hier:1", "hier:2", "hier:3", "auto"}) {
            set_note(algorithm);
            const moecclMoeConfig_t config = config_for(shape, layout, algorithm, nullptr);
            Combined c;
            const size_t tokens = reference.n_tokens(rank);
            MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&c.moe, comm, &config), comm);
            MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&c.routing, c.moe, reference.index(rank), weight.data(), tokens),
                                  comm);
            moecclRoutingInfo_t info{};
            info.size = sizeof(info);
            MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(c.routing, &info), comm);
            const int repeats = strcmp(algorithm, "hier:3") == 0 ? runs : 2;
            for (int i = 0; i < repeats; ++i) {
              combine_once(shape, info, tokens, &c);
              if (first.empty()) first = c.out;
              ASSERT_EQ(first, c.out) << algorithm << ", run " << i;
            }
            EXPECT_EQ(moecclRoutingDestroy(c.routing), moecclSuccess);
            EXPECT_EQ(moecclMoeDestroy(c.moe), moecclSuccess);
          }
        }
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Modes, Determinism, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

}  // namespace
}  // namespace moeccl::testing
