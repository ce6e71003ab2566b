// SPDX-License-Identifier: Apache-2.0
// Forced algorithms that do not apply, either to this call or at all.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/captured.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

moecclPlanInfo_t ask(moecclComm_t comm, moecclOp_t op, size_t count) {
  moecclPlanInfo_t info{};
  info.size = sizeof(info);
  MOECCL_EXPECT_COMM_OK(moecclPlanQuery(comm, op, count, moecclFloat32, &info), comm);
  return info;
}

std::string page_of(moecclComm_t comm, moecclOp_t op, size_t count) {
  size_t needed = 0;
  MOECCL_EXPECT_COMM_OK(moecclPlanExplain(comm, op, count, moecclFloat32, nullptr, 0, &needed), comm);
  std::string text(needed, '\0');
  MOECCL_EXPECT_COMM_OK(moecclPlanExplain(comm, op, count, moecclFloat32, text.data(), needed, nullptr), comm);
  return text;
}

size_t times(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

TEST(Force, WhatDoesNotApplyToACallIsSaidWithTheReason) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              constexpr size_t kLarge = 1 << 20;
              std::vector<float> in(kLarge, 1), out(kLarge);
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "direct"), comm);
              const moecclPlanInfo_t info = ask(comm, moecclOpAllReduce, kLarge);
              EXPECT_STREQ(info.forced, "direct");
              EXPECT_STRNE(info.algorithm, "direct") << "these are ordinary buffers of two processes";
              EXPECT_NE(std::string(info.note).find("moecclMemAlloc"), std::string::npos) << info.note;
              const std::string page = page_of(comm, moecclOpAllReduce, kLarge);
              EXPECT_NE(page.find("direct is forced but does not apply: needs buffers"), std::string::npos) << page;
              const std::string log = log_of([&] {
                MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "direct"), comm);
                // Sizes of one class, then of another.
                for (const size_t count : {kLarge, kLarge, kLarge - 1000, kLarge, kLarge / 4})
                  MOECCL_ASSERT_COMM_OK(
                      moecclAllReduce(in.data(), out.data(), count, moecclFloat32, moecclSum, comm, nullptr), comm);
              });
              EXPECT_EQ(times(log, "direct is forced for allreduce but does not apply"), rank == 0 ? 3u : 0u) << log;
              // An algorithm that applies runs, and nothing is noted.
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "ring"), comm);
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).algorithm, "ring");
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).forced, "ring");
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).note, "");
              EXPECT_NE(page_of(comm, moecclOpAllReduce, kLarge).find("forced by moecclPlanForce"), std::string::npos);
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, nullptr), comm);
              EXPECT_STREQ(ask(comm, moecclOpAllReduce, kLarge).forced, "");
              // "oneshot" applies to small sizes but not to large ones.
              MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllToAll, "oneshot"), comm);
              EXPECT_STREQ(ask(comm, moecclOpAllToAll, 16).algorithm, "oneshot");
              EXPECT_NE(std::string(ask(comm, moecclOpAllToAll, 16 * kLarge).note).find("staging"), std::string::npos);
            },
            {.mode = RankMode::kProcesses});
}

TEST(Force, WhatCanNeverApplyIsRefused) {
  run_ranks(2, [](int, moecclComm_t comm) {
    MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "ring"), comm);
    EXPECT_EQ(moecclPlanForce(comm, moecclOpAllReduce, "hier"), moecclUnsupported);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("groups of ranks"), std::string::npos);
    EXPECT_STREQ(ask(comm, moecclOpAllReduce, 1000).algorithm, "ring") << "what was forced before stays";
    struct Wrong {
      moecclOp_t op;
      const char *name, *part;
    };
    for (const Wrong& w :
         {Wrong{moecclOpDispatch, "nonsense", "hier:1"}, Wrong{moecclOpDispatch, "hier:12", "hier:1"},
          Wrong{moecclOpCombine, "flat", "dispatch"}, Wrong{moecclOpExpertAllReduce, "ring", "nodes"},
          Wrong{moecclOpSendRecv, "direct", "one plan"}, Wrong{moecclOpExpertGather, "ring", "staged"}}) {
      EXPECT_EQ(moecclPlanForce(comm, w.op, w.name), moecclInvalidArgument) << w.name;
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(w.part), std::string::npos) << moecclGetLastError(comm);
    }
    for (int op = 0; op < MOECCL_NUM_OPS; ++op)
      MOECCL_EXPECT_COMM_OK(moecclPlanForce(comm, static_cast<moecclOp_t>(op), nullptr), comm);
  });
}

