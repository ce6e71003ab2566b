// SPDX-License-Identifier: Apache-2.0
// Meaningless numbers: sizes that exceed every memory and enumerators that do not exist are refused with a sentence.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

const std::vector<size_t> kTooMany = {SIZE_MAX,         SIZE_MAX - 7,          SIZE_MAX / 2,
                                      SIZE_MAX / 2 + 1, SIZE_MAX / 2 + 3,      SIZE_MAX / 3,
                                      size_t{1} << 62,  (size_t{1} << 61) + 1, (size_t{1} << 57) + 1};
const std::vector<int> kNoEnumerator = {-1, 100, 12345, std::numeric_limits<int>::min(),
                                        std::numeric_limits<int>::max()};

template <class Enum>
Enum as(int number) {
  return static_cast<Enum>(number);
}

void expect_refused(moecclResult_t got, const std::string& mentions, const std::string& what) {
  EXPECT_EQ(got, moecclInvalidArgument) << what << ": " << moecclGetErrorString(got);
  const std::string text = moecclGetLastError(nullptr);
  EXPECT_NE(text.find(mentions), std::string::npos) << what << ": \"" << text << "\" does not mention " << mentions;
}

struct Call {
  const char* name;
  std::function<moecclResult_t(size_t count)> with;
};

TEST(ApiNumbers, NoOperationTakesMoreThanMemoryHas) {
  run_ranks(2, [](int, moecclComm_t comm) {
    float x[8] = {}, y[8] = {};
    const auto f32 = moecclFloat32;
    int32_t slots[2] = {0, 0};
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 1, placement.slots_per_rank = 1, placement.slot_expert = slots;
    const auto all_to_all_v = [&](size_t count, size_t at) {
      const size_t counts[2] = {count, count}, displs[2] = {at, at};
      return moecclAllToAllv(x, counts, displs, y, counts, displs, f32, comm, nullptr);
    };
    const std::vector<Call> calls = {
        {"AllReduce", [&](size_t n) { return moecclAllReduce(x, y, n, f32, moecclSum, comm, nullptr); }},
        {"Reduce", [&](size_t n) { return moecclReduce(x, y, n, f32, moecclSum, 0, comm, nullptr); }},
        {"Broadcast", [&](size_t n) { return moecclBroadcast(x, y, n, f32, 0, comm, nullptr); }},
        {"AllGather", [&](size_t n) { return moecclAllGather(x, y, n, f32, comm, nullptr); }},
        {"ReduceScatter", [&](size_t n) { return moecclReduceScatter(x, y, n, f32, moecclSum, comm, nullptr); }},
        {"AllToAll", [&](size_t n) { return moecclAllToAll(x, y, n, f32, comm, nullptr); }},
        {"AllToAllv's counts", [&](size_t n) { return all_to_all_v(n, 0); }},
        {"AllToAllv's displacements", [&](size_t n) { return all_to_all_v(1, n); }},
        {"Gather", [&](size_t n) { return moecclGather(x, y, n, f32, 0, comm, nullptr); }},
        {"Scatter", [&](size_t n) { return moecclScatter(x, y, n, f32, 0, comm, nullptr); }},
        {"TensorAllToAll", [&](size_t n) { return moecclTensorAllToAll(x, y, n, f32, comm, nullptr); }},
        {"Send", [&](size_t n) { return moecclSend(x, n, f32, 1, comm, nullptr); }},
        {"Recv", [&](size_t n) { return moecclRecv(y, n, f32, 1, comm, nullptr); }},
        {"ExpertAllReduce",
         [&](size_t n) { return moecclExpertAllReduce(x, x, n, f32, moecclSum, &placement, comm, nullptr); }},
        {"CollectGradients", [&](size_t n) { return moecclCollectGradients(x, y, n, f32, &placement, comm, nullptr); }},
        {"PlaceWeights", [&](size_t n) { return moecclPlaceWeights(x, y, n, f32, &placement, comm, nullptr); }},
        {"SharedExpert", [&](size_t n) { return moecclSharedExpert(x, 1, 2, y, n, f32, comm, nullptr); }},
        {"SharedExpert without experts",
         [&](size_t n) { return moecclSharedExpert(nullptr, 0, 2, y, n, f32, comm, nullptr); }},
    };
    for (const Call& call : calls)
      for (const size_t n : kTooMany) expect_refused(call.with(n), "give", call.name + std::to_string(n));
    // Communicators still work.
    float value = 1;
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &value, 1, f32, moecclSum, comm, nullptr), comm);
  });
}

TEST(ApiNumbers, NoQuestionTakesMoreThanMemoryHas) {
  run_ranks(3, [](int rank, moecclComm_t comm) {
    if (rank != 0) return;
    moecclPlanInfo_t info{};
    info.size = sizeof(info);
    size_t n_spans = 0;
    moecclSimulateConfig_t simulate = MOECCL_SIMULATE_CONFIG_INIT;
    simulate.topology = "node:2 gpu:2";
    for (int i = 0; i < MOECCL_NUM_OPS; ++i) {
      const auto op = static_cast<moecclOp_t>(i);
      const std::string what = "operation " + std::to_string(i);
      for (const auto type : {moecclInt8, moecclFloat16, moecclFloat64}) {
        for (const size_t n : kTooMany) {
          const bool fits = op == moecclOpAllToAllv;  // its counts are private to a rank: the number is not checked
          EXPECT_EQ(moecclPlanQuery(comm, op, n, type, &info), fits ? moecclSuccess : moecclInvalidArgument) << what;
          EXPECT_EQ(moecclPlanExplain(comm, op, n, type, nullptr, 0, nullptr),
                    fits ? moecclSuccess : moecclInvalidArgument)
              << what;
          EXPECT_EQ(moecclPlanTimeline(comm, op, n, type, nullptr, 0, &n_spans), moecclInvalidArgument) << what;
          if (op == moecclOpDispatch || op == moecclOpCombine) continue;
          simulate.op = op, simulate.count = n, simulate.type = type;
          EXPECT_EQ(moecclSimulate(&simulate, nullptr, 0, nullptr), moecclInvalidArgument) << what;
        }
        // For sizes that exceed every machine but can be counted, any answer will do, but no crash and no endless
        // pricing.
        for (const size_t n : {size_t{1} << 40, (size_t{1} << 45) + 1, (size_t{1} << 50) + 3}) {
          const moecclResult_t asked = moecclPlanQuery(comm, op, n, type, &info);
          if (asked == moecclSuccess && op != moecclOpAllToAllv) {
            EXPECT_GE(info.n_chunks, 1u) << what;
            EXPECT_GE(info.predicted_us, 0.0) << what;
          }
          EXPECT_NE(asked, moecclInternalError) << what << ": " << moecclGetLastError(nullptr);
        }
      }
    }
    simulate = MOECCL_SIMULATE_CONFIG_INIT;
    simulate.topology = "node:2 gpu:2";
    const int32_t domain[2] = {1, 1};
    for (const size_t n : kTooMany) {
      simulate.hidden_bytes = n;
      expect_refused(moecclSimulate(&simulate, nullptr, 0, nullptr), "hidden_bytes", "a layer");
      simulate.hidden_bytes = 64, simulate.tokens_per_rank = n;
      expect_refused(moecclSimulate(&simulate, nullptr, 0, nullptr), "tokens", "a layer");
      simulate.tokens_per_rank = 0;
      EXPECT_LE(moecclExpertShard(n, 2), n / 2 + 65) << n;
      EXPECT_GE(moecclExpertShard(n, 2), n / 2 + n % 2) << n;
    }
    simulate.n_experts = std::numeric_limits<int32_t>::max();
    expect_refused(moecclSimulate(&simulate, nullptr, 0, nullptr), "n_experts", "a layer");
    simulate.n_experts = 0;
    simulate.domain = domain, simulate.n_levels = std::numeric_limits<int32_t>::max();
    expect_refused(moecclSimulate(&simulate, nullptr, 0, nullptr), "n_levels", "domains");
    moecclCodec_t codec = MOECCL_CODEC_INIT;
    size_t bytes = 0;
    for (const size_t n : kTooMany) {
      codec.count = n;
      if (n > SIZE_MAX / 16) expect_refused(moecclCodecBytes(&codec, &bytes), "count", "a codec");
    }
  });
}