constexpr const char* kTopology = "node:2 gpu:2";
constexpr int kRanksOfTopology = 4;
// A config with each of these leaves the choice open.
constexpr const char* kOpen[] = {nullptr, "", "auto"};

struct MadeLayer {
  std::string algorithm, page;
};

// Makes a layer with a routing of one token, which fits wherever the layer does, and returns what it runs.
MadeLayer layer_of(moecclComm_t comm, const moecclMoeConfig_t& config) {
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  MOECCL_EXPECT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
  std::vector<int32_t> index;
  for (int32_t k = 0; k < config.top_k; ++k) index.push_back(k);
  MOECCL_EXPECT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, 1), comm);
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  MOECCL_EXPECT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
  std::string page(1 << 16, '\0');
  MOECCL_EXPECT_COMM_OK(moecclMoeExplain(routing, page.data(), page.size(), nullptr), comm);
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
  MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  return {info.algorithm, page.c_str()};
}

moecclMoeConfig_t layer_config() {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 4096;
  config.top_k = 8;
  config.n_experts = 32;
  config.max_tokens = 64;
  return config;
}

TEST(Force, RanksThatForceDifferentlyHearOfIt) {
  const auto says_force = [](moecclResult_t got) {
    EXPECT_EQ(got, moecclMismatch);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("moecclPlanForce"), std::string::npos)
        << moecclGetLastError(nullptr);
  };
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpDispatch, rank == 0 ? "flat" : "hier:1"), comm);
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = 16, config.type = moecclFloat32, config.top_k = 1, config.n_experts = 2;
    config.max_tokens = 4;
    moecclMoe_t moe = nullptr;
    says_force(moecclMoeCreate(&moe, comm, &config));
  });
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, rank == 0 ? "ring" : "tree"), comm);
    std::vector<float> in(100'000, 1), out(in.size());
    says_force(moecclAllReduce(in.data(), out.data(), in.size(), moecclFloat32, moecclSum, comm, nullptr));
  });
}

TEST(Force, ALayerRunsTheForcedAlgorithmIfItsConfigLeavesTheChoiceOpen) {
  RankOptions options;
  options.config.topology = kTopology;
  run_ranks(
      kRanksOfTopology,
      [](int, moecclComm_t comm) {
        moecclMoeConfig_t config = layer_config();
        for (const char* forced : {"flat", "hier:1", "hier:2"}) {
          MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpDispatch, forced), comm);
          for (const char* open : kOpen) {
            config.algorithm = open;
            const MadeLayer made = layer_of(comm, config);
            EXPECT_EQ(made.algorithm, forced) << (open == nullptr ? "NULL" : open);
            EXPECT_NE(made.page.find(", forced;"), std::string::npos) << made.page;
          }
          config.algorithm = "2dh";
          EXPECT_EQ(layer_of(comm, config).algorithm, "2dh") << "the config names an algorithm";
        }
      },
      options);
}

TEST(Force, ALayerThatTheForcedAlgorithmDoesNotFitRunsAnother) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.topology = kTopology;
  options.config.staging_bytes = 1 << 18;
  run_ranks(
      kRanksOfTopology,
      [&](int rank, moecclComm_t comm) {
        moecclMoeConfig_t config = layer_config();
        config.staging_bytes = options.config.staging_bytes;
        const char* too_large = nullptr;  // needs more staging than there is, while another algorithm does not
        const auto check = [&](const char* algorithm) {
          config.algorithm = algorithm;
          return moecclMoeCheck(&config, kRanksOfTopology, kTopology, nullptr, 0);
        };
        for (config.hidden_bytes = 64; check(nullptr) == moecclSuccess;
             config.hidden_bytes += config.hidden_bytes / 8) {
          for (const char* name : {"flat", "2dh", "hier:1", "hier:2"})
            if (check(name) == moecclOutOfMemory) too_large = name;
          if (too_large != nullptr) break;
        }
        ASSERT_NE(too_large, nullptr);
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpDispatch, too_large), comm);
        const std::string note = std::string(too_large) + " is forced but does not apply";
        const std::string log = log_of([&] {
          for (const char* open : kOpen) {
            config.algorithm = open;
            const MadeLayer made = layer_of(comm, config);
            EXPECT_NE(made.algorithm, too_large);
            EXPECT_NE(made.page.find(note), std::string::npos) << made.page;
            EXPECT_NE(made.page.find("MOECCL_STAGING_BYTES"), std::string::npos) << made.page;
          }
        });
        EXPECT_EQ(times(log, note), rank == 0 ? 1u : 0u) << log;
        config.algorithm = too_large;
        moecclMoe_t moe = nullptr;
        EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclOutOfMemory) << "the config's own algorithm";
      },
      options);
}