// A placement has tables for all its experts, wherever their slots are. Without a limit a wrong number takes the host's
// memory.
TEST(ApiNumbers, ExpertsThatNoModelHasAreRefused) {
  run_ranks(2, [](int, moecclComm_t comm) {
    const std::vector<int32_t> slots{0, 1}, topk{0, 1};
    float x[2] = {1, 2}, y[2] = {};
    int64_t counts[2] = {};
    int source = 0;
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.slots_per_rank = 1, placement.slot_expert = slots.data();
    for (const int n : {0, -1, (1 << 22) + 1, std::numeric_limits<int>::max()}) {
      placement.n_experts = n;
      const std::string mentions = "n_experts is " + std::to_string(n) + ": give 1 to 4194304";
      expect_refused(moecclExpertAllReduce(x, y, 1, moecclFloat32, moecclSum, &placement, comm, nullptr), mentions,
                     "ExpertAllReduce");
      expect_refused(moecclExpertPopularity(topk.data(), 2, n, counts, comm, nullptr), mentions, "ExpertPopularity");
    }
    placement.n_experts = 2;
    expect_refused(moecclExpertPopularity(topk.data(), SIZE_MAX / 4, 2, counts, comm, nullptr),
                   "n_choices is 4611686018427387903", "ExpertPopularity");
    const moecclExpertLayer_t layer{&placement, x, y};
    for (const size_t n : {size_t{0}, SIZE_MAX / 2})
      expect_refused(moecclExpertLayers(moecclOpReduceGradients, &layer, n, 1, moecclFloat32, moecclSum, comm, nullptr),
                     "n_layers is " + std::to_string(n) + ": give 1 to", "ExpertLayers");
    expect_refused(moecclGradientSource(&placement, 65536, 0, 0, &source), "n_ranks is 65536", "GradientSource");
    MOECCL_EXPECT_COMM_OK(moecclExpertAllReduce(x, y, 1, moecclFloat32, moecclSum, &placement, comm, nullptr), comm);
  });
}

// A number that is too large is not told to be above 0.
TEST(ApiNumbers, FiguresThatAreTooLargeAreToldTheMost) {
  const int32_t scale[] = {2};
  const double bandwidth[] = {1e9};
  int32_t domain[1] = {};
  moecclDomainAnswer_t answer{};
  answer.size = sizeof(answer);
  for (const double bytes : {-1.0, 1e300, std::numeric_limits<double>::quiet_NaN()}) {
    moecclDomainProblem_t domains = MOECCL_DOMAIN_PROBLEM_INIT;
    domains.n_levels = 1, domains.scale = scale, domains.bandwidth = bandwidth, domains.expert_bytes = bytes;
    expect_refused(moecclSolveDomains(&domains, domain, &answer), ": give 0 to 1e+30", "SolveDomains");
  }
  moecclChunkProblem_t chunks = MOECCL_CHUNK_PROBLEM_INIT;
  moecclChunkAnswer_t chunk{};
  chunk.size = sizeof(chunk);
  chunks.tensor = chunks.expert = 2, chunks.bytes = 1e300;
  chunks.inter_bandwidth = chunks.intra_bandwidth = chunks.copy_bandwidth = 1e9;
  expect_refused(moecclSolveChunks(&chunks, &chunk), "give a number above 0, at most 1e+30", "SolveChunks");
  const double popularity[] = {1, 2};
  int32_t counts[2] = {};
  expect_refused(moecclReplicaCountsFewestDrops(popularity, 2, 2, 1e300, counts), "above 0, at most 1000000000",
                 "Counts");
  double joint[1] = {};
  const int32_t topk[] = {0};
  expect_refused(moecclPredictorUpdate(joint, 1, 1, 1, topk, topk, INT64_MAX, 1),
                 "n_tokens is 9223372036854775807: between 0 and 1099511627776", "PredictorUpdate");
  run_ranks(1, [](int, moecclComm_t comm) {
    moecclHybrid_t hybrid = nullptr;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = 2, config.data_bytes = -1;
    expect_refused(moecclHybridCreate(&hybrid, comm, &config), "config.data_bytes is -1: give 0", "HybridCreate");
  });
}