// All experts are on all ranks.
struct Everywhere {
  explicit Everywhere(int n_experts) : n(static_cast<size_t>(n_experts)) {
    for (int r = 0; r < kRanksOfTopology; ++r)
      for (int e = 0; e < n_experts; ++e) slots.push_back(e);
    placement.n_experts = n_experts;
    placement.slots_per_rank = n_experts;
    placement.slot_expert = slots.data();
  }
  Everywhere(const Everywhere&) = delete;
  Everywhere& operator=(const Everywhere&) = delete;
  size_t n;
  std::vector<int32_t> slots;
  moecclPlacement_t placement = MOECCL_PLACEMENT_INIT;
};

constexpr size_t kExpertElements = 100;

// Returns the number of experts from which on the forced algorithm gives way, or 0.
int experts_that_do_not_fit(moecclComm_t comm, moecclOp_t op, const char* forced) {
  MOECCL_EXPECT_COMM_OK(moecclPlanForce(comm, op, forced), comm);
  const std::string note = std::string(forced) + " is forced but does not apply";
  for (int n = 1; n <= 4096; n += 1 + n / 16) {
    const Everywhere all(n);
    std::string page(1 << 20, '\0');
    const moecclResult_t result = moecclExpertExplain(comm, op, kExpertElements, moecclFloat32, &all.placement,
                                                      page.data(), page.size(), nullptr);
    if (result != moecclSuccess) return 0;
    if (page.find(note) != std::string::npos) return n;
  }
  return 0;
}

TEST(Force, SumsOfExpertsGiveWayWhereTheForcedAlgorithmDoesNotFit) {
  RankOptions options;
  options.config.topology = kTopology;
  options.config.staging_bytes = 1 << 18;
  run_ranks(
      kRanksOfTopology,
      [](int, moecclComm_t comm) {
        // The ranks are threads, so that "direct" needs no staging.
        const int many = experts_that_do_not_fit(comm, moecclOpExpertAllReduce, "flat");
        ASSERT_GT(many, 1);
        const Everywhere all(many);
        const std::vector<float> in(all.n * kExpertElements, 1);
        std::vector<float> out(in.size());
        MOECCL_EXPECT_COMM_OK(moecclExpertAllReduce(in.data(), out.data(), kExpertElements, moecclFloat32, moecclSum,
                                                    &all.placement, comm, nullptr),
                              comm);
        EXPECT_EQ(out, std::vector<float>(in.size(), kRanksOfTopology));
        // "nodes" needs more staging than "direct".
        const int more = experts_that_do_not_fit(comm, moecclOpReduceGradients, "nodes");
        ASSERT_GT(more, 1);
        for (const char* forced : {"nodes", static_cast<const char*>(nullptr)}) {
          MOECCL_EXPECT_COMM_OK(moecclPlanForce(comm, moecclOpReduceGradients, forced), comm);
          const Everywhere each(more);
          const std::vector<float> slots(each.n * kExpertElements, 1);
          const size_t shard = moecclExpertShard(kExpertElements, kRanksOfTopology);
          std::vector<float> shards(each.n * shard);
          MOECCL_EXPECT_COMM_OK(moecclReduceGradients(slots.data(), shards.data(), kExpertElements, moecclFloat32,
                                                      moecclSum, &each.placement, comm, nullptr),
                                comm);
          EXPECT_EQ(shards, std::vector<float>(shards.size(), kRanksOfTopology));
        }
      },
      options);
}

// The variable is for all communicators of a process, so a communicator that it does not suit only warns.
TEST(Force, TheEnvironmentDoesNotKeepACommunicatorFromBeingMade) {
  setenv("MOECCL_PLAN", "allreduce:hier,alltoall:flat", 1);
  run_ranks(2, [](int, moecclComm_t comm) {
    EXPECT_STREQ(ask(comm, moecclOpAllToAll, 1000).algorithm, "flat");
    EXPECT_STREQ(ask(comm, moecclOpAllReduce, 1000).forced, "hier");
    EXPECT_NE(std::string(ask(comm, moecclOpAllReduce, 1000).note).find("groups of ranks"), std::string::npos);
    float one = 1;
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&one, &one, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(one, 2);
  });
  unsetenv("MOECCL_PLAN");
}

}  // namespace
}  // namespace moeccl::testing