// A forced plan with tiny staging would need more chunks than can be numbered. Expects the sentence, and not the plan
// of another size.
TEST(ApiNumbers, ChunksThatCannotBeCountedAreRefused) {
  RankOptions options;
  options.config.staging_bytes = 64 << 10;
  run_ranks(
      4,
      [](int rank, moecclComm_t comm) {
        MOECCL_EXPECT_COMM_OK(moecclPlanForce(comm, moecclOpAllGather, "staged"), comm);
        if (rank != 0) return;
        moecclPlanInfo_t info{};
        info.size = sizeof(info);
        MOECCL_EXPECT_COMM_OK(moecclPlanQuery(comm, moecclOpAllGather, 1 << 30, moecclInt8, &info), comm);
        EXPECT_GE(info.n_chunks, (1 << 30) / (64u << 10));
        EXPECT_EQ(moecclPlanQuery(comm, moecclOpAllGather, size_t{1} << 53, moecclInt8, &info), moecclUnsupported);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("chunks"), std::string::npos) << moecclGetLastError(comm);
      },
      options);
}

TEST(ApiNumbers, EnumeratorsThatDoNotExistAreRefused) {
  run_ranks(1, [](int, moecclComm_t comm) {
    float x[64] = {}, y[64] = {};
    const int32_t domain = 1;
    int32_t slots[2] = {0, 1};
    size_t n = 0;
    moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
    placement.n_experts = 2, placement.slots_per_rank = 2, placement.slot_expert = slots;
    moecclHybrid_t hybrid = nullptr;
    moecclHybridConfig_t hybrid_config = MOECCL_HYBRID_CONFIG_INIT;
    hybrid_config.n_experts = 2, hybrid_config.domain = &domain, hybrid_config.n_levels = 1;
    MOECCL_ASSERT_OK(moecclHybridCreate(&hybrid, comm, &hybrid_config));
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = 64, layer.top_k = 2, layer.n_experts = 2, layer.max_tokens = 2;
    moecclMoe_t good = nullptr;
    MOECCL_ASSERT_OK(moecclMoeCreate(&good, comm, &layer));
    for (const int i : kNoEnumerator) {
      const std::string number = std::to_string(i);
      const auto type = as<moecclDataType_t>(i);
      const auto op = as<moecclOp_t>(i);
      EXPECT_EQ(moecclTypeSize(type), 0u);
      EXPECT_STREQ(moecclGetErrorString(as<moecclResult_t>(i)), "unknown result code");
      const auto refused = [&](const char* what, moecclResult_t got) { expect_refused(got, number, what); };
      refused("AllReduce", moecclAllReduce(x, y, 1, type, moecclSum, comm, nullptr));
      refused("Broadcast", moecclBroadcast(x, y, 1, type, 0, comm, nullptr));
      refused("AllGather", moecclAllGather(x, y, 1, type, comm, nullptr));
      refused("TensorAllToAll", moecclTensorAllToAll(x, y, 1, type, comm, nullptr));
      refused("Send", moecclSend(x, 1, type, 0, comm, nullptr));
      refused("ExpertAllReduce", moecclExpertAllReduce(x, x, 1, type, moecclSum, &placement, comm, nullptr));
      refused("CollectGradients", moecclCollectGradients(x, y, 1, type, &placement, comm, nullptr));
      refused("SharedExpert", moecclSharedExpert(x, 1, 1, y, 1, type, comm, nullptr));
      refused("HybridReduce", moecclHybridReduce(hybrid, x, y, 1, type, nullptr));
      moecclRedOp_t made{};
      refused("RedOpCreatePreMulSum", moecclRedOpCreatePreMulSum(&made, x, type, comm));
      moecclPlanInfo_t info{};
      info.size = sizeof(info);
      refused("PlanQuery", moecclPlanQuery(comm, op, 1, moecclInt8, &info));
      refused("PlanQuery's type", moecclPlanQuery(comm, moecclOpAllReduce, 1, type, &info));
      refused("PlanExplain", moecclPlanExplain(comm, op, 1, moecclInt8, nullptr, 0, &n));
      refused("PlanTimeline", moecclPlanTimeline(comm, op, 1, moecclInt8, nullptr, 0, &n));
      refused("PlanTimeline's type", moecclPlanTimeline(comm, moecclOpTensorAllToAll, 1, type, nullptr, 0, &n));
      refused("PlanForce", moecclPlanForce(comm, op, "flat"));
      refused("ExpertExplain", moecclExpertExplain(comm, op, 1, moecclInt8, &placement, nullptr, 0, &n));
      refused("ExpertExplain's type",
              moecclExpertExplain(comm, moecclOpExpertAllReduce, 1, type, &placement, nullptr, 0, &n));
      refused("TopologyDescribe",
              moecclTopologyDescribe("node:2 gpu:2", as<moecclTopologyFormat_t>(i), nullptr, 0, &n));
      moecclMoe_t moe = nullptr;
      moecclMoeConfig_t bad = layer;
      bad.type = type;
      refused("MoeCreate's type", moecclMoeCreate(&moe, comm, &bad));
      refused("MoeCheck's type", moecclMoeCheck(&bad, 1, nullptr, nullptr, 0));
      bad = layer;
      bad.layout = as<moecclMoeLayout_t>(i);
      refused("MoeCreate's layout", moecclMoeCreate(&moe, comm, &bad));
      refused("MoeQuerySize's layout", moecclMoeQuerySize(&bad, 1, nullptr, &n));
      moecclMigration_t migration = nullptr;
      moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
      migrate.count = 4, migrate.ratio = 1, migrate.type = type;
      refused("MigrationCreate", moecclMigrationCreate(&migration, hybrid, comm, &migrate));
      moecclGradientReturn_t gradients = nullptr;
      moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
      back.count = 4, back.ratio = 1, back.type = type;
      refused("GradientReturnCreate", moecclGradientReturnCreate(&gradients, hybrid, comm, &back));
      moecclExpertSwap_t swap = nullptr;
      moecclExpertSwapConfig_t swapping = MOECCL_EXPERT_SWAP_CONFIG_INIT;
      swapping.max_function = as<moecclMaxFunction_t>(i);
      refused("ExpertSwapCreate", moecclExpertSwapCreate(&swap, comm, &swapping));
      moecclReplacement_t replacement = nullptr;
      moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
      replace.mode = as<moecclReplaceMode_t>(i);
      refused("ReplaceCreate", moecclReplaceCreate(&replacement, good, &replace));
      moecclCodec_t codec = MOECCL_CODEC_INIT;
      codec.count = 4, codec.type = type;
      refused("CodecBytes", moecclCodecBytes(&codec, &n));
      moecclSimulateConfig_t simulate = MOECCL_SIMULATE_CONFIG_INIT;
      simulate.topology = "node:2 gpu:2", simulate.op = op;
      refused("Simulate", moecclSimulate(&simulate, nullptr, 0, &n));
      simulate.op = moecclOpAllReduce, simulate.type = type, simulate.count = 4;
      refused("Simulate's type", moecclSimulate(&simulate, nullptr, 0, &n));
      simulate.op = moecclOpExpertGather, simulate.domain = &domain, simulate.n_levels = 1;
      refused("Simulate's type of experts", moecclSimulate(&simulate, nullptr, 0, &n));
    }
    MOECCL_EXPECT_OK(moecclMoeDestroy(good));
    MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
  });
}

}  // namespace
}  // namespace moeccl::testing
